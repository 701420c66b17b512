"""Takes the requests to a loaded model, and delivers the pieces of the answers that its workers send.

Everything here except ``shutdown`` runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from mlserver_torch_stream.errors import NotServing, QueueFull, RequestError, TimedOut
from mlserver_torch_stream.handlers.config.model_config import HandlerConfig
from mlserver_torch_stream.handlers.frames import MAX_BYTES, encode_frame, split
from mlserver_torch_stream.handlers.pool.batch_dispatch import BatchDispatcher, ResponseTimeout
from mlserver_torch_stream.handlers.pool.batch_queue import BatchQueue
from mlserver_torch_stream.handlers.pool.handler_metrics import HandlerMetrics
from mlserver_torch_stream.handlers.pool.handler_request import (
    HandlerFailed,
    HandlerJob,
    HandlerRequest,
    PieceStream,
    ResponsePiece,
    WorkerLost,
)
from mlserver_torch_stream.handlers.pool.rank_cancel import Message, RankCancellation
from mlserver_torch_stream.handlers.pool.supervisor import WorkerSlot, WorkerSupervisor
from mlserver_torch_stream.handlers.pool.worker_process import WorkerProcess
from mlserver_torch_stream.handlers.pool.worker_rank import WorkerOrder
from mlserver_torch_stream.handlers.pool.worker_scaling import NO_WORKER, WorkerScaling
from mlserver_torch_stream.protocol.v2_names import sequence_header
from mlserver_torch_stream.work_threads import in_thread


def pass_rank_message(slot: WorkerSlot, header: dict[str, Any], meet_s: float) -> None:
    """Passes a rank's message to the worker's ``RankCancellation``, and sends the message that it returns to all ranks.

    The ranks have ``meet_s`` seconds to reach the same send.
    """
    cancellation = slot.cancellation
    assert cancellation is not None
    kind, rank, call = header["t"], header["rank"], header["call"]
    if kind == "sends":
        cancellation.ended(rank, call, header["sends"])
    elif kind == "next":
        _send(slot, cancellation.next_send(rank, call, header["send"]))
    elif kind == "meets":
        _send(slot, cancellation.met(rank, call, header["here"]))
    elif kind == "asks":
        _send(slot, cancellation.asked(call, header["at"]))
        asyncio.get_running_loop().call_later(meet_s, _give_up, slot, cancellation, call)


def _give_up(slot: WorkerSlot, cancellation: RankCancellation, call: int) -> None:
    if slot.cancellation is cancellation:  # else the worker has been replaced
        _send(slot, cancellation.too_late(call))


def _send(slot: WorkerSlot, message: Message | None) -> None:
    if message is not None and slot.worker is not None:
        slot.worker.send(encode_frame(message), all_ranks=True)


class WorkerPool:
    """The workers of one loaded model and the requests to them.

    ``start`` is called once, on the event loop; ``shutdown`` may be called in any thread. ``close`` removes the
    workers' files. ``most_bytes`` limits the message of one batch. Before a call of several ranks ends early, the ranks
    have ``meet_s`` seconds to reach the same send.
    """

    def __init__(
        self,
        name: str,
        config: HandlerConfig,
        order: Callable[[int], WorkerOrder],
        metrics: HandlerMetrics,
        close: Callable[[], None] = lambda: None,
        *,
        most_bytes: int = MAX_BYTES,
        meet_s: float = 10.0,
    ) -> None:
        self.config = config
        self.metrics = metrics
        self._close = close
        self._queue = BatchQueue(config, most_bytes)
        self.jobs: dict[str, HandlerJob] = {}
        self.supervisor = WorkerSupervisor(name, config, order, self)
        timeout = ResponseTimeout(config, self.supervisor, self.cancel)
        self._dispatcher = BatchDispatcher(config, self._queue, self.supervisor, metrics, timeout.watch)
        self.scaling = WorkerScaling(config, self.supervisor, self._queue, self._dispatcher.is_free, self.unavailable)
        self._meet_s = min(meet_s, config.responseTimeout / 2)
        self._loop = asyncio.get_running_loop()
        self._refusing: str | None = None

    async def start(self) -> None:
        """Starts the workers, and waits until all are ready. Raises LoadFailed."""
        try:
            await self.supervisor.add(self.scaling.least)
        except BaseException:
            self.supervisor.end()
            await in_thread(self.supervisor.wait)
            raise
        self.metrics.gauges = self.gauges

    # --- called by the lifecycle ---

    @property
    def trouble(self) -> str | None:
        """The reason why the model has no worker; None if it has one."""
        return self.supervisor.trouble

    def drain(self, why: str) -> None:
        """Refuses new requests with the reason ``why``; the requests in flight go on."""
        self._refusing = why

    def abort_all(self, why: str) -> None:
        """Fails all requests with the reason ``why``."""
        for job in list(self.jobs.values()):
            job.stream.fail(NotServing(why))
            self.cancel(job)

    def shutdown(self) -> None:
        """Ends all workers, and blocks until their processes have ended."""
        self.supervisor.end()
        self._close()  # first, because an ending process waits only briefly for its workers
        self.supervisor.wait()
        if self.metrics.gauges == self.gauges:  # else the model's next pool has set its own
            self.metrics.gauges = None

    def gauges(self) -> dict[str, int]:
        """Returns the number of waiting requests and of ready workers; the metrics call it, in any thread."""
        return {"waiting_requests": len(self._queue), "workers": len(self.supervisor.ready)}

    @property
    def waiting(self) -> int:
        """The number of requests that count towards ``jobQueueSize``."""
        return self._queue.waiting(self._dispatcher.idle())

    @property
    def most_sequences(self) -> int:
        """The largest number of sequences that may be open at the same time."""
        return self._queue.most_sequences

    # --- requests ---

    def submit(self, request: HandlerRequest, *, more: bool = False) -> PieceStream:
        """Queues a request and returns the stream of its answer.

        With ``more``, the next request of the same batch follows at once, so no batch is sent yet. Raises QueueFull or
        RequestTooLarge if the request cannot be queued, NotServing if there is no worker, and WorkerLost if the
        request's sequence is not open.
        """
        refusal = self._refusing or self.supervisor.trouble
        if refusal is not None:
            raise NotServing(refusal)
        now = time.monotonic()
        if request.sequence_open and not self._queue.is_open(request.sequence_id, now):
            reason = "its worker died, or it was idle for longer than sequenceMaxIdleMSec"
            raise WorkerLost(f"sequence_id: the sequence is not open: {reason}")
        if not self.scaling.most and not self._queue.is_open(request.sequence_id, now):
            raise NotServing(NO_WORKER)
        if self.config.useJobTicket and not any(map(self._dispatcher.has_room, self.supervisor.ready)):
            self.scaling.refused_for_room()
            raise QueueFull("no worker is free (useJobTicket)")
        job = HandlerJob(request, self._key(request.request_id), now, self.cancel)
        self._queue.add(job, now, self._dispatcher.idle)
        self.jobs[job.key] = job
        if request.timeout_s is not None:
            job.deadline = self._loop.call_later(request.timeout_s, self._time_out, job, request.timeout_s)
        if not more:
            self._dispatcher.dispatch_due()
            self.scaling.requests_wait()
        return job.stream

    def cancel(self, job: HandlerJob) -> None:
        """Cancels a job. A running job is cancelled at its handler's next send. Idempotent."""
        if self.jobs.get(job.key) is not job:
            return
        job.stream.over = True
        slot = next((slot for slot in self.supervisor.slots if slot.active.get(job.key) is job), None)
        if slot is None:
            self._queue.remove(job, time.monotonic())
            self._forget(job)
        elif slot.worker is not None:
            slot.worker.send(encode_frame({"t": "cancel", "ids": [job.key]}), all_ranks=False)

    def end_sequence(self, sequence_id: str) -> None:
        """Ends a sequence whose client sends no further request, so that another can open."""
        self._queue.end_sequence(sequence_id, time.monotonic())
        self._dispatcher.dispatch_due()

    def _key(self, request_id: str) -> str:
        """Returns a key that no other job has, because handlers store state under the request's id."""
        key, number = request_id, 1
        while key in self.jobs:
            number += 1
            key = f"{request_id}#{number}"
        return key

    def _time_out(self, job: HandlerJob, seconds: float) -> None:
        if not job.stream.over:
            job.stream.fail(TimedOut(f"not answered within {seconds:g} s"))
            self.cancel(job)

    def _end(self, job: HandlerJob, error: RequestError) -> None:
        """Ends the job, with ``error`` unless its last piece has been delivered."""
        job.stream.fail(error)
        self._forget(job)

    def _forget(self, job: HandlerJob) -> None:
        self.jobs.pop(job.key, None)
        if job.deadline is not None:
            job.deadline.cancel()

    # --- called by the supervisor ---

    def became_ready(self, slot: WorkerSlot) -> None:
        self.metrics.worker_restarts = self.supervisor.restarts
        self._dispatcher.dispatch_due()
        if not slot.active:
            self.scaling.became_idle(slot)

    def received(self, slot: WorkerSlot, header: dict[str, Any], body: bytes) -> None:
        kind = header["t"]
        if kind == "pieces":
            self._deliver_all(slot, header, body)
        elif kind == "failed":
            self._fail(slot, header)
        elif kind == "metric":
            self._record(header)
        else:
            pass_rank_message(slot, header, self._meet_s)

    def lost(self, slot: WorkerSlot, why: str) -> None:
        """Fails the requests that the lost worker had begun, and all requests of the sequences whose state it held."""
        for job in reversed(slot.ahead):
            self._queue.ahead -= 1
            del slot.active[job.key]
            self._queue.take_back(job)
            if job.stream.over:
                self._queue.remove(job, time.monotonic())
                self._forget(job)
        lost = [*slot.active.values(), *self._queue.worker_lost(slot.number)]
        slot.active.clear()
        slot.batches.clear()
        slot.batch_s = None
        for job in lost:
            self._end(job, WorkerLost(why))
        self._dispatcher.dispatch_due()

    def unavailable(self, why: str) -> None:
        for job in self._queue.clear():
            self._end(job, NotServing(why))

    def dropped(self) -> None:
        if not self.scaling.most and not self.supervisor.slots:
            self.unavailable(NO_WORKER)

    def _deliver_all(self, slot: WorkerSlot, header: dict[str, Any], body: bytes) -> None:
        for metric in header.get("metrics", ()):
            self._record(metric)
        items = header["items"]
        for item, value in zip(items, split(body, [item["n"] for item in items]), strict=True):
            job = slot.active.get(item["id"])
            if job is None:
                continue
            job.active_at = slot.active_at
            self.metrics.responses += 1
            if item["headers"] and sequence_header("sequence_end") in map(str.lower, item["headers"]):
                job.closes_sequence = True
            self._deliver(slot, job, ResponsePiece(value, item["last"], item["ct"], item["status"], item["headers"]))
        if ended := header.get("ended"):
            for key in ended:
                self._ended(slot, key, key in header["skipped"])
            self._dispatcher.next_batch(slot, header["took"])
            if not slot.active:
                self.scaling.became_idle(slot)

    def _record(self, metric: dict[str, Any]) -> None:
        self.metrics.record(metric["name"], metric["type"], metric["value"], metric["labels"])

    def _deliver(self, slot: WorkerSlot, job: HandlerJob, piece: ResponsePiece) -> None:
        if piece.last and piece.status >= 400:
            job.stream.fail(HandlerFailed(piece.value.decode(errors="replace")[:2000], piece.status, piece))
            return
        job.deliver(piece)
        if not job.stream.lags or job.stream.over:
            return
        if len(slot.begun) == 1 and not self._dispatcher.joins and slot.worker is not None:
            job.stream.drained = partial(self._resume, slot, slot.worker)
            slot.worker.pause()
        else:
            job.stream.cut_if_far_behind()

    def _resume(self, slot: WorkerSlot, worker: WorkerProcess) -> None:
        slot.active_at = time.monotonic()
        worker.resume()

    def _fail(self, slot: WorkerSlot, header: dict[str, Any]) -> None:
        error = HandlerFailed(header["message"], header["status"])
        for key in header["ids"]:
            job = slot.active.get(key)
            if job is None or job.stream.over:
                continue
            if header["retry"]:
                job.retry = error
            else:
                job.stream.fail(error)

    def _ended(self, slot: WorkerSlot, key: str, skipped: bool) -> None:
        job = slot.active.pop(key, None)
        if job is None:
            return
        now = time.monotonic()
        if not slot.active:
            slot.idle_since = now
        if job.retry is not None and not job.stream.over and not job.alone:
            if not job.request.whole_sequence:
                job.run_again()
                self._queue.add_retry(job)
                return
            job.retry.shared = True
            job.stream.fail(job.retry)
        job.closes_sequence |= job.request.whole_sequence and job.stream.failed
        if skipped:
            self._queue.skipped(job, now)
        else:
            self._queue.ended(job, now, job.closes_sequence)
        self._end(job, HandlerFailed("the handler ended without a result"))
