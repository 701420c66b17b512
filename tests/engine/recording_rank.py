"""A rank that records its decode steps as one with a GPU captures them.

``python -m tests.engine.recording_rank RANK SIZE PORT PARENT``. The file that RECORDER names says which recorder it
has; RECORDER with the suffix ``.replays`` gets the number of its replays so far.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mlserver_torch_stream.engine import ranks
from mlserver_torch_stream.engine.attention.cuda_choice import CudaAttention, GatheredAttention
from mlserver_torch_stream.engine.attention.cuda_gathered import gathered_attention
from mlserver_torch_stream.engine.attention.paged_attention import PagedAttention
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.rank_main import main
from mlserver_torch_stream.engine.shared_pool import PROCESS
from tests.engine.tape import TapeRecorder


def attends_as_on_cuda(
    expected: Any, findings: Any, *_: Any, attention: PagedAttention = gathered_attention
) -> tuple[ModelForward, str]:
    """Replaces ``ranks._choose_forward``: what computes on CPUs are kernels whose calls no tape sees."""
    return ModelForward(expected.model, findings.way, attention), "gathered keys"


class _CopiesKeys(CudaAttention):
    """Asks for narrow tables, unlike what the test's own process attends with."""

    @property
    def copies_keys(self) -> bool:
        return True


class _Counting(TapeRecorder):
    def end(self) -> Callable[[], None]:
        replay = super().end()

        def counted() -> None:
            replay()
            _replays.write_text(str(int(_replays.read_text()) + 1))

        return counted


class _NoMemory(TapeRecorder):
    """Fails after the last collective of a step, as CUDA does where it has no memory for a graph."""

    def end(self) -> Callable[[], None]:
        super().end()
        raise RuntimeError("no memory for a graph")


class _Breaks(TapeRecorder):
    """Fails before the collectives of a step, for which the other ranks then wait."""

    def begin(self, device: torch.device, pool: object = None) -> None:
        raise RuntimeError("no capture")


class _Dies(TapeRecorder):
    def end(self) -> Callable[[], None]:
        os._exit(7)


_RECORDERS: dict[str, Callable[[], TapeRecorder | None]] = {
    "counts": _Counting,
    "has no memory": _NoMemory,
    "breaks": _Breaks,
    "dies": _Dies,
    "has none": lambda: None,
}

if __name__ == "__main__":
    recorder = Path(os.environ["RECORDER"])
    _replays = recorder.with_suffix(".replays")
    _replays.write_text("0")
    PROCESS.capture_on = lambda kind: _RECORDERS[recorder.read_text()]()
    attention = _CopiesKeys([("gathered keys", GatheredAttention())])
    ranks._choose_forward = partial(attends_as_on_cuda, attention=attention)  # type: ignore[assignment]
    sys.exit(main(sys.argv[1:]))
