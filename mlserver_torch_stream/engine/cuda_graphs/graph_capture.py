"""Captures the work of a device as CUDA graphs, and checks first that it can be captured.

A graph repeats the same kernels on the same addresses, without Python and without a launch for each kernel:
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch

from mlserver_torch_stream.engine.devices import no_waits


class GraphCapture(Protocol):
    """Captures the work between ``begin`` and ``end``; other work only runs."""

    def begin(self, device: torch.device, pool: object = None) -> None:
        """Work with one ``pool`` shares memory, and must not run at the same time."""

    def end(self) -> Callable[[], None]:
        """Returns a function that repeats the work since ``begin``, on the same tensors."""

    def recording(self) -> AbstractContextManager[None]:
        """Returns a context around all parts of a step. If it raises, no capture stays open."""


def capture_on(kind: str) -> GraphCapture | None:
    """Returns what captures the work of devices of a type, as ``torch.device.type`` names it; None: nothing does."""
    return CudaGraphCapture() if kind == "cuda" else None


class DryRun:
    """Runs the work and captures nothing: the first calls of a kernel compile and tune, which must not be captured.

    Raises DeviceSyncs for work that cannot be captured. The device itself must not fail in a capture: before torch 2.13
    the allocator does not notice that a capture has failed, and the memory reserved for it is lost.
    """

    def __init__(self) -> None:
        self._part = ExitStack()

    def begin(self, device: torch.device, pool: object = None) -> None:
        self._part.enter_context(no_waits())

    def end(self) -> Callable[[], None]:
        self._part.close()
        return lambda: None

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self._part:
            yield


class CudaGraphCapture:
    """All graphs of a stage share a pool of memory: a stage replays them one after the other.

    A capture computes nothing: the tensors of a step are valid from its first replay on. torch allows one capture at a
    time in a process, which the caller ensures.
    """

    def __init__(self) -> None:
        self._pools: dict[tuple[torch.device, object], Any] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._part = ExitStack()

    def begin(self, device: torch.device, pool: object = None) -> None:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        memory = self._pools.setdefault((device, pool), torch.cuda.graph_pool_handle())
        # The default stream cannot be captured.
        self._part.enter_context(torch.cuda.stream(self._streams[device]))
        self._part.push(partial(self._clean_up, device, memory))
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local": other models of this process generate and allocate during the capture.
        self._graph.capture_begin(pool=memory, capture_error_mode="thread_local")

    def end(self) -> Callable[[], None]:
        graph, self._graph = self._graph, None
        assert graph is not None
        with self._part.pop_all():
            graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay

    def _clean_up(self, device: torch.device, memory: Any, kind: type[BaseException] | None, *_: object) -> None:
        """Closes a capture that failed; otherwise torch regards it as running and frees no memory."""
        if kind is not None:
            with suppress(RuntimeError):  # newer versions of torch have closed it
                torch._C._cuda_endAllocateToPool(device.index, memory)

    @contextmanager
    def recording(self) -> Iterator[None]:
        torch.cuda.synchronize()
        collects = gc.isenabled()
        gc.disable()  # a collection that destroys an unused graph breaks a capture
        try:
            yield
        finally:
            if self._graph is not None:
                with suppress(RuntimeError):  # the capture has failed, and its own error is being raised
                    self.end()
            if collects:
                gc.enable()
