"""The jobs that wait, and the order in which they are tried: by priority, then by fair shares.

Decides nothing about memory; it reads no clock and imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

from mlserver_torch_stream.engine.request_state import RequestState

# How often later jobs may be admitted before one that does not fit yet; then everybody waits for it.
_MOST_OVERTAKEN = 16
_MOST_TRIED = 16  # per admission, so that a long queue costs a step no more than a short one

T = TypeVar("T")


class FairQueue:
    """Start-time fair queueing with one flow per job, whose weight falls with its client's backlog.

    A job's tag is the virtual time plus its work (tokens it may need) times the jobs its client has waiting; the
    lowest tag goes first. So a short request passes long ones that came earlier, a client that floods the queue
    passes nobody, and since the virtual time grows with every admission nobody waits for ever.
    """

    def __init__(self) -> None:
        self._tags: dict[RequestState, float] = {}  # in the order of arrival
        self._overtaken: Counter[RequestState] = Counter()
        self._backlog: Counter[str] = Counter()
        self._virtual_time = 0.0
        self.tokens = 0  # of the prompts

    def __len__(self) -> int:
        return len(self._tags)

    def __iter__(self) -> Iterator[RequestState]:
        """In the order in which they are tried."""
        return iter(sorted(self._tags, key=lambda job: (job.priority, self._tags[job])))

    def __contains__(self, job: RequestState) -> bool:
        return job in self._tags

    def add(self, job: RequestState) -> None:
        self._backlog[job.client] += 1
        self._tags[job] = self._virtual_time + job.work * self._backlog[job.client]
        self.tokens += len(job.prompt)

    def remove(self, job: RequestState) -> None:
        del self._tags[job]
        self._overtaken.pop(job, None)
        self.tokens -= len(job.prompt)
        self._backlog[job.client] -= 1
        if not self._backlog[job.client]:
            del self._backlog[job.client]

    def admit(self, place: Callable[[RequestState], T | None]) -> tuple[RequestState, T] | None:
        """Takes out the first job that ``place`` has a place for, unless one before it was overtaken too often."""
        passed: list[RequestState] = []
        for job in islice(self, _MOST_TRIED):
            found = place(job)
            if found is not None:
                self._overtaken.update(passed)
                self._virtual_time = max(self._virtual_time, self._tags[job])
                self.remove(job)
                return job, found
            if self._overtaken[job] >= _MOST_OVERTAKEN:
                return None
            passed.append(job)
        return None
