"""Passes forwards of several threads through a model's stages: one in each stage at a time, in the order of asking.

Knows nothing of batches or caches. A thread runs the model's whole forward; hooks on the modules of the device map take
the locks of the stages, so that no model's code is cut.

With ``serial_python`` only one thread runs Python at a time, until it waits for the next stage or for its device. torch
releases the interpreter lock in every operation: threads that compete for it wake each other each time, and a stage's
1.4 ms of Python took 4 ms beside three others (benchmarks/LOG.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from mlserver_torch_stream.engine.batch import Batch
from mlserver_torch_stream.engine.forward.interface import Forward, Logits
from mlserver_torch_stream.engine.kv_cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.pipeline.stages import Stage
from mlserver_torch_stream.engine.pipeline.transfer import Transfers
from mlserver_torch_stream.engine.process_resources import FairLock

T = TypeVar("T")


class Pipeline:
    """The stages of one copy of the weights, which several engines can use.

    Each thread has ``threads`` of torch's. ``serial_python`` is not for models whose code waits for a device midway:
    all other forwards would wait too.
    """

    def __init__(self, stages: Sequence[Stage], threads: int = 1, serial_python: bool = True) -> None:
        self.stages = tuple(stages)
        self.threads = threads
        self._here = threading.local()
        self._python = FairLock() if serial_python else None
        self._transfers = Transfers({stage.device for stage in self.stages})
        for stage in self.stages:
            for module in stage.modules:
                module.register_forward_pre_hook(partial(self._enter, stage), with_kwargs=True)

    @property
    def depth(self) -> int:
        return len(self.stages)

    def run(self, forward: Callable[[], T]) -> T:
        """Runs ``forward``, which waits before each stage until that is free, and leaves the last stage afterwards."""
        position = self._here.position = _StagePosition(self._python)
        try:
            return forward()
        finally:
            self._here.position = None
            position.leave()

    def enter(self, stage: Stage) -> None:
        """Waits for the stage inside ``run``. Outside of it, in the checks at load, no other forward runs."""
        if self._position is not None:
            self._position.enter(stage)

    def bring(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copies an earlier stage's tensor to the next stage's device, on a stream for transfers."""
        brought = None if self._position is None else self._transfers.bring((tensor,), {}, device)
        return tensor if brought is None else brought[0][0]

    def aside(self, device: torch.device) -> AbstractContextManager[object]:
        """Returns a stream for work on a complete forward's output, while other forwards are in the last stage."""
        return self._transfers.aside(device)

    def _enter(
        self, stage: Stage, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.enter(stage)
        return None if self._position is None else self._transfers.bring(args, kwargs, stage.device)

    @property
    def _position(self) -> _StagePosition | None:
        """The position of this thread's forward."""
        return getattr(self._here, "position", None)


class _StagePosition:
    """The stage of one forward. It never holds two stages, nor the Python lock while it waits: none deadlocks."""

    def __init__(self, python: FairLock | None) -> None:
        self._stage: Stage | None = None
        self._stage_lock = ExitStack()
        self._python = python
        self._python_lock = ExitStack()

    def enter(self, stage: Stage) -> None:
        if stage is self._stage:
            return
        self.leave()
        self._stage_lock.enter_context(stage.lock)
        self._stage = stage
        # Not before: a model's inputs go to its first device, where they wait for the batch that is there.
        if self._python is not None:
            self._python_lock.enter_context(self._python)

    def leave(self) -> None:
        """Frees the stage for the next forward, once the device is done: queued work would delay the next forward."""
        stage, self._stage = self._stage, None
        self._python_lock.close()
        with self._stage_lock.pop_all():
            if stage is not None:
                stage.finish()


class StagedForward:
    """A ``Forward`` that passes through the stages of a pipeline."""

    def __init__(self, forward: Forward, pipeline: Pipeline) -> None:
        self._forward = forward
        self._pipeline = pipeline

    def __call__(self, batch: Batch, cache: PagedCache) -> Logits:
        return self._pipeline.run(lambda: self._forward(batch, cache))
