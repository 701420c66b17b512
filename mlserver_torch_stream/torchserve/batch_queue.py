"""The requests that wait for a worker, and which of them make up its next batch.

Plain state and plain methods: the caller says what time it is. Knows nothing of processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from mlserver_torch_stream.errors import QueueFull
from mlserver_torch_stream.torchserve.config import HandlerConfig
from mlserver_torch_stream.torchserve.frames import MOST_BYTES
from mlserver_torch_stream.torchserve.handler_request import HandlerJob, RequestTooLarge


@dataclass
class RequestSequence:
    """The requests that share a state in one worker."""

    id: str
    opened: float
    worker: int | None = None
    pending: deque[HandlerJob] = field(default_factory=deque)
    running: int = 0
    ended: bool = False
    idle_since: float = 0.0

    @property
    def idle(self) -> bool:
        return not self.pending and not self.running


class BatchQueue:
    """At most ``jobQueueSize`` requests, of which those of a sequence go to one worker, in their order.

    Each batch holds at most one request of a sequence, or, where batches are continuous, all of it that fits.
    """

    def __init__(self, config: HandlerConfig, most_bytes: int = MOST_BYTES) -> None:
        self._config = config
        self._most_bytes = most_bytes  # of a batch
        self._plain: deque[HandlerJob] = deque()
        self._again: deque[HandlerJob] = deque()
        self._sequences: dict[str, RequestSequence] = {}
        self._per_worker = max(1, config.most_sequences // config.minWorkers)

    def __len__(self) -> int:
        return len(self._plain) + len(self._again) + sum(len(each.pending) for each in self._sequences.values())

    def add(self, job: HandlerJob, now: float) -> None:
        """Raises QueueFull or RequestTooLarge."""
        if job.bytes > self._most_bytes:
            raise RequestTooLarge(
                f"a request of {job.bytes} bytes is more than a handler is given ({self._most_bytes})"
            )
        if len(self) >= self._config.queue_size:
            raise QueueFull(f"{len(self)} requests wait already (jobQueueSize)")
        if self._config.sequenceBatching and job.request.sequence_id is not None:
            self._add_to_sequence(job, job.request.sequence_id, now)
        else:
            self._plain.append(job)

    def add_again(self, job: HandlerJob) -> None:
        """One that is to be run again, before everybody else."""
        self._again.append(job)

    def remove(self, job: HandlerJob, now: float) -> None:
        if job in self._again:  # it was taken once
            self.ended(job, now, closes_sequence=job.closes_sequence)
        for queue in (self._plain, self._again, *(each.pending for each in self._sequences.values())):
            if job in queue:
                queue.remove(job)

    def clear(self) -> list[HandlerJob]:
        """All that wait, who are not to wait any more."""
        jobs = [*self._again, *self._plain, *(job for each in self._sequences.values() for job in each.pending)]
        self._again.clear()
        self._plain.clear()
        for each in self._sequences.values():
            each.pending.clear()
        return jobs

    def due(self, worker: int, idle_since: float, now: float) -> float | None:
        """When the next batch of an idle worker is due: when it is full, or ``maxBatchDelay`` after its first request.

        None: nothing waits for it. The delay counts from when both the request and the worker are there.
        """
        candidates = list(self._candidates(worker))
        if not candidates:
            return None
        size = self._config.batchSize
        if candidates[0] in self._again or len(candidates) >= size or size == 1 or not self._config.maxBatchDelay:
            return now
        if sum(job.bytes for job in candidates) > self._most_bytes:
            return now
        first = min(job.arrived for job in candidates)
        return max(first, idle_since) + self._config.maxBatchDelay / 1000

    def take(self, worker: int, room: int) -> list[HandlerJob]:
        """The next batch, of at most ``room`` requests, and no more of them than one message carries."""
        again = next(self._again_on(worker), None)
        if again is not None:
            self._again.remove(again)
            return [again]
        batch: list[HandlerJob] = []
        left = self._most_bytes
        for job in list(self._candidates(worker)):
            left -= job.bytes
            if len(batch) == room or left < 0:
                break
            batch.append(job)
            self._begin(job, worker)
        return batch

    def ended(self, job: HandlerJob, now: float, closes_sequence: bool) -> None:
        """A job that was taken is over; ``closes_sequence``: so is its sequence, as the handler or the client says."""
        sequence = self._of(job)
        if sequence is None:
            return
        sequence.running -= 1
        sequence.ended |= closes_sequence or job.request.sequence_end
        sequence.idle_since = now
        if sequence.ended and sequence.idle:
            del self._sequences[sequence.id]

    def worker_lost(self, worker: int) -> list[HandlerJob]:
        """The sequences that this worker held are gone; their requests that wait have nobody to go to."""
        lost = [each for each in self._sequences.values() if each.worker == worker]
        again = [job for job in self._again if self._of(job) in lost]
        for job in again:
            self._again.remove(job)
        for sequence in lost:
            del self._sequences[sequence.id]
        return [*again, *(job for sequence in lost for job in sequence.pending)]

    def _add_to_sequence(self, job: HandlerJob, sequence_id: str, now: float) -> None:
        self._expire(now)
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            if len(self._sequences) >= self._config.most_sequences:
                raise QueueFull(f"sequence_id: {len(self._sequences)} sequences are open already (maxNumSequence)")
            sequence = self._sequences[sequence_id] = RequestSequence(sequence_id, now)
        if len(sequence.pending) >= self._config.maxSequenceJobQueueSize:
            raise QueueFull(f"sequence_id: {len(sequence.pending)} of its requests wait (maxSequenceJobQueueSize)")
        sequence.pending.append(job)

    def _expire(self, now: float) -> None:
        idle, life = self._config.sequenceMaxIdleMSec / 1000, self._config.sequenceTimeoutMSec / 1000
        for sequence in list(self._sequences.values()):
            too_old = life and now - sequence.opened > life
            if sequence.idle and (now - sequence.idle_since > idle or too_old):
                del self._sequences[sequence.id]

    def _candidates(self, worker: int) -> Iterator[HandlerJob]:
        """In the order in which they would be taken."""
        yield from self._again_on(worker)
        mine = sum(each.worker == worker for each in self._sequences.values())
        for sequence in self._sequences.values():
            if sequence.worker is None:
                if mine >= self._per_worker:
                    continue
                mine += bool(sequence.pending)
            elif sequence.worker != worker:
                continue
            if self._config.continuousBatching:
                yield from sequence.pending
            elif not sequence.running:
                yield from list(sequence.pending)[:1]
        yield from self._plain

    def _again_on(self, worker: int) -> Iterator[HandlerJob]:
        """One of a sequence goes to the worker that holds its state, where it has been before."""
        for job in self._again:
            sequence = self._of(job)
            if sequence is None or sequence.worker == worker:
                yield job

    def _begin(self, job: HandlerJob, worker: int) -> None:
        sequence = self._of(job)
        if sequence is None:
            self._plain.remove(job)
            return
        sequence.pending.remove(job)
        sequence.worker = worker
        sequence.running += 1

    def _of(self, job: HandlerJob) -> RequestSequence | None:
        if not self._config.sequenceBatching or job.request.sequence_id is None:
            return None
        return self._sequences.get(job.request.sequence_id)
