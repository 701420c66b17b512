"""A load that is cancelled ends at its next stage, module or weight, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from mlserver_torch_stream.engine.build import build_engine
from mlserver_torch_stream.engine.child_process import in_process
from mlserver_torch_stream.engine.loading.gguf import _target
from mlserver_torch_stream.engine.shared_pool import ProcessResources, SharedPool
from mlserver_torch_stream.settings import parse_settings
from mlserver_torch_stream.work_threads import Cancellation, WorkCancelled, in_thread, raise_if_cancelled
from tests.engine.process_jobs import wait_for_ever
from tests.engine.tiny import run, until
from tests.engine.tiny_gguf import write_tiny_gguf

_ENDLESS = """
import time, torch
from transformers import LlamaForCausalLM


class EndlessLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        while True:
            self.register_parameter("weight", torch.nn.Parameter(torch.ones(1)))
            open({arrived!r}, "w").close()
            time.sleep(0.01)
"""


@pytest.fixture
def endless(tiny_model: Path, tmp_path: Path) -> Path:
    """A model folder whose own code adds weights without end, and creates the file ``arrived`` beside the folder."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "endless"))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "endless.EndlessLlama"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "endless.py").write_text(_ENDLESS.format(arrived=str(tmp_path / "arrived")))
    return folder


def test_a_cancelled_load_ends_and_leaves_nothing(endless: Path) -> None:
    resources, cancellation = ProcessResources(), Cancellation()
    resolved = parse_settings(str(endless), {"trust_remote_code": True, "threads": 1}, environ={})

    async def scenario() -> None:
        loading = in_thread(lambda: build_engine(resolved, resources=resources), cancellation)
        await until((endless.parent / "arrived").exists, "the model's code")
        assert not loading.done()
        cancellation.cancel()
        await asyncio.wait([loading], timeout=20)
        assert loading.cancelled()

    run(scenario())
    assert len(resources.engines) == len(resources.weights) == 0


def test_a_cancelled_load_ends_its_process(tmp_path: Path) -> None:
    cancellation, pid_file = Cancellation(), tmp_path / "pid"

    async def scenario() -> None:
        loading = in_thread(lambda: in_process(wait_for_ever, str(pid_file)), cancellation)
        await until(lambda: pid_file.exists() and pid_file.read_text() != "", "the process")
        cancellation.cancel()
        await asyncio.wait([loading], timeout=20)
        assert loading.cancelled()

    run(scenario())
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.parametrize("weights", ["auto", "packed"])
def test_a_load_that_waits_for_another_process_to_convert_its_file_ends_soon_and_holds_up_no_other(
    weights: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, cache = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    resources, cancellation, other = ProcessResources(), Cancellation(), Cancellation()
    extra = {"cache_dir": str(cache), "weights": weights, "threads": 1}
    resolved = parse_settings(str(file), extra, environ={})

    def load_another() -> None:
        with resources.loading_alone():
            pass

    async def scenario() -> None:
        loading = in_thread(lambda: build_engine(resolved, resources=resources), cancellation)
        await until(lambda: "Waiting until another process has converted" in caplog.text, "the wait")
        loading_another = in_thread(load_another, other)
        await asyncio.wait([loading_another], timeout=20)
        assert loading_another.done() and not loading.done()
        cancellation.cancel()
        await asyncio.wait([loading], timeout=20)
        assert loading.cancelled()

    cache.mkdir()
    with caplog.at_level(logging.INFO), FileLock(f"{_target(file, cache, 'auto', weights == 'packed')}.lock"):
        try:
            run(scenario())
        finally:
            cancellation.cancel()
            other.cancel()


def test_another_load_that_waits_for_a_cancelled_one_takes_its_place() -> None:
    pool: SharedPool[str] = SharedPool()
    began, cancellation = threading.Event(), Cancellation()

    def make() -> str:
        began.set()
        while True:
            raise_if_cancelled()

    async def scenario() -> None:
        first = in_thread(lambda: pool.lease("key", make), cancellation)
        await until(began.is_set)
        second = in_thread(lambda: pool.lease("key", lambda: "made"))
        cancellation.cancel()
        assert (await second).value == "made"
        assert first.cancelled()

    run(scenario())
    assert len(pool) == 1


def test_an_interrupt_is_called_once_and_what_it_caused_is_not_reported() -> None:
    cancellation, calls = Cancellation(), []
    with pytest.raises(WorkCancelled), cancellation.interrupted_by(lambda: calls.append(1)):
        cancellation.cancel()
        raise EOFError("the process is gone")
    cancellation.cancel()
    with pytest.raises(WorkCancelled), cancellation.interrupted_by(calls.clear):
        raise AssertionError("the block of cancelled work does not begin")
    assert calls == [1]
