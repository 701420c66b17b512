"""Schedules the work of each step: who decodes, which chunks of prompts run beside that, and in which pages.

Decides and returns the work; it imports no torch, runs nothing and reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from mlserver_torch_stream.engine.kv_cache.cache_spec import CacheSpec
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.scheduling.fair_queue import FairQueue
from mlserver_torch_stream.engine.scheduling.scheduler_limits import SchedulerLimits
from mlserver_torch_stream.engine.scheduling.step_plan import ScheduledSequence, StepPlan

Drafts = Callable[[SequenceState], Sequence[int]]
"""Returns the tokens that are likely to follow; none is fine."""


class Scheduler:
    """Plans steps, and keeps account of pages and state slots. API skeleton; the methods follow.

    One step: ``plan = schedule(busy)``; the forward of ``plan.batch``; then for each part of the plan, in order,
    ``advance(part, tokens)``, which returns False if the part is void (its result is then ignored: the sequence is
    computed again); then its tokens are accepted; then ``release`` of the sequences that ended.
    """

    def __init__(self, limits: SchedulerLimits, spec: CacheSpec, drafts: Drafts | None = None) -> None:
        self.limits = limits
        self.spec = spec
        self.waiting = FairQueue()
        self.preemptions = 0  # since the start
        self.hit_tokens = 0  # of prompts, found in the prefix cache, since the start

    @property
    def running_sequences(self) -> int:
        """Admitted sequences whose prompt has been computed."""
        raise NotImplementedError

    @property
    def prefilling_requests(self) -> int:
        """Admitted requests whose prompt is being computed."""
        raise NotImplementedError

    @property
    def open_prompts(self) -> int:
        """Requests whose prompts are not whole yet."""
        raise NotImplementedError

    @property
    def used_bytes(self) -> int:
        """Of the pages and states of sequences; a page that several share counts once."""
        raise NotImplementedError

    @property
    def cached_bytes(self) -> int:
        """Of the pages that only the prefix cache holds."""
        raise NotImplementedError

    def refusal(self, sequences: int, prompt: int, final_length: int) -> str | None:
        """Returns why a request of this size could never run; None if it can."""
        raise NotImplementedError

    def add(self, request: RequestState) -> None:
        raise NotImplementedError

    def schedule(self, busy: Collection[SequenceState] = ()) -> StepPlan:
        """Plans the next step. Takes no sequence of ``busy``, those of batches in flight, and leaves their pages."""
        raise NotImplementedError

    def advance(self, part: ScheduledSequence, tokens: int) -> bool:
        """Counts the first ``tokens`` of a part as computed, ``part.count`` or less where drafts were rejected.

        Returns False if the part is void. After the end of a prompt the request's other sequences go on from there.
        """
        raise NotImplementedError

    def release(self, sequences: Iterable[SequenceState], *, forget: bool = False) -> list[SequenceState]:
        """Takes back the pages of sequences that have ended, and removes them from every queue.

        With ``forget`` nobody finds their pages afterwards: they may hold NaN, or nothing. Returns the sequences that
        are computed again, as they share pages that were not written: the result of their part is void.
        """
        raise NotImplementedError

    def recompute(self, sequences: Iterable[SequenceState]) -> list[SequenceState]:
        """Computes sequences again whose forward failed. Returns them, and the others whose parts are void by that."""
        raise NotImplementedError
