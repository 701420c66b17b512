"""A loaded model: requests in, jobs whose pieces come from workers out.

Knows nothing of how requests are spelled. All of it runs on the event loop's thread, but for ``shutdown``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from mlserver_torch_stream.errors import NotServing, QueueFull, RequestError, TimedOut
from mlserver_torch_stream.torchserve.batch_queue import BatchQueue
from mlserver_torch_stream.torchserve.config import HandlerConfig
from mlserver_torch_stream.torchserve.frames import MOST_BYTES, split
from mlserver_torch_stream.torchserve.handler_metrics import HandlerMetrics
from mlserver_torch_stream.torchserve.handler_request import HandlerFailed, HandlerJob, HandlerRequest, ResponsePiece
from mlserver_torch_stream.torchserve.rank_cancel import Message, RankCancellation
from mlserver_torch_stream.torchserve.supervisor import WorkerSlot, WorkerSupervisor
from mlserver_torch_stream.torchserve.worker_process import WorkerOrder, batch_message

logger = logging.getLogger(__name__)
_SEQUENCE_END = "ts_request_sequence_end"


class WorkerPool:
    """``start`` is called once, on the loop; ``shutdown`` from any thread. ``close`` removes what the workers ran on.

    ``most_bytes`` bounds the message of one batch. The ranks of a call that is to stop have ``meet_s`` to come to the
    same send.
    """

    def __init__(
        self,
        name: str,
        config: HandlerConfig,
        order: Callable[[int], WorkerOrder],
        metrics: HandlerMetrics,
        close: Callable[[], None] = lambda: None,
        *,
        most_bytes: int = MOST_BYTES,
        meet_s: float = 10.0,
    ) -> None:
        self.config = config
        self.metrics = metrics
        self._close = close
        self._waiting = BatchQueue(config, most_bytes)
        self._meet_s = meet_s
        self.jobs: dict[str, HandlerJob] = {}
        self.supervisor = WorkerSupervisor(name, config, order, self)
        self._loop = asyncio.get_running_loop()
        self._refusing: str | None = None
        self._timers: dict[int, asyncio.TimerHandle] = {}

    async def start(self) -> None:
        """Raises LoadFailed."""
        await self.supervisor.start()
        self.metrics.asked = self

    # --- what the lifecycle asks of an engine ---

    @property
    def trouble(self) -> str | None:
        return self.supervisor.trouble

    def drain(self, why: str) -> None:
        self._refusing = why

    def abort_all(self, why: str) -> None:
        for job in list(self.jobs.values()):
            job.fail(NotServing(why))
            self.cancel(job)

    def shutdown(self) -> None:
        self.supervisor.end()
        self._close()  # first: a process that is to end waits for the rest no longer than a moment
        self.supervisor.wait()
        if self.metrics.asked is self:  # and not who came after it
            self.metrics.asked = None

    # --- what the metrics read ---

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def workers(self) -> int:
        return len(self.supervisor.ready)

    # --- requests ---

    def submit(self, request: HandlerRequest) -> HandlerJob:
        """Raises QueueFull, RequestTooLarge or NotServing."""
        refusal = self._refusing or self.supervisor.trouble
        if refusal is not None:
            raise NotServing(refusal)
        if self.config.useJobTicket and not any(self._room(place) for place in self.supervisor.ready):
            raise QueueFull("no worker is free (useJobTicket)")
        now = time.monotonic()
        job = HandlerJob(request, self._key(request.request_id), now, self.cancel)
        self._waiting.add(job, now)
        self.jobs[job.key] = job
        if request.timeout_s is not None:
            job.deadline = self._loop.call_later(request.timeout_s, self._out_of_time, job, request.timeout_s)
        self._pump()
        return job

    def cancel(self, job: HandlerJob) -> None:
        """Idempotent. The handler is told at its next send."""
        if self.jobs.get(job.key) is not job:
            return
        job.over = True
        place = self._place_of(job)
        if place is None:
            self._waiting.remove(job, time.monotonic())
            self._forget(job)
        elif place.worker is not None:
            place.worker.send({"t": "cancel", "ids": [job.key]}, b"", everybody=False)

    def _key(self, request_id: str) -> str:
        """Handlers keep their state by it, so no two that run have the same."""
        key, number = request_id, 1
        while key in self.jobs:
            number += 1
            key = f"{request_id}#{number}"
        return key

    def _out_of_time(self, job: HandlerJob, seconds: float) -> None:
        if not job.over:
            job.fail(TimedOut(f"not answered within {seconds:g} s"))
            self.cancel(job)

    # --- batches ---

    def _pump(self) -> None:
        """Gives work to every worker that has room and whose next batch is due."""
        now = time.monotonic()
        for place in sorted(self.supervisor.ready, key=lambda each: len(each.active)):
            while self._room(place) > 0:
                due = self._waiting.due(place.number, place.idle_since, now)
                if due is None:
                    break
                if due > now and not self._joinable:
                    self._pump_at(place.number, due - now)
                    break
                self._dispatch(place, now)

    def _pump_at(self, number: int, delay: float) -> None:
        timer = self._timers.pop(number, None)
        if timer is not None:
            timer.cancel()
        self._timers[number] = self._loop.call_later(delay, self._pump)

    @property
    def _joinable(self) -> bool:
        """Requests go to a worker while others run there."""
        return self.config.continuousBatching or self.config.asyncCommunication

    def _room(self, place: WorkerSlot) -> int:
        if self.config.asyncCommunication:
            return self.config.queue_size - len(place.active)
        if self.config.continuousBatching:
            return self.config.batchSize - len(place.active)
        return 0 if place.active else self.config.batchSize

    def _dispatch(self, place: WorkerSlot, now: float) -> None:
        batch = self._waiting.take(place.number, self._room(place))
        if not place.active:
            place.signed = now
            if place.watch is None:
                self._watch_in(place, self.config.responseTimeout)
        for job in batch:
            job.signed = now
            job.alone |= len(batch) == 1 or self._joinable
            place.active[job.key] = job
        self.metrics.batches += 1
        self.metrics.batched_requests += len(batch)
        assert place.worker is not None
        place.worker.send(*batch_message(batch), everybody=self.config.broadcasts)

    # --- what workers say ---

    def came(self, place: WorkerSlot) -> None:
        self.metrics.restarts = self.supervisor.restarts
        self._pump()

    def heard(self, place: WorkerSlot, header: dict[str, Any], body: bytes) -> None:
        kind = header["t"]
        if kind == "pieces":
            self._deliver(place, header, body)
        elif kind == "failed":
            self._failed(place, header)
        elif kind in ("sends", "asks", "next", "meets"):
            self._of_ranks(place, header)
        elif kind == "metric":
            self.metrics.note(header["name"], header["type"], header["value"], header["labels"])

    def lost(self, place: WorkerSlot, why: str) -> None:
        """Its requests fail, and those of the sequences whose state it held."""
        error = HandlerFailed(f"the handler's {why}")
        gone = [*place.active.values(), *self._waiting.worker_lost(place.number)]
        place.active.clear()
        for job in gone:
            job.fail(error)
            self._forget(job)

    def hopeless(self, why: str) -> None:
        for job in self._waiting.clear():
            job.fail(NotServing(why))
            self._forget(job)

    def _deliver(self, place: WorkerSlot, header: dict[str, Any], body: bytes) -> None:
        items = header["items"]
        for item, value in zip(items, split(body, [item["n"] for item in items]), strict=True):
            job = place.active.get(item["id"])
            if job is None:
                continue
            job.signed = place.signed
            self.metrics.pieces += 1
            if _SEQUENCE_END in item["headers"]:
                job.closes_sequence = True
            self._hand_over(place, job, ResponsePiece(value, item["last"], item["ct"], item["status"], item["headers"]))
        for key in header["ended"]:
            self._ended(place, key)

    def _hand_over(self, place: WorkerSlot, job: HandlerJob, piece: ResponsePiece) -> None:
        if piece.last and piece.status >= 400:
            job.fail(HandlerFailed(piece.value.decode(errors="replace")[:2000], piece.status))
            return
        job.deliver(piece)
        if not job.lags or job.over:
            return
        if len(place.active) == 1 and not self._joinable and place.worker is not None:
            job.drained = self._resume(place)
            place.worker.pause()
        else:
            job.cut_if_far_behind()

    def _resume(self, place: WorkerSlot) -> Callable[[], None]:
        worker = place.worker
        assert worker is not None

        def resume() -> None:
            place.signed = time.monotonic()
            worker.resume()

        return resume

    def _failed(self, place: WorkerSlot, header: dict[str, Any]) -> None:
        error = HandlerFailed(header["message"], header["status"])
        for key in header["ids"]:
            job = place.active.get(key)
            if job is None or job.over:
                continue
            if header["again"]:
                job.again = error
            else:
                job.fail(error)

    def _ended(self, place: WorkerSlot, key: str) -> None:
        job = place.active.pop(key, None)
        if job is None:
            return
        now = time.monotonic()
        if not place.active:
            place.idle_since = now
        if job.again is not None and not job.over and not job.alone:
            job.run_again()
            self._waiting.add_again(job)
        else:
            job.fail(HandlerFailed("the handler ended without a result"))  # unless it has ended as it should
            self._waiting.ended(job, now, job.closes_sequence)
            self._forget(job)
        self._pump()

    def _forget(self, job: HandlerJob) -> None:
        self.jobs.pop(job.key, None)
        if job.deadline is not None:
            job.deadline.cancel()

    # --- ranks that stop together ---

    def _of_ranks(self, place: WorkerSlot, header: dict[str, Any]) -> None:
        together = place.together
        assert together is not None
        kind, rank, call = header["t"], header["rank"], header["call"]
        if kind == "sends":
            together.ended(rank, call, header["sends"])
        elif kind == "next":
            self._tell_ranks(place, together.said_next(rank, call, header["send"]))
        elif kind == "meets":
            self._tell_ranks(place, together.met(rank, call, header["here"]))
        else:
            self._tell_ranks(place, together.asked(call, header["at"]))
            limit = min(self._meet_s, self.config.responseTimeout / 2)
            self._loop.call_later(limit, self._waited_long_enough, place, together, call)

    def _waited_long_enough(self, place: WorkerSlot, together: RankCancellation, call: int) -> None:
        if place.together is together:  # and not those that came after them
            self._tell_ranks(place, together.too_late(call))

    def _tell_ranks(self, place: WorkerSlot, message: Message | None) -> None:
        if message is not None and place.worker is not None:
            place.worker.send(message, b"", everybody=True)

    def _place_of(self, job: HandlerJob) -> WorkerSlot | None:
        return next((place for place in self.supervisor.places if place.active.get(job.key) is job), None)

    # --- handlers that never return ---

    def _watch_in(self, place: WorkerSlot, seconds: float) -> None:
        place.watch = self._loop.call_later(seconds, self._check, place)

    def _check(self, place: WorkerSlot) -> None:
        """One timer per worker while it is busy: it looks, and looks again when it would be too late."""
        place.watch = None
        if not place.active:
            return
        limit = self.config.responseTimeout
        now = time.monotonic()
        paused = any(job.drained is not None for job in place.active.values())
        if self.config.asyncCommunication:
            oldest = self._time_out_silent(place, now, limit)
        else:
            oldest = now if paused else place.signed
        if now - oldest >= limit:
            error: RequestError = TimedOut(f"the handler gave no sign for {limit} s (responseTimeout)")
            for job in place.active.values():
                job.fail(error)
            self.supervisor.kill(place, f"worker {place.number} gave no sign for {limit} s and was ended")
        else:
            self._watch_in(place, oldest + limit - now)

    def _time_out_silent(self, place: WorkerSlot, now: float, limit: int) -> float:
        """Each task on its own: cancelled at its limit. The time that decides whether the worker itself hangs."""
        for job in list(place.active.values()):
            if not job.over and now - job.signed >= limit:
                job.signed = now  # as long again to heed it
                job.fail(TimedOut(f"the handler gave no sign for {limit} s (responseTimeout)"))
                self.cancel(job)
        return min(job.signed for job in place.active.values())
