"""How forwards in several threads pass through a model's stages: one in each stage at a time, in the order of asking.

Knows nothing of rows or caches. A thread runs the model's whole forward; hooks on the modules of the device map hand
it from stage to stage, so that no model's code is cut.

With ``serial_python`` only one of the threads runs Python in a stage at a time, until it waits for the next one or for
its device. torch gives the interpreter lock away with every operation: threads that compete for it wake each other each
time, and a stage's 1.4 ms of Python took 4 ms beside three others (benchmarks/LOG.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.kv_cache.row_cache import RowCache
from mlserver_torch_stream.engine.pipeline.stages import Stage
from mlserver_torch_stream.engine.pipeline.transfer import Transfers
from mlserver_torch_stream.engine.process_resources import FairLock

T = TypeVar("T")


class Pipeline:
    """The stages of one copy of the weights, whichever engines use it.

    ``threads``: of torch's, in a thread. ``serial_python``: not for models whose code waits for a device midway, and
    would have all others wait with it.
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
        """What ``forward`` returns or raises; waits before each stage until it is free, and leaves the last one."""
        position = self._here.position = _StagePosition(self._python)
        try:
            return forward()
        finally:
            self._here.position = None
            position.leave()

    def enter(self, stage: Stage) -> None:
        """Waits for it in a ``run``; whoever calls otherwise has the model for himself: the checks at load."""
        if self._position is not None:
            self._position.enter(stage)

    def bring(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """What an earlier stage has left, where the next one is fastest to copy it from."""
        brought = None if self._position is None else self._transfers.bring((tensor,), {}, device)
        return tensor if brought is None else brought[0][0]

    def aside(self, device: torch.device) -> AbstractContextManager[object]:
        """For what is made of a forward that is through, while others are in its last stage."""
        return self._transfers.aside(device)

    def _enter(
        self, stage: Stage, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.enter(stage)
        return None if self._position is None else self._transfers.bring(args, kwargs, stage.device)

    @property
    def _position(self) -> _StagePosition | None:
        """Of this thread."""
        return getattr(self._here, "position", None)


class _StagePosition:
    """Where one forward is. It never holds two stages, nor Python's turn while it waits, so none waits in a circle."""

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
        # Not before: a model's inputs go to its first device, where they wait for the rows that are there.
        if self._python is not None:
            self._python_lock.enter_context(self._python)

    def leave(self) -> None:
        """Lets the next one in, once the device is done: what is queued on it would be in the next one's way."""
        stage, self._stage = self._stage, None
        self._python_lock.close()
        with self._stage_lock.pop_all():
            if stage is not None:
                stage.finish()


class StagedForward:
    """A ``Forward`` that passes through the stages."""

    def __init__(self, forward: Forward, pipeline: Pipeline) -> None:
        self._forward = forward
        self._pipeline = pipeline

    def __call__(self, tokens: Sequence[Sequence[int]], cache: RowCache) -> torch.Tensor:
        return self._pipeline.run(lambda: self._forward(tokens, cache))
