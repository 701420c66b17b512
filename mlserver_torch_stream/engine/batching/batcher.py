"""What a worker steps: the interface of the batched and the serial engine, and what is left of a dead one.

Knows nothing of threads or event loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from mlserver_torch_stream.engine.api import EngineStats
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.step_progress import StepProgress

_WORK = (
    "running_sequences",
    "waiting_requests",
    "waiting_tokens",
    "prefilling_requests",
    "open_prompts",
    "kv_cache_bytes",
)

Deliver = Callable[[Sequence[SequenceState]], None]


class Batcher(Protocol):
    """What a worker steps. All methods run on its thread, but for ``refusal`` and ``stats``."""

    progress: StepProgress
    """It says here what its steps are at."""

    def refusal(self, rows: int, prompt: int, final_length: int) -> str | None:
        """Why a request of this size could never run; None if it can."""

    def add(self, request: RequestState) -> None: ...

    def evict(self, requests: Sequence[RequestState]) -> None:
        """Frees all that these requests hold, before it returns or (for what runs in a long step) at the next token."""

    def step(self, deliver: Deliver, poll: Callable[[], object]) -> bool:
        """Does a piece of work; False if there was nothing to do. A long piece calls ``poll`` once per token."""

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Returns when nothing of it runs any more; it is not stepped again."""


class DeadBatcher:
    """Stands for a backend that died: it does nothing, lets go of all memory and keeps the counters."""

    def __init__(self, last: EngineStats) -> None:
        gone = dict.fromkeys(_WORK, 0)
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
