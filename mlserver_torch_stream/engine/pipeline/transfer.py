"""Copies tensors from one GPU to the next, and out of the last one, on streams of their own.

Knows nothing of stages. CUDA runs the work of one stream in order. On the default stream of the source GPU, the copy
of a batch would wait until that GPU has computed the next batch. On a stream of its own, both run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Transfers:
    """Has two streams per GPU, for copies and for work on outputs; none if there is only one GPU."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        gpus = [device for device in devices if device.type == "cuda"]
        self._streams = {device: torch.cuda.Stream(device) for device in gpus} if len(gpus) > 1 else {}
        self._asides = {device: torch.cuda.Stream(device) for device in self._streams}

    def aside(self, device: torch.device) -> AbstractContextManager[object]:
        """Returns a stream for work on complete outputs, which is not queued behind the work of other batches."""
        return torch.cuda.stream(self._asides[device]) if device in self._asides else nullcontext()

    def bring(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Returns a module's arguments with their tensors on ``device``; None if they can stay as they are."""
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
        """Needs no wait for the source: a batch leaves a stage only after the stage's GPU has computed it."""
        source, target = self._streams[value.device], self._streams[device]
        with torch.cuda.stream(source), torch.cuda.stream(target):
            copied = value.to(device, non_blocking=True)
        # The allocator must not reuse either block before both streams are done with it.
        value.record_stream(source)
        user = torch.cuda.current_stream(device)
        copied.record_stream(user)
        user.wait_stream(target)
        return copied
