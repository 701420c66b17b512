"""What records a device's work to have it repeated: CUDA graphs.

Knows nothing of models. See https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs: a graph repeats the same
kernels on the same addresses, without Python and without a launch for each.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch

from mlserver_torch_stream.engine.device_sync import no_waits


class GraphCapture(Protocol):
    """Records in parts: work between ``begin`` and ``end`` is recorded, work outside of them is only done."""

    def begin(self, device: torch.device) -> None: ...

    def end(self) -> Callable[[], None]:
        """What repeats the part that ends here, on the tensors that it was recorded on."""

    def recording(self) -> AbstractContextManager[None]:
        """A context around all parts of a recording, which leaves nothing half recorded should it raise."""


class DryRun:
    """Does the work and records nothing: the first calls of a kernel set up what must not be recorded.

    Raises Waits for what cannot be recorded. A device must not be the one to find out: before torch 2.13 an allocator
    never learns that a recording broke off, and what was laid aside for it is lost.
    """

    def __init__(self) -> None:
        self._part = ExitStack()

    def begin(self, device: torch.device) -> None:
        self._part.enter_context(no_waits())

    def end(self) -> Callable[[], None]:
        self._part.close()
        return lambda: None

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self._part:
            yield


class CudaGraphCapture:
    """All graphs of a device share a pool of memory: each is replayed from its first part to its last, one at a time.

    A recording only notes what is to be done: what is in its tensors means nothing before the first replay. torch wants
    one recording at a time in a process, which the caller sees to.
    """

    def __init__(self) -> None:
        self._pools: dict[torch.device, Any] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._part = ExitStack()

    def begin(self, device: torch.device) -> None:
        if device not in self._pools:
            self._pools[device] = torch.cuda.graph_pool_handle()
            self._streams[device] = torch.cuda.Stream(device)
        # The usual stream cannot be recorded.
        self._part.enter_context(torch.cuda.stream(self._streams[device]))
        self._part.push(partial(self._clean_up, device))
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local": other models of this process go on serving, and allocate, meanwhile.
        self._graph.capture_begin(pool=self._pools[device], capture_error_mode="thread_local")

    def end(self) -> Callable[[], None]:
        graph, self._graph = self._graph, None
        assert graph is not None
        with self._part.pop_all():
            graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay

    def _clean_up(self, device: torch.device, kind: type[BaseException] | None, *_: object) -> None:
        """After a recording that broke off: else torch goes on believing in it, and refuses to give memory back."""
        if kind is not None:
            with suppress(RuntimeError):  # newer ones of torch have done it
                torch._C._cuda_endAllocateToPool(device.index, self._pools[device])

    @contextmanager
    def recording(self) -> Iterator[None]:
        torch.cuda.synchronize()
        collects = gc.isenabled()
        gc.disable()  # it might find a graph that nobody uses, and to destroy one breaks a recording
        try:
            yield
        finally:
            if self._graph is not None:
                with suppress(RuntimeError):  # that the recording failed, which what broke it has said already
                    self.end()
            if collects:
                gc.enable()
