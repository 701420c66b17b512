"""Defines batchers, which the engine's thread steps, and the result of one step's forward.

If the forward of all sequences raises, each sequence runs again alone. That is safe for its pages: a sequence writes
the same keys and values to the same pages. The copies of the batch are not made again, as another sequence may have
taken the source page.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar, cast

import torch

from mlserver_torch_stream.engine.api import EngineRequest, EngineStats
from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.failures import drop_tracebacks
from mlserver_torch_stream.engine.fair_lock import StepProgress
from mlserver_torch_stream.engine.forward.interface import Logits
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.scheduler.plan import ScheduledSequence, StepPlan

logger = logging.getLogger(__name__)

# An engine that dies more often than this stays dead: a new batcher does not remove the cause.
_MAX_DEATHS = 3
_DEATHS_WITHIN = 600.0  # seconds

Deliver = Callable[[Sequence[SequenceState]], None]
Poll = Callable[[], object]
"""Takes in new requests, closed streams, passed deadlines and a shutdown."""
YieldDevice = Callable[[], None]
"""Lets each engine that waits for the same device run a step."""


class Batcher(ABC):
    """Generates the tokens of its requests. The methods that any thread may call say so; ``refusal``, ``check`` and
    ``stats`` are called by the event loop, and the rest by the engine's thread.

    It reports the work of its steps to ``progress``.
    """

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._counts = Counter[str]()
        self.progress = StepProgress()

    @abstractmethod
    def refusal(self, sequences: int, prompt: int, final_length: int) -> str | None:
        """Returns why a request of this size could never run; None if it can."""

    def check(self, request: EngineRequest) -> None:  # noqa: B027 most batchers do all that a request can ask for
        """Raises InvalidInput, which names the parameter, for a request that asks for what the batcher cannot do."""

    @property
    def trouble(self) -> str | None:
        """Why it takes no requests now; None if it does. From any thread."""
        return None

    def attach(self, wake: Callable[[], object]) -> None:  # noqa: B027 most batchers work in their steps alone
        """``wake`` makes the engine's thread step; a batcher whose tokens come from elsewhere calls it."""

    def end_step(self, error: BaseException) -> bool:
        """Ends the work that does not return, of which the engine dies then. False: nothing but the process can."""
        return False

    @abstractmethod
    def add(self, request: RequestState) -> None: ...

    @abstractmethod
    def evict(self, requests: Sequence[RequestState]) -> None:
        """Frees all memory of these requests: before it returns or, in a long step, at the next token."""

    @abstractmethod
    def step(self, deliver: Deliver, poll: Poll, yield_device: YieldDevice) -> bool:
        """Does some work; returns False if there was none.

        A long step calls ``poll`` and ``yield_device`` between its forwards.
        """

    def others_stepped(self) -> None:  # noqa: B027 most batchers do not time their steps
        """Another engine has had the device since the last step."""

    def stats(self) -> EngineStats:
        return self._stats

    def count(self, **more: int) -> None:
        """Adds to counters; the next ``publish`` shows them."""
        for name, number in more.items():
            self._counts[name] += number

    def publish(self, **gauges: int) -> None:
        """Replaces the snapshot, so that readers on other threads see a whole one."""
        self._stats = EngineStats(**self._counts, **gauges)

    def close(self) -> None:  # noqa: B027 most batchers have no threads
        """Returns when no forward of it runs any more. It is not stepped again."""


class BatcherReplacement:
    """Makes new batchers with ``rebuild`` for an engine whose thread has died. None: it makes none."""

    def __init__(self, rebuild: Callable[[], Batcher] | None) -> None:
        self._rebuild = rebuild
        self._deaths: list[float] = []

    def make(self, now: float) -> Batcher | None:
        """Records a death. Returns None after too many deaths, or if the new batcher cannot be made."""
        self._deaths = [*(death for death in self._deaths if death > now - _DEATHS_WITHIN), now]
        if self._rebuild is None or len(self._deaths) > _MAX_DEATHS:
            return None
        try:
            return self._rebuild()
        except Exception:
            logger.exception("the engine could not be started anew")
            return None


class DeadBatcher(Batcher):
    """Replaces a batcher that died: it does nothing, holds no memory and keeps the counters."""

    def __init__(self, last: EngineStats) -> None:
        super().__init__(EngineStats(kv_cache_budget=last.kv_cache_budget).counting_on(last))

    def refusal(self, sequences: int, prompt: int, final_length: int) -> str | None:
        return None

    def add(self, request: RequestState) -> None:
        pass

    def evict(self, requests: Sequence[RequestState]) -> None:
        pass

    def step(self, deliver: Deliver, poll: Poll, yield_device: YieldDevice) -> bool:
        return False


K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class InlineForwards(Generic[K, T]):
    """``overlap``: a call of the forward returns before its device is done, as on a GPU. Then ``launch`` calls it.

    Otherwise the call lasts until the logits are there, so it is made in ``completed``. In both cases the engine's
    thread calls the forward; ``called_at_launch`` says whether it has returned before ``completed``.
    """

    most = 1

    def __init__(self, *, overlap: bool = False) -> None:
        self.overlap = self.called_at_launch = overlap
        self._launched: list[tuple[K, _Call[T]]] = []

    def __len__(self) -> int:
        return len(self._launched)

    def launch(self, key: K, work: Callable[[], T], batch: Batch) -> None:
        call = _Call(work)
        self._launched.append((key, call))
        if self.called_at_launch:
            call.run()

    def completed(self) -> list[tuple[K, _Call[T]]]:
        launched, self._launched = self._launched, []
        for _, call in launched if not self.called_at_launch else ():
            call.run()
        return launched

    def close(self) -> None:
        """Does nothing: no forward runs between the calls."""


class _Call(Generic[T]):
    """A call whose result is asked for later, as that of a ``Future``."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


Run = Callable[[Batch], Logits]


@dataclass(eq=False, slots=True)
class ComputedPart:
    """A part of a step whose forward came back. Its rows of logits begin at ``first_row``."""

    part: ScheduledSequence
    token_ids: Sequence[int]
    first_row: int

    @property
    def is_stale(self) -> bool:
        """Whether the prompt was sealed with other ids while the forward ran."""
        part = self.part
        if not part.prefills:
            return False
        prompt = part.sequence.request.prompt[part.start : part.start + part.count]
        return prompt != list(self.token_ids)[: len(prompt)]


@dataclass(frozen=True, slots=True)
class StepResult:
    """``logits`` of the parts that were computed; ``failures`` are the errors of the others."""

    computed: Sequence[ComputedPart]
    logits: Logits
    failures: dict[ScheduledSequence, Exception] = field(default_factory=dict)

    def without(self, sequences: Collection[SequenceState]) -> StepResult:
        if not sequences:
            return self
        return replace(self, computed=[each for each in self.computed if each.part.sequence not in sequences])


NO_RESULT = StepResult((), Logits(torch.empty(0)))


def whole_result(plan: StepPlan, logits: Logits) -> StepResult:
    return _result(zip(plan.scheduled, plan.batch.sequences, strict=True), logits)


def each_alone(plan: StepPlan, void: Collection[SequenceState], run: Run, error: Exception) -> StepResult:
    """Runs each sequence of a plan alone, except the ``void`` ones. ``error`` is that of the forward of all sequences.

    So if only the batch fails, for example for its memory, no sequence does. A plan of one sequence is not run again.
    """
    if len(plan.scheduled) == 1:
        return replace(NO_RESULT, failures=dict.fromkeys(plan.scheduled, error))
    failures: dict[ScheduledSequence, Exception] = {}
    computed: list[tuple[ScheduledSequence, BatchSequence]] = []
    logits: list[torch.Tensor] = []
    for part, each in zip(plan.scheduled, plan.batch.sequences, strict=True):
        if part.sequence in void:
            continue
        try:
            logits.append(run(Batch((each,))).tensor.clone())  # the next call may overwrite them
            computed.append((part, each))
        except Exception as failure:
            drop_tracebacks(failure)
            failures[part] = failure
    result = _result(computed, Logits(torch.cat(logits))) if logits else NO_RESULT
    return replace(result, failures=failures)


def _result(pairs: Iterable[tuple[ScheduledSequence, BatchSequence]], logits: Logits) -> StepResult:
    row, computed = 0, []
    for part, each in pairs:
        computed.append(ComputedPart(part, each.token_ids, row))
        row += each.wanted
    return StepResult(computed, logits)
