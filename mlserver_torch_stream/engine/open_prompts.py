"""Prompts that come in pieces: which of them are open, and the memory in which they are prefilled ahead of their turn.

Knows nothing of rows or batches: an open prompt has none. Decides nothing about who else needs memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from mlserver_torch_stream.engine.request_state import RequestState


class OpenPrompts:
    """Each is billed for what has come of it, and gives its cache up when an admitted job needs the memory.

    ``cost``: bytes of a cache of (rows, columns). ``step``: to how many columns a growing cache is rounded up.
    """

    def __init__(self, cost: Callable[[int, int], int], step: Callable[[int], int]) -> None:
        self.jobs: list[RequestState] = []
        self._cost = cost
        self._step = step
        self._columns: dict[RequestState, int] = {}  # of the caches of jobs that are not admitted, the idlest job first
        self._given_up: list[RequestState] = []

    @property
    def bytes(self) -> int:
        return sum(self._cost(1, columns) for columns in self._columns.values())

    def bytes_to_spare(self, busy: Collection[RequestState]) -> int:
        """What can be given up; a cache that a forward is writing to cannot."""
        return sum(self._cost(1, columns) for job, columns in self._columns.items() if job not in busy)

    def take_whole(self, busy: Collection[RequestState]) -> list[RequestState]:
        """Removes and returns those whose end has come. What was prefilled of another text is given up."""
        whole = [job for job in self.jobs if job.sealed]
        self.jobs = [job for job in self.jobs if not job.sealed]
        for job in [job for job in self._columns if job.sealed and job.prefilled == 0 and job not in busy]:
            self._give_up(job)
        return whole

    def reserve(self, job: RequestState, free: int) -> bool:
        """Takes memory for all that has come of a prompt, out of ``free`` bytes."""
        columns, held = self.columns(job), self._columns.get(job)
        if self._cost(1, columns) - (0 if held is None else self._cost(1, held)) > free:
            return False
        self._columns.pop(job, None)
        self._columns[job] = columns
        return True

    def columns(self, job: RequestState) -> int:
        """Of the cache that a prompt is prefilled in; an open one's grows by steps, so that it is not copied often."""
        return len(job.prompt) if job.sealed else self._step(len(job.prompt))

    def give_up(self, needed: int, busy: Collection[RequestState]) -> None:
        """Frees so many bytes, or all that it can."""
        for job in [job for job in self._columns if job not in busy]:
            if needed <= 0:
                return
            needed -= self._cost(1, self._columns[job])
            self._give_up(job)

    def _give_up(self, job: RequestState) -> None:
        del self._columns[job]
        self._given_up.append(job)
        job.prefilled = 0
        job.ahead = False  # else it would be prefilled again as soon as there is room, and given up again

    def take_given_up(self) -> list[RequestState]:
        """The jobs that have lost their caches since the last call; they are prefilled anew when they are admitted."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def remove(self, job: RequestState) -> None:
        """Of a job that was admitted, and pays for its cache itself from now on, or that has ended."""
        self._columns.pop(job, None)
        if job in self.jobs:
            self.jobs.remove(job)
