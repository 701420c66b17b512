"""The bounds of the scheduler and of the queue, and which requests can never run within them."""

from __future__ import annotations

import heapq
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from mlserver_torch_stream.engine.cache.cache_spec import CacheSpec
from mlserver_torch_stream.engine.cache.page_counts import largest
from mlserver_torch_stream.engine.request_state import RequestState


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """``pages`` bounds the pages of each group of layers, ``cache_bytes`` the pages of all groups and the states.

    ``token_budget`` bounds the prompt tokens and drafts of one step, ``beside_budget`` those of a step in which
    sequences decode, which wait for its end; None: no bound. The newest token of a sequence that decodes does not
    count, as it never waits for a prompt. A chunk of a prompt counts as ``prefill_floor`` tokens at least: where each
    chunk is a separate forward, many short ones would delay the sequences that decode. With ``whole_prompts`` a step
    takes one prompt at most, and takes it whole.

    ``prefix_bytes`` bounds the pages that only the prefix cache holds. ``stages`` batches can be in flight at a time.
    """

    max_num_seqs: int
    token_budget: int | None
    pages: tuple[int, ...]
    cache_bytes: int
    prefix_bytes: int = 0
    stages: int = 1
    whole_prompts: bool = False
    prefill_floor: int = 1
    beside_budget: int | None = None

    def budget(self, *, decodes: bool) -> float:
        """Returns the prompt tokens and drafts of one step; ``decodes``: whether sequences decode in it."""
        budgets = (self.token_budget, self.beside_budget if decodes else None)
        return min((each for each in budgets if each is not None), default=math.inf)

    def chunk(self, tokens: int) -> int:
        """Returns the most of so many tokens that one step computes."""
        return tokens if self.whole_prompts or self.token_budget is None else min(self.token_budget, tokens)


def fits_alone(spec: CacheSpec, limits: SchedulerLimits, sequences: int, prompt: int, final: int) -> bool:
    """Whether a request of ``sequences`` of ``final`` tokens could run on an idle engine to its last token.

    The sequences share the full pages of the prompt.
    """
    pages = []
    for one, group in zip(spec.most_pages(final, limits.chunk(final)), spec.groups, strict=True):
        shared = min(one, prompt // spec.page_size) if group.span is None else 0
        pages.append(one + (sequences - 1) * (one - shared))
    return (
        sequences <= limits.max_num_seqs
        and spec.bytes_of(pages, sequences) <= limits.cache_bytes
        and all(count <= most for count, most in zip(pages, limits.pages, strict=True))
    )


def longest_sequence(spec: CacheSpec, limits: SchedulerLimits, max_model_len: int) -> int:
    """Returns the most tokens, prompt included, of a single sequence that the cache can hold."""
    return largest(max_model_len, lambda length: fits_alone(spec, limits, 1, length, length))


_FEW = 64
FAR = 3600.0  # seconds; a thread cannot wait for a timeout of 300 years


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Times are in seconds. None means no limit."""

    max_queued_requests: int = 256  # waiting requests
    max_queued_tokens: int | None = None  # of the prompts of waiting requests
    queue_timeout: float | None = None  # from submit to the start of the prefill
    request_timeout: float | None = None  # from submit to the last token, for requests without a timeout of their own
    step_timeout: float | None = None  # for the forward of up to ``chunk`` tokens
    chunk: int = 512

    def step_limit(self, tokens: int) -> float:
        """Returns the seconds that a forward of so many tokens may take: the timeout for each ``chunk`` in it."""
        return math.inf if self.step_timeout is None else self.step_timeout * max(1, math.ceil(tokens / self.chunk))


class Deadlines:
    """Holds the times at which requests must have started, or ended. It does not keep requests alive."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, weakref.ref[RequestState], bool]] = []
        self._order = count()
        self._most = _FEW

    def add(self, request: RequestState, seconds: float | None, *, while_waiting: bool) -> None:
        """Adds a deadline, ``seconds`` after the submit. A ``while_waiting`` one counts from when the prompt is whole.

        A ``while_waiting`` deadline holds only for a request that has not started by then.
        """
        if seconds is None:
            return
        since = request.whole_at if while_waiting else request.submitted_at
        heapq.heappush(self._heap, (since + seconds, next(self._order), weakref.ref(request), while_waiting))
        if len(self._heap) > self._most:
            self._forget_freed()

    def _forget_freed(self) -> None:
        """Drops the deadlines of requests that have ended and were freed."""
        self._heap = [entry for entry in self._heap if entry[2]() is not None]
        heapq.heapify(self._heap)
        self._most = max(_FEW, 2 * len(self._heap))

    def seconds_left(self, now: float) -> float:
        """Returns the seconds until the next deadline, at most ``FAR``."""
        return min(FAR, max(0.0, self._heap[0][0] - now)) if self._heap else FAR

    def due(self, now: float) -> Iterator[tuple[RequestState, bool]]:
        """Removes passed deadlines; yields the unfinished requests, each with whether it still waits."""
        while self._heap and self._heap[0][0] <= now:
            _, _, made_for, while_waiting = heapq.heappop(self._heap)
            request = made_for()
            if request is not None and not request.finished and (not while_waiting or request.started_at is None):
                yield request, request.started_at is None and (while_waiting or request.sealed)


class ServiceRate:
    """Estimates how long requests take, from those that have ended."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._requests = 0

    def note(self, busy_s: float) -> None:
        self._busy_s += busy_s

    def finished(self, requests: int) -> None:
        self._requests += requests

    def seconds_for(self, requests: int) -> int:
        """Returns the whole seconds that this many requests are likely to take, from 1 to 120."""
        if not self._requests:
            return 1
        return min(120, max(1, math.ceil(requests * self._busy_s / self._requests)))
