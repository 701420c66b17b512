"""What keeps a model out of MLServer's inference workers, its error inside one, and what garbage collections visit."""

from __future__ import annotations

import subprocess
import sys

import pytest
from mlserver import ModelSettings
from mlserver.rest.server import RESTServer

from mlserver_torch_stream.server import patches
from mlserver_torch_stream.server.state import server_state
from tests.server.harness import PACKAGE_SPELLING

_INSIDE_A_WORKER = """
from mlserver.parallel.worker import Worker
from mlserver.settings import Settings
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.server.patches import refuse_worker_process

class Probe(Worker):
    def run(self):
        try:
            refuse_worker_process()
        except LoadFailed as error:
            print(error, flush=True)

if __name__ == "__main__":
    from multiprocessing import Queue
    refuse_worker_process()
    probe = Probe(Settings(), Queue())
    probe.start()
    probe.join(60)
"""


@pytest.mark.long
def test_inside_a_worker_loading_is_refused_with_what_to_do() -> None:
    probe = subprocess.run([sys.executable, "-c", _INSIDE_A_WORKER], capture_output=True, text=True, timeout=120)
    assert "set parallel_workers to 0" in probe.stdout, probe.stderr


def test_a_model_asks_for_no_workers_whatever_the_server_has() -> None:
    settings = ModelSettings(name="m", implementation=PACKAGE_SPELLING, parallel_workers=4)
    patches.keep_out_of_workers(settings)
    assert settings.model_dump()["parallel_workers"] == 0


def test_installing_the_guards_twice_changes_nothing() -> None:
    patches.install(server_state())
    once = RESTServer.add_custom_handlers
    patches.install(server_state())
    assert RESTServer.add_custom_handlers is once


_VISITED = """
import gc
from mlserver_torch_stream import GuardedModelRepository
GuardedModelRepository(".")
print(gc.get_freeze_count(), len(gc.get_objects()))
"""


@pytest.mark.long
def test_garbage_collections_skip_what_a_server_has_imported() -> None:
    probe = subprocess.run([sys.executable, "-c", _VISITED], capture_output=True, text=True, timeout=120)
    skipped, visited = map(int, probe.stdout.split())
    assert skipped > 100 * visited, probe.stderr
