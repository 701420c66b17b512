"""Defines the interface of batchers, which compute the steps of an engine, and replaces a batcher that has died."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from mlserver_torch_stream.engine.api import EngineRequest, EngineStats
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.watchdog import StepProgress
from mlserver_torch_stream.errors import InvalidInput

logger = logging.getLogger(__name__)

# An engine that dies more often than this stays dead, because a new batcher does not remove the cause.
_MAX_DEATHS = 3
_DEATHS_WITHIN = 600.0  # seconds

Deliver = Callable[[Sequence[SequenceState]], None]
Poll = Callable[[], object]
"""Takes in new requests, closed streams, passed deadlines and a shutdown."""
YieldDevice = Callable[[], None]
"""Lets each engine that waits for the same device run a step."""


PROMPT_LOGPROBS = "prompt_logprobs"


def check_unscored(request: EngineRequest, what: str) -> None:
    """Raises InvalidInput if a request asks for its prompt's scores or for no tokens: ``what`` supports neither."""
    if request.sampling.prompt_logprobs is not None:
        raise InvalidInput(PROMPT_LOGPROBS, f"is not implemented for {what}")
    if request.sampling.max_tokens == 0:
        raise InvalidInput("max_tokens", f"0 is not implemented for {what}")


class Batcher(ABC):
    """Generates the tokens of its requests.

    The event loop calls ``refusal`` and ``check``; the engine's thread calls the other methods. A batcher reports the
    work of its steps to ``progress``. ``stats`` is the latest snapshot of counters and gauges. Each snapshot is a new
    object, so other threads never see a half-written one. ``trouble`` says why the batcher accepts no requests now;
    None if it accepts them. Any thread may read ``stats`` and ``trouble``.
    """

    def __init__(self, stats: EngineStats) -> None:
        self.stats = stats
        self._counts: dict[str, Any] = defaultdict(int)  # the next snapshot shows them
        self.progress = StepProgress()

    @property
    def trouble(self) -> str | None:
        return None

    @abstractmethod
    def refusal(self, sequences: int, prompt: int, final_length: int) -> str | None:
        """Returns why a request of this size could never run; None if it can."""

    def check(self, request: EngineRequest) -> None:  # noqa: B027 most batchers do all that a request can ask for
        """Raises InvalidInput, which names the parameter, if the batcher does not support a request."""

    def attach(self, wake: Callable[[], object]) -> None:  # noqa: B027 most batchers work in their steps alone
        """Sets ``wake``, which makes the engine's thread step.

        A batcher whose tokens come from another process calls ``wake`` when tokens arrive.
        """

    def busy_seconds(self, began: float, ended: float) -> float:
        """Returns the seconds of work in a step from ``began`` to ``ended``.

        Waiting times are estimated from such seconds.
        """
        return ended - began

    def end_step(self, error: BaseException) -> bool:
        """Ends work that does not return; then the engine dies with ``error``.

        Returns False if only the end of this process can end the work.
        """
        return False

    @abstractmethod
    def add(self, request: RequestState) -> None:
        """Queues a request that the engine has accepted; a later step starts it."""

    @abstractmethod
    def evict(self, requests: Sequence[RequestState]) -> None:
        """Frees all memory of these requests, before this call returns or, during a long step, at the next token."""

    @abstractmethod
    def step(self, deliver: Deliver, poll: Poll, yield_device: YieldDevice) -> bool:
        """Does some work. Returns False if there was no work.

        A long step calls ``poll`` and ``yield_device`` between its forwards.
        """

    def others_stepped(self) -> None:  # noqa: B027 most batchers do not time their steps
        """Records that another engine has used the device since the last step."""

    def count(self, **more: float) -> None:
        """Adds to counters; the next snapshot shows the sums."""
        for name, number in more.items():
            self._counts[name] += number

    def close(self) -> None:  # noqa: B027 most batchers have no threads
        """Waits until none of the batcher's forward passes is running. The batcher is not stepped afterwards."""


class BatcherReplacement:
    """Makes new batchers with ``rebuild`` for an engine whose thread has died.

    ``rebuild`` takes the number of deaths in the last ten minutes. If it is None, no batcher is made.
    """

    def __init__(self, rebuild: Callable[[int], Batcher] | None) -> None:
        self._rebuild = rebuild
        self._deaths: list[float] = []

    def permits(self, now: float) -> bool:
        """Records a death. Returns False after too many deaths, or if ``rebuild`` is None."""
        self._deaths = [*(death for death in self._deaths if death > now - _DEATHS_WITHIN), now]
        return self._rebuild is not None and len(self._deaths) <= _MAX_DEATHS

    def make(self) -> Batcher | None:
        """Returns a new batcher; None if it cannot be made."""
        try:
            return None if self._rebuild is None else self._rebuild(len(self._deaths))
        except Exception:
            logger.exception("the engine could not be restarted")
            return None


class DeadBatcher(Batcher):
    """Stands in for a batcher that has died: does nothing, holds no memory and keeps the counters."""

    def __init__(self, last: EngineStats) -> None:
        super().__init__(EngineStats(kv_cache_budget=last.kv_cache_budget).counting_on(last))

    @property
    def trouble(self) -> str | None:
        return "its engine is being started again"

    def refusal(self, sequences: int, prompt: int, final_length: int) -> str | None:
        return None

    def add(self, request: RequestState) -> None:
        pass

    def evict(self, requests: Sequence[RequestState]) -> None:
        pass

    def step(self, deliver: Deliver, poll: Poll, yield_device: YieldDevice) -> bool:
        return False
