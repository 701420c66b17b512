"""A cache of pages as vLLM runs one: no memory is promised, a row takes pages as it grows, the newest give way.

Knows nothing of slabs. The rules are those of vLLM's V1 scheduler: rows that run go first, in the order of their
coming; one that finds no page preempts the newest, which loses all its pages, goes to the head of the queue and is
computed again; a newcomer is admitted when its whole prompt fits (``scheduler_reserve_full_isl``), and none in a step
that preempted. The queue is the product's, so that nothing but the cache differs.
"""

from __future__ import annotations

from collections import deque

from benchmarks.cache_slabs import Moment
from mlserver_torch_stream.engine.sequence import Job
from mlserver_torch_stream.engine.waiting import WaitingJobs


class PagedEngine:
    """``recomputed``: tokens whose keys and values were thrown away; ``preempted``: rows, as often as it happened."""

    def __init__(self, max_rows: int, prefill_tokens: int, columns: int, page: int) -> None:
        self._max_rows = max_rows
        self._prefill_tokens = prefill_tokens
        self._page = page
        self._pages = columns // page
        self._free = self._pages
        self._waiting = WaitingJobs()
        self._again: deque[Job] = deque()
        self._running: list[Job] = []
        self._cached: dict[Job, int] = {}  # tokens of a row whose keys and values are there
        self._taken: dict[Job, int] = {}  # pages
        self._ends: dict[Job, int] = {}
        self.recomputed = 0
        self.preempted = 0

    def add(self, job: Job, answer: int) -> None:
        self._ends[job] = min(answer, job.max_tokens)
        self._waiting.add(job)

    def step(self) -> int:
        """How many answers have ended in it."""
        left = self._prefill_tokens
        preempted = self.preempted
        at = 0
        while at < len(self._running):
            job = self._running[at]
            missing = _length(job) - self._cached[job]
            new = missing if missing == 1 else min(missing, left)  # a row that decodes always gets its token
            if self._make_room(job, new):
                self._cached[job] += new
                left -= new if missing > 1 else 0
                at += 1
        while left > 0 and preempted == self.preempted and (newcomer := self._admit()) is not None:
            new = min(_length(newcomer), left)
            self._make_room(newcomer, new)
            self._cached[newcomer] += new
            left -= new
        return self._take()

    def _make_room(self, job: Job, new: int) -> bool:
        """Takes the pages for so many more tokens; False if the row itself was the newest and had to give way."""
        need = self._pages_for(self._cached[job] + new) - self._taken[job]
        while need > self._free:
            if self._preempt() is job:
                return False
        self._free -= need
        self._taken[job] += need
        return True

    def _preempt(self) -> Job:
        job = self._running.pop()
        self.preempted += 1
        self.recomputed += self._cached.pop(job)
        self._free += self._taken.pop(job)
        self._again.appendleft(job)
        return job

    def _admit(self) -> Job | None:
        if len(self._running) >= self._max_rows:
            return None
        if self._again:
            job = self._again.popleft() if self._fits(self._again[0]) else None
        else:
            found = self._waiting.admit(lambda each: True if self._fits(each) else None)
            job = None if found is None else found[0]
        if job is not None:
            self._running.append(job)
            self._cached[job] = self._taken[job] = 0
        return job

    def _fits(self, job: Job) -> bool:
        return self._pages_for(_length(job)) <= self._free

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page)

    def _take(self) -> int:
        """A token for each row whose keys and values are all there."""
        ended = []
        for job in self._running:
            if self._cached[job] == _length(job):
                tokens = job.sequences[0].tokens
                tokens.append(0)
                if len(tokens) == self._ends[job]:
                    ended.append(job)
        for job in ended:
            self._running.remove(job)
            del self._ends[job], self._cached[job]
            self._free += self._taken.pop(job)
        return len(ended)

    def moment(self) -> Moment:
        held = (self._pages - self._free) * self._page
        lengths = tuple(self._cached.values())
        return Moment(lengths, held=held, reserved=held, read=sum(lengths), batches=1)


def _length(job: Job) -> int:
    return len(job.prompt) + len(job.sequences[0].tokens)
