"""Holds the requests that wait for a worker, and chooses the requests of a worker's next batch.

The queue reads no clock and does no I/O: the caller passes the time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from mlserver_torch_stream.errors import QueueFull
from mlserver_torch_stream.handlers.config.model_config import HandlerConfig
from mlserver_torch_stream.handlers.frames import MAX_BYTES
from mlserver_torch_stream.handlers.pool.handler_request import HandlerJob, RequestTooLarge


@dataclass
class RequestSequence:
    """The requests of one ``sequence_id``. They all go to one worker, whose handler keeps the sequence's state."""

    id: str
    opened: float
    worker: int | None = None
    pending: deque[HandlerJob] = field(default_factory=deque)
    running: int = 0
    has_state: bool = False  # True after a request of the sequence has run
    ended: bool = False
    idle_since: float = 0.0

    @property
    def idle(self) -> bool:
        """True if no request of the sequence waits or runs."""
        return not self.pending and not self.running


class PlainJobs(deque[HandlerJob]):
    """The requests that belong to no sequence, in order of arrival, and the number of bytes that they take."""

    bytes = 0

    def append(self, job: HandlerJob) -> None:
        super().append(job)
        self.bytes += job.bytes

    def appendleft(self, job: HandlerJob) -> None:
        super().appendleft(job)
        self.bytes += job.bytes

    def remove(self, job: HandlerJob) -> None:
        super().remove(job)
        self.bytes -= job.bytes

    def clear(self) -> None:
        super().clear()
        self.bytes = 0


class BatchQueue:
    """The requests that wait for the workers of one model.

    At most ``jobQueueSize`` requests wait, not counting those that idle workers are gathering into a batch. The
    requests of a sequence go to one worker, in order. A batch has at most one request of a sequence; a continuous batch
    may have several.
    """

    def __init__(self, config: HandlerConfig, most_bytes: int = MAX_BYTES) -> None:
        self._config = config
        self._most_bytes = most_bytes  # the bound of one batch
        self._plain = PlainJobs()
        self._retries: deque[HandlerJob] = deque()
        self._sequences: dict[str, RequestSequence] = {}
        self.most_workers = config.most_workers  # sequences are shared between this many workers, running or not
        self.ahead = 0  # requests that were sent to a worker before it had ended its previous batch
        self.leaving: set[int] = set()  # workers that only get requests of their own sequences

    @property
    def most_sequences(self) -> int:
        """The largest number of sequences that may be open at the same time."""
        return self._config.maxNumSequence or self._config.batchSize * self.most_workers

    @property
    def waiting_since(self) -> float | None:
        """The arrival time of the oldest waiting request that any worker may take; None if there is no such request."""
        new = [each.pending[0] for each in self._sequences.values() if each.worker is None and each.pending]
        return min((job.arrived for job in [*new, *list(self._plain)[:1]]), default=None)

    def is_open(self, sequence_id: str | None, now: float) -> bool:
        """Whether a worker holds the state of this sequence."""
        self._expire(now)
        return sequence_id in self._sequences and self._sequences[sequence_id].worker is not None

    def held_until(self, worker: int, now: float) -> float | None:
        """Returns the time at which this worker's last sequence expires; None if it holds no sequence now."""
        self._expire(now)
        ends = [self._expires_at(each) for each in self._sequences.values() if each.worker == worker]
        return max(ends, default=None)

    def __len__(self) -> int:
        held = sum(len(each.pending) for each in self._sequences.values()) if self._sequences else 0
        return len(self._plain) + len(self._retries) + held + self.ahead

    def waiting(self, idle: Collection[int]) -> int:
        """Returns the number of waiting requests, without those that the ``idle`` workers are gathering into a
        batch.
        """
        if self._has_plain_alone and not self.leaving:
            return len(self) - min(len(self._plain), self._config.batchSize * len(idle))
        return len(self) - len(self._gathered(idle))

    @property
    def _has_plain_alone(self) -> bool:
        """True if every worker may take every waiting request.

        Then a batch of thousands is gathered without scanning all waiting requests each time that a request arrives.
        """
        return not self._sequences and not self._retries

    def _gathered(self, idle: Collection[int]) -> set[str]:
        gathered: set[str] = set()
        for worker in idle:
            rest = (job.key for job in self._candidates(worker) if job.key not in gathered)
            gathered.update(list(islice(rest, self._config.batchSize)))
        return gathered

    def add(self, job: HandlerJob, now: float, idle: Callable[[], Collection[int]] = tuple) -> None:
        """Adds a request that has arrived. ``idle`` returns the workers that are gathering a batch, as in ``waiting``.

        Raises QueueFull if too many requests are waiting, and RequestTooLarge if a worker cannot receive so many bytes.
        """
        if job.bytes > self._most_bytes:
            raise RequestTooLarge(f"a request of {job.bytes} bytes is too large: the limit is {self._most_bytes}")
        if len(self) >= self._config.queue_size and (count := self.waiting(idle())) >= self._config.queue_size:
            raise QueueFull(f"{count} requests are already waiting (jobQueueSize)")
        if self._config.sequenceBatching and job.request.sequence_id is not None:
            self._add_to_sequence(job, job.request.sequence_id, now, idle)
        else:
            self._plain.append(job)

    def add_retry(self, job: HandlerJob) -> None:
        """Puts a request that is to run again in front of all others."""
        self._retries.append(job)

    def take_back(self, job: HandlerJob) -> None:
        """Puts back a request that was sent to a worker but not begun by it."""
        sequence = self._of(job)
        if job.retry is not None:
            self._retries.appendleft(job)
            return
        job.alone = False
        if sequence is None:
            self._plain.appendleft(job)
        else:
            sequence.pending.appendleft(job)
            self._not_run(sequence)

    def remove(self, job: HandlerJob, now: float) -> None:
        """Removes a waiting request, whose client has disconnected or whose time is over."""
        if job in self._retries:  # its first run was in a batch
            self.ended(job, now, closes_sequence=job.closes_sequence)
        for queue in self._queues():
            if job in queue:
                queue.remove(job)

    def clear(self) -> list[HandlerJob]:
        """Removes and returns all requests that wait."""
        jobs = [job for queue in self._queues() for job in queue]
        for queue in self._queues():
            queue.clear()
        return jobs

    def _queues(self) -> list[deque[HandlerJob]]:
        return [self._retries, self._plain, *(each.pending for each in self._sequences.values())]

    def due(self, worker: int, idle_since: float, now: float) -> float | None:
        """Returns when the next batch of an idle worker is due; None if no request waits for this worker.

        A full batch is due at once. Any other batch is due ``maxBatchDelay`` ms after two conditions are met: its first
        request has arrived, and the worker is idle.
        """
        size = self._config.batchSize
        candidates: Sequence[HandlerJob] = self._plain
        if not self._has_plain_alone or worker in self.leaving:
            candidates = self._first(worker, size)
        if not candidates:
            return None
        if candidates[0] in self._retries or len(candidates) >= size or size == 1 or not self._config.maxBatchDelay:
            return now
        plain = candidates is self._plain
        if (self._plain.bytes if plain else sum(job.bytes for job in candidates)) > self._most_bytes:
            return now
        first = candidates[0].arrived if plain else min(job.arrived for job in candidates)
        return max(first, idle_since) + self._config.maxBatchDelay / 1000

    def is_full(self, worker: int) -> bool:
        """Whether the next batch of a worker cannot grow."""
        if self._has_plain_alone and worker not in self.leaving:
            return len(self._plain) >= self._config.batchSize
        if next(self._retries_on(worker), None) is not None:
            return True
        return len(self._first(worker, self._config.batchSize)) == self._config.batchSize

    def take(self, worker: int, room: int) -> list[HandlerJob]:
        """Removes and returns the next batch: at most ``room`` requests, and no more than fit into one message."""
        retry = next(self._retries_on(worker), None) if self._retries else None
        if retry is not None:
            self._retries.remove(retry)
            return [retry]
        batch: list[HandlerJob] = []
        left = self._most_bytes
        for job in self._first(worker, room):
            left -= job.bytes
            if left < 0:
                break
            batch.append(job)
            self._begin(job, worker)
        return batch

    def skipped(self, job: HandlerJob, now: float) -> None:
        """Called when a job has ended without having reached the handler."""
        sequence = self._of(job)
        if sequence is not None:
            self._not_run(sequence)
            sequence.idle_since = now

    def ended(self, job: HandlerJob, now: float, closes_sequence: bool) -> None:
        """Called when a job of a batch has ended.

        The job's sequence ends, too, if ``closes_sequence`` is true or the client asked for that.
        """
        sequence = self._of(job)
        if sequence is None:
            return
        sequence.running -= 1
        sequence.has_state = True
        sequence.ended |= closes_sequence or job.request.sequence_end
        sequence.idle_since = now
        if sequence.ended and sequence.idle:
            del self._sequences[sequence.id]

    def end_sequence(self, sequence_id: str, now: float) -> None:
        """Ends a sequence of which no further request comes. It stays open while one of its requests waits or runs."""
        if (sequence := self._sequences.get(sequence_id)) is not None:
            sequence.ended = True
            self._expire(now)

    def worker_lost(self, worker: int) -> list[HandlerJob]:
        """Removes the sequences whose state this worker held, and returns their waiting requests."""
        self.leaving.discard(worker)
        lost = [each for each in self._sequences.values() if each.worker == worker]
        retries = [job for job in self._retries if self._of(job) in lost]
        for job in retries:
            self._retries.remove(job)
        for sequence in lost:
            del self._sequences[sequence.id]
        return [*retries, *(job for sequence in lost for job in sequence.pending)]

    def _add_to_sequence(
        self, job: HandlerJob, sequence_id: str, now: float, idle: Callable[[], Collection[int]]
    ) -> None:
        self._expire(now)
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            if len(self._sequences) >= self.most_sequences:
                raise QueueFull(f"sequence_id: {len(self._sequences)} sequences are open already (maxNumSequence)")
            sequence = self._sequences[sequence_id] = RequestSequence(sequence_id, now)
        if len(sequence.pending) >= (limit := self._config.maxSequenceJobQueueSize):
            gathered = self._gathered(idle())
            if (count := sum(each.key not in gathered for each in sequence.pending)) >= limit:
                raise QueueFull(f"sequence_id: {count} of its requests are already waiting (maxSequenceJobQueueSize)")
        sequence.pending.append(job)

    def _expire(self, now: float) -> None:
        for sequence in list(self._sequences.values()):
            if now > self._expires_at(sequence):
                del self._sequences[sequence.id]

    def _expires_at(self, sequence: RequestSequence) -> float:
        if not sequence.idle:
            return math.inf
        if sequence.ended:
            return -math.inf
        idle, life = self._config.sequenceMaxIdleMSec / 1000, self._config.sequenceTimeoutMSec / 1000
        return min(sequence.idle_since + idle, sequence.opened + life if life else math.inf)

    def _first(self, worker: int, count: int) -> list[HandlerJob]:
        """Returns the first ``count`` requests that the worker may get."""
        plain = self._has_plain_alone and worker not in self.leaving
        return list(islice(self._plain if plain else self._candidates(worker), count))

    def _candidates(self, worker: int) -> Iterator[HandlerJob]:
        """Yields the requests that the worker may get, in the order in which batches take them."""
        yield from self._retries_on(worker)
        held = sum(each.worker == worker for each in self._sequences.values())
        leaves = worker in self.leaving
        per_worker = max(1, self.most_sequences // max(1, self.most_workers))
        for sequence in self._sequences.values():
            if sequence.worker is None:
                if held >= per_worker or leaves:
                    continue
                held += bool(sequence.pending)
            elif sequence.worker != worker:
                continue
            if self._config.continuousBatching:
                yield from sequence.pending
            elif not sequence.running:
                yield from list(sequence.pending)[:1]
        if not leaves:
            yield from self._plain

    def _retries_on(self, worker: int) -> Iterator[HandlerJob]:
        """Yields the retries that the worker may run: a request of a sequence runs in the worker that holds its
        state.
        """
        for job in self._retries:
            sequence = self._of(job)
            if sequence.worker == worker if sequence is not None else worker not in self.leaving:
                yield job

    def _begin(self, job: HandlerJob, worker: int) -> None:
        sequence = self._of(job)
        if sequence is None:
            self._plain.remove(job)
            return
        sequence.pending.remove(job)
        sequence.worker = worker
        sequence.running += 1

    def _not_run(self, sequence: RequestSequence) -> None:
        """Called when a request of the sequence has left its worker without having run there."""
        sequence.running -= 1
        if not sequence.running and not sequence.has_state:
            sequence.worker = None

    def _of(self, job: HandlerJob) -> RequestSequence | None:
        if not self._config.sequenceBatching or job.request.sequence_id is None:
            return None
        return self._sequences.get(job.request.sequence_id)
