"""What records a device's work to have it repeated: CUDA graphs.

Knows nothing of models. See https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs: a graph repeats the same
kernels on the same addresses, without Python and without a launch for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

import torch


class Recorder(Protocol):
    """Records in parts: work between ``begin`` and ``end`` is recorded, work outside of them is only done."""

    def begin(self) -> None: ...

    def end(self) -> Callable[[], None]:
        """What repeats the part that ends here, on the tensors that it was recorded on."""

    def recording(self) -> AbstractContextManager[None]:
        """A context around all parts of a recording, which leaves nothing half recorded should it raise."""


class NoRecorder:
    """Does the work and records nothing: the first calls of a kernel set up what must not be recorded."""

    def begin(self) -> None:
        pass

    def end(self) -> Callable[[], None]:
        return lambda: None

    @contextmanager
    def recording(self) -> Iterator[None]:
        yield


class CudaRecorder:
    """All graphs share a pool of memory: they are replayed one at a time, each from its first part to its last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local": other models of this process go on serving, and allocate, meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Callable[[], None]:
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay

    @contextmanager
    def recording(self) -> Iterator[None]:
        """On a stream of its own: the usual one cannot be recorded."""
        torch.cuda.synchronize(self._device)
        stream = torch.cuda.Stream(self._device)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            self._abandon()
            torch.cuda.synchronize(self._device)

    def _abandon(self) -> None:
        if self._graph is not None:
            with suppress(RuntimeError):  # that the recording failed, which what broke it has said already
                self.end()
