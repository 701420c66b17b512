"""MLServer's inference workers beside a model of ours: they run other runtimes, whichever uvloop is installed."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from mlserver import Settings
from mlserver.env import Environment
from mlserver.parallel import pool
from mlserver.parallel.worker import Worker

from mlserver_torch_stream import client
from mlserver_torch_stream.server import patches
from mlserver_torch_stream.server.state import server_state
from tests import plain_http
from tests.server.conftest import FOREIGN, QUIET, with_foreign
from tests.server.harness import Model, exit_code, serve

_WITHOUT_A_LOOP = """
import asyncio
from multiprocessing import Queue
from mlserver import Settings
from mlserver.parallel import pool
from mlserver_torch_stream.server import host

if __name__ == "__main__":
    host.use_looped_workers()
    asyncio.set_event_loop(None)  # from now on asyncio makes none when asked, as uvloop 0.22 never does
    pool.Worker(Settings(), Queue())._ignore_signals()
    print("ignored")
"""


@pytest.mark.long
@pytest.mark.skipif(
    "loop" in inspect.signature(Worker._ignore_signals).parameters, reason="this MLServer gives its workers a loop"
)
def test_a_worker_needs_no_event_loop_from_asyncio() -> None:
    ended = subprocess.run([sys.executable, "-c", _WITHOUT_A_LOOP], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "ignored\n", ended.stderr


def test_a_worker_with_an_environment_of_its_own_needs_no_package_of_ours(tmp_path: Path) -> None:
    patches.install(server_state())
    settings = Settings(parallel_workers=1)
    queue = pool.Queue()
    alone = pool.Worker(settings, queue, Environment(str(tmp_path), "hash", delete_env=False))
    assert type(alone) is Worker
    assert type(pool.Worker(settings, queue, None)) is not Worker


@pytest.mark.long
def test_another_runtime_answers_from_a_worker_while_ours_streams(tiny_model: Path, tmp_path: Path) -> None:
    settings = {
        **QUIET,
        "parallel_workers": 1,
        "model_repository_implementation": "mlserver_torch_stream.GuardedModelRepository",
    }
    models = [FOREIGN, Model("tiny", str(tiny_model))]
    with serve(tmp_path / "models", models, settings=settings, environment=with_foreign(tmp_path)) as server:
        body = {"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["word"]}]}
        reply = plain_http.post(f"{server.url}/v2/models/foreign/infer", json=body, timeout=60)
        assert reply.status_code == 200 and reply.json()["outputs"][0]["data"] == ["word"], reply.text
        events = list(client.stream(server.url, "tiny", "The answer", max_tokens=4, ignore_eos=True))
        assert events[-1].num_output_tokens == 4
        server.process.terminate()
        assert exit_code(server) == 0
        assert "stopped unexpectedly" not in server.log and "Traceback" not in server.log
