"""A server over vLLM itself: a SIGTERM lets streams end, and nothing of vLLM outlives the server. Takes minutes."""

from __future__ import annotations

import json
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from mlserver_torch_stream.handlers.worker.subreaper import shared_memory
from tests import plain_http
from tests.engine.real_vllm import NEEDS_VLLM, UNLIKELY_S, descendants, save_tiny
from tests.server import openai
from tests.server.harness import Server
from tests.server.vllm_server import vllm_server

pytestmark = NEEDS_VLLM
_LEFT_S = 120.0
_TOKENS = 200


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short name; with a long one, the server would put the worker's folder elsewhere."""
    return tmp_path_factory.mktemp("v")


def _served(folder: Path) -> AbstractContextManager[Server]:
    return vllm_server(folder, save_tiny("llama", folder / "weights"))


def _files_of_vllm(server: Server, folder: Path) -> set[Path]:
    """The processes below the server, their shared memory, and the worker's folder."""
    pids = descendants(server.process.pid)
    assert len(pids) >= 3  # the subreaper, the worker, its engine core
    shared = shared_memory(server.process.pid)
    assert shared
    folders = list(folder.glob("vllm-*"))
    assert folders
    return {*(Path(f"/proc/{pid}") for pid in pids), *(Path("/dev/shm", name) for name in shared), *folders}


def _end_of(files: set[Path]) -> None:
    end = time.monotonic() + _LEFT_S
    while left := [file for file in files if file.exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def test_a_sigterm_in_mid_stream_lets_the_stream_end_and_leaves_no_process(place: Path) -> None:
    with _served(place) as server:
        files = _files_of_vllm(server, place)
        asked = openai.prompt(max_tokens=_TOKENS, ignore_eos=True, stream=True)
        reasons, chunks = [], 0
        with plain_http.stream("POST", f"{server.url}{openai.TEXT}", json=asked, timeout=UNLIKELY_S) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunks += 1
                if chunks == 1:
                    server.process.send_signal(signal.SIGTERM)
                reasons += [choice["finish_reason"] for choice in json.loads(line[6:])["choices"]]
        assert reasons[-1] == "length"
        assert server.process.wait(_LEFT_S) == 0
        _end_of(files)


def test_nothing_of_vllm_outlives_a_server_that_is_killed(place: Path) -> None:
    with _served(place) as server:
        files = _files_of_vllm(server, place)
        server.process.kill()
        _end_of(files)
