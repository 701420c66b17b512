"""What CUDA's recorder asks of torch, and what it leaves behind when a recording breaks off.

Without a GPU torch's own calls are written down instead: this shows their order, not that CUDA takes them.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mlserver_torch_stream.engine.cuda_graphs.graph_capture import CudaGraphCapture

DEVICE = torch.device("cuda", 1)


class Calls:
    """Of torch's, in order; ``broken``: what CUDA was asked for in a recording has ended it."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.broken = False

    def graph(self) -> Any:
        return _Graph(self)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.made.append(("on", stream))
        try:
            yield
        finally:
            self.made.append(("off", stream))


class _Graph:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def capture_begin(self, **options: Any) -> None:
        self._calls.made.append(("begin", options["pool"], options["capture_error_mode"], gc.isenabled()))

    def capture_end(self) -> None:
        self._calls.made.append("end")
        if self._calls.broken:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self._calls.made.append("replay")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    pools = iter(range(9))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: ("pool", next(pools)))
    monkeypatch.setattr(torch.cuda, "Stream", str)
    monkeypatch.setattr(torch.cuda, "stream", calls.stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", calls.graph)
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", lambda *what: calls.made.append(("no more to", *what)), raising=False
    )
    return calls


def test_parts_share_a_stream_and_a_pool_and_nothing_is_collected_meanwhile(calls: Calls) -> None:
    recorder = CudaGraphCapture()
    with recorder.recording():
        for _ in range(2):
            recorder.begin(DEVICE)
            replay = recorder.end()
    replay()
    part = [("on", "cuda:1"), ("begin", ("pool", 0), "thread_local", False), "end", ("off", "cuda:1")]
    assert calls.made == [*part, *part, "replay"]
    assert gc.isenabled()


def test_a_recording_that_breaks_off_leaves_nothing_behind(calls: Calls) -> None:
    recorder = CudaGraphCapture()
    with pytest.raises(ValueError, match="of the model"), recorder.recording():
        recorder.begin(DEVICE)
        calls.broken = True
        calls.made.clear()
        raise ValueError("of the model")
    assert calls.made == ["end", ("no more to", 1, ("pool", 0)), ("off", "cuda:1")]
    assert gc.isenabled()


def test_a_part_that_cannot_be_ended_says_so(calls: Calls) -> None:
    recorder = CudaGraphCapture()
    with pytest.raises(RuntimeError, match="previous error"), recorder.recording():
        recorder.begin(DEVICE)
        calls.broken = True
        recorder.end()
    assert calls.made[-2:] == [("no more to", 1, ("pool", 0)), ("off", "cuda:1")]
