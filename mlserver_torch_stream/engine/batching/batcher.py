"""Defines the interface of a batcher, which the engine's thread steps, and the batcher of a dead engine.

Knows nothing of threads or event loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from mlserver_torch_stream.engine.api import EngineStats
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.step_progress import StepProgress

_GAUGES = (
    "running_sequences",
    "waiting_requests",
    "waiting_tokens",
    "prefilling_requests",
    "open_prompts",
    "kv_cache_bytes",
)

Deliver = Callable[[Sequence[SequenceState]], None]


class Batcher(Protocol):
    """Generates the tokens of its requests. All methods but ``refusal`` and ``stats`` run on the engine's thread."""

    progress: StepProgress
    """The batcher reports here the work that its steps do."""

    def refusal(self, rows: int, prompt: int, final_length: int) -> str | None:
        """Returns why a request of this size could never run; None if it can."""

    def add(self, request: RequestState) -> None: ...

    def evict(self, requests: Sequence[RequestState]) -> None:
        """Frees all memory of these requests: before it returns or, in a long step, at the next token."""

    def step(self, deliver: Deliver, poll: Callable[[], object]) -> bool:
        """Does some work; returns False if there was none. A long step calls ``poll`` once per token."""

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Returns when no forward of it runs any more. It is not stepped again."""


class DeadBatcher:
    """Replaces a batcher that died: it does nothing, holds no memory and keeps the counters."""

    def __init__(self, last: EngineStats) -> None:
        gone = dict.fromkeys(_GAUGES, 0)
        self._stats = replace(last, **gone)
        self.progress = StepProgress()

    def refusal(self, rows: int, prompt: int, final_length: int) -> str | None:
        return None

    def add(self, request: RequestState) -> None:
        pass

    def evict(self, requests: Sequence[RequestState]) -> None:
        pass

    def step(self, deliver: Deliver, poll: Callable[[], object]) -> bool:
        return False

    def stats(self) -> EngineStats:
        return self._stats

    def close(self) -> None:
        pass
