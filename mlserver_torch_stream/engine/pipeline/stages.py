"""Runs the stages of a device map: locks keep batches in order, and tensors are copied between devices.

Copies have their own streams: on the source GPU's default stream, the copy of one batch would wait until that GPU has
computed the next batch. The whole forward of a batch runs in one thread. Hooks on the modules of the device map take
the locks of the stages, so the model's code need not be split.

With ``serial_python`` only one thread runs Python, until it waits for the next stage or for its device. Without it, the
threads compete for the interpreter lock, because every operation of torch releases the lock and wakes another thread:
beside three other stages, a stage's 1.4 ms of Python took 4 ms (benchmarks/LOG.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import transformers
from torch import nn

from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch
from mlserver_torch_stream.engine.devices import computing_device, execution_device
from mlserver_torch_stream.engine.forward.interface import Forward, Logits
from mlserver_torch_stream.engine.watchdog import FairLock


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """The modules that one device computes. Modules need not be consecutive: a tied head is on the embedding's device.

    ``finish`` returns when the device has completed this thread's work.
    """

    name: str
    device: torch.device
    modules: tuple[nn.Module, ...]
    finish: Callable[[], None]
    lock: FairLock = field(default_factory=FairLock)


def read_stages(model: transformers.PreTrainedModel) -> tuple[Stage, ...]:
    """Returns the stages in the order of the device map; at most one if one device computes everything."""
    modules_on: dict[str, list[nn.Module]] = {}
    for name, place in (getattr(model, "hf_device_map", None) or {}).items():
        try:
            module = model.get_submodule(name)
        except AttributeError:  # a single parameter belongs to the stage of the module around it
            continue
        modules_on.setdefault(computing_device(module, place), []).extend(_called(module))
    devices = {name: _device(modules) for name, modules in modules_on.items()}
    return tuple(
        Stage(name, devices[name], tuple(modules), partial(_synchronise, devices[name]))
        for name, modules in modules_on.items()
    )


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the module. For a container, yields its children, because a container's ``forward`` is never called."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for child in module.children():
            yield from _called(child)
    else:
        yield module


def _device(modules: list[nn.Module]) -> torch.device:
    held = (parameter.device for module in modules for parameter in module.parameters())
    device: torch.device | None = next((each for each in held if each.type != "meta"), None)
    if device is not None:
        return device
    return torch.device(next((place for each in modules if (place := execution_device(each)) is not None), "cpu"))


class Transfers:
    """Copies tensors between devices.

    If there are several GPUs, each has two streams: one for copies and one for work on outputs.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        gpus = [device for device in devices if device.type == "cuda"]
        self._streams = {device: torch.cuda.Stream(device) for device in gpus} if len(gpus) > 1 else {}
        self._asides = {device: torch.cuda.Stream(device) for device in self._streams}

    def aside(self, device: torch.device) -> AbstractContextManager[object]:
        """Returns a stream for work on complete outputs. Such work does not wait for the work of other batches."""
        return torch.cuda.stream(self._asides[device]) if device in self._asides else nullcontext()

    def bring(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Returns a module's arguments with all tensors on ``device``; None if all are there already."""
        if device not in self._streams:
            return None
        return self._moved(args, device), self._moved(kwargs, device)

    def _moved(self, value: Any, device: torch.device) -> Any:
        if isinstance(value, torch.Tensor):
            away = value.device != device and value.device in self._streams
            return self._copy(value, device) if away else value
        if type(value) in (tuple, list):
            return type(value)(self._moved(each, device) for each in value)
        if type(value) is dict:
            return {key: self._moved(each, device) for key, each in value.items()}
        return value

    def _copy(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copies a tensor without waiting for the source GPU: a batch leaves a stage only after its GPU is done."""
        source, target = self._streams[value.device], self._streams[device]
        with torch.cuda.stream(source), torch.cuda.stream(target):
            copied = value.to(device, non_blocking=True)
        # The allocator must not reuse either memory block before both streams are done with it.
        value.record_stream(source)
        user = torch.cuda.current_stream(device)
        copied.record_stream(user)
        user.wait_stream(target)
        return copied


T = TypeVar("T")


class Pipeline:
    """The stages of one copy of the weights, which several engines can use.

    Each of our threads uses ``threads`` torch threads. ``serial_python`` is not for models whose code waits for a
    device midway, because all other forwards would wait, too.
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
        """The number of stages."""
        return len(self.stages)

    def run(self, forward: Callable[[], T]) -> T:
        """Runs ``forward``, which waits before each stage until the stage is free. At the end, frees the last stage."""
        position = self._here.position = _StagePosition(self._python)
        try:
            return forward()
        finally:
            self._here.position = None
            position.leave()

    def aside(self, device: torch.device) -> AbstractContextManager[object]:
        """Returns a stream for work on a complete forward's output, while other forwards are in the last stage."""
        return self._transfers.aside(device)

    def _enter(
        self, stage: Stage, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Inside ``run``, waits for the stage.

        Outside of ``run``, for example in the checks at load, no other forward runs.
        """
        # The stage that this thread's forward has reached.
        position: _StagePosition | None = getattr(self._here, "position", None)
        if position is None:
            return None
        position.enter(stage)
        return self._transfers.bring(args, kwargs, stage.device)


class _StagePosition:
    """The stage of one forward.

    To avoid deadlocks, a forward never holds the locks of two stages, and releases the Python lock before it waits.
    """

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
        # Taken only now, because a model's inputs go to its first device and wait there for the previous batch.
        if self._python is not None:
            self._python_lock.enter_context(self._python)

    def leave(self) -> None:
        """Waits until the device is done and then frees the stage, because queued work would delay the next forward."""
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
