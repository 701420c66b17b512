"""Runs the engine's thread, which owns a model: it takes in requests, steps a batcher and delivers the events."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

from mlserver_torch_stream.engine.api import EngineRequest, EngineStats, Mailbox, call_on
from mlserver_torch_stream.engine.failures import VllmLost, drop_tracebacks, in_short
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.scheduler.queue import Admission, QueueLimits
from mlserver_torch_stream.engine.step.batcher import Batcher, BatcherReplacement, DeadBatcher
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.engine.watchdog import (
    EndRequest,
    FairLock,
    PendingDeath,
    Watchdog,
    Work,
    out_of_time,
    trouble,
)
from mlserver_torch_stream.errors import GenerationFailed, NotServing
from mlserver_torch_stream.types import FinishReason, ModelInfo, TokenEvent

logger = logging.getLogger(__name__)


class Inbox:
    """Holds actions for the engine's thread.

    Any thread may call ``post`` and ``close``; only the engine's thread may call the other methods.
    """

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._close_lock = threading.Lock()  # no action is posted between the last look and the end
        self._closed = False

    def post(self, action: Callable[[], None]) -> bool:
        """Queues an action for the engine's thread. Returns False if the inbox is closed, so that it will not run."""
        with self._close_lock:
            if self._closed:
                return False
            self._actions.put(action)
            return True

    def close(self) -> None:
        """Refuses all later actions. Wakes the engine's thread if it waits."""
        with self._close_lock:
            self._closed = True
            self._actions.put(lambda: None)

    def wait(self) -> None:
        """Sleeps until there is an action, and runs it."""
        self._actions.get()()

    def take_in(self, *, last: bool) -> None:
        """Runs all queued actions. With ``last`` the inbox is closed afterwards."""
        with self._close_lock if last else nullcontext():
            self._closed = self._closed or last
            while not self._actions.empty():
                self._actions.get()()


class EngineCore:
    """An ``Engine`` (see ``engine.api``) over any batcher.

    ``rebuild`` makes a new batcher after an error has ended the engine's thread; it takes the number of such errors in
    the last ten minutes. Without ``rebuild``, or after too many such errors, the engine stays dead and its thread calls
    ``on_death``. ``event_interval`` has the tokens and the seconds after a sequence's last event, of which the first
    to be reached makes the next event due; the first event and the last one are due at once.
    ``context`` returns a context manager, within which the thread steps the batcher. ``fair_lock`` is None if no other
    engine uses the same device. While a step does not return, the watchdog enforces the deadlines of requests; in the
    end it abandons the thread.
    """

    def __init__(
        self,
        batcher: Batcher,
        codec: TextCodec,
        info: ModelInfo,
        eos_token_ids: tuple[int, ...],
        *,
        queue_limits: QueueLimits | None = None,
        event_interval: tuple[int, float] = (1, math.inf),
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        fair_lock: FairLock | None = None,
        rebuild: Callable[[int], Batcher] | None = None,
        on_death: Callable[[BaseException], None] | None = None,
        name: str = "",
    ) -> None:
        self.info = info
        self._batcher = batcher
        self._codec = codec
        self._eos_token_ids = eos_token_ids
        self._queue_limits = queue_limits or QueueLimits()
        self._admission = Admission(info, self._queue_limits)
        self._event_interval = event_interval
        self._context = context
        self._fair_lock = fair_lock
        self._replacement = BatcherReplacement(rebuild)
        self._on_death = on_death
        self._inbox = Inbox()
        self._open: dict[Mailbox, list[RequestState]] = {}
        self._cancelled = self._timed_out = 0  # sequences
        self._stats_before = EngineStats()  # the sums of the batchers that have died
        self._draining: str | None = None  # the reason
        self._stopping = False
        self._death_lock = threading.Lock()
        self._dead: BaseException | None = None
        self.pending_death: PendingDeath | None = None
        self._watchdog = Watchdog(self, self._queue_limits, name)
        batcher.attach(self._wake)
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._dead is None and not self._stopping

    @property
    def trouble(self) -> str | None:
        if not self.alive:
            return "its engine died"
        if (trouble_of_batcher := self._batcher.trouble) is not None:
            return trouble_of_batcher
        # The progress of the engine that uses the device now.
        holder = None if self._fair_lock is None else self._fair_lock.progress
        before = None if holder is None else trouble(holder.works(), self._queue_limits, time.monotonic())
        return self.overdue or (None if before is None else f"it waits for its device: {before}")

    @property
    def overdue(self) -> str | None:
        """Describes this engine's step if it has not returned in time; otherwise returns None."""
        return trouble(self.works(), self._queue_limits, time.monotonic())

    def submit(self, requests: Sequence[EngineRequest]) -> Mailbox:
        if not self.alive:
            dead = self._dead
            raise NotServing("the engine is not running" if dead is None else f"the engine died: {in_short(dead)}")
        if self._draining is not None:
            raise NotServing(self._draining)
        if (trouble_of_batcher := self._batcher.trouble) is not None:
            raise NotServing(trouble_of_batcher)
        for request in requests:
            self._batcher.check(request)
        self._admission.check(requests, self._batcher.refusal)
        opens = any(request.open for request in requests)
        self._admission.check_queue(requests, self._batcher.stats, self._open_prompts if opens else 0)
        if opens and len(requests) != 1:
            raise ValueError("an open prompt must be the only request of its stream")
        sequences, loop = sum(request.sampling.n for request in requests), asyncio.get_running_loop()
        mailbox = Mailbox(loop, sequences, self._closed)
        accepted = [
            RequestState(
                request,
                mailbox,
                self._codec,
                self._eos_token_ids,
                self._admission.longest(request, len(request.prompt_ids), self._batcher.refusal),
                self._queue_limits.request_timeout,
                self._event_interval,
            )
            for request in requests
        ]
        # Stored at once, because the watchdog must find the stream even if the engine's thread never accepts it.
        self._open[mailbox] = accepted
        self._watchdog.watch(accepted)
        if opens:
            mailbox.feed_prompt_to(self._prompt_feeder(requests[0]))
        if not (self._inbox.post(lambda: None) if opens else self._queue(mailbox, accepted)):
            self._open.pop(mailbox, None)
            raise NotServing("the engine has just stopped")
        return mailbox

    def _queue(self, mailbox: Mailbox, requests: list[RequestState]) -> bool:
        """Posts whole requests to the engine's thread. Returns False if the thread no longer accepts requests."""
        self._admission.submitted(requests)
        return self._inbox.post(lambda: self._accept(mailbox, requests))

    def _prompt_feeder(self, open_request: EngineRequest) -> Callable[[Mailbox, Sequence[int], bool], None]:
        """Returns a function that receives an open request's prompt ids.

        It queues the request once the prompt is whole.
        """
        known = len(open_request.prompt_ids)

        def feed(mailbox: Mailbox, prompt_ids: Sequence[int], whole: bool) -> None:
            nonlocal known
            known = len(prompt_ids) if whole else known + len(prompt_ids)
            self._admission.check_prompt(open_request, prompt_ids, known, self._batcher.refusal, whole=whole)
            if whole and (requests := self._open.get(mailbox)):
                (request,) = requests
                longest = self._admission.longest(open_request, known, self._batcher.refusal)
                request.seal(prompt_ids, longest)
                self._watchdog.watch_wait(request)
                self._queue(mailbox, requests)

        return feed

    @property
    def _open_prompts(self) -> int:
        return sum(request.input.open for request in self._all_requests())

    @property
    def load(self) -> int:
        stats = self._batcher.stats
        return self._admission.waiting(stats) + stats.prefilling_requests + stats.running_sequences

    def stats(self) -> EngineStats:
        stats = self._batcher.stats.counting_on(self._stats_before)
        return replace(
            stats,
            open_prompts=self._open_prompts,
            cancelled_sequences=self._cancelled,
            timed_out_sequences=self._timed_out,
        )

    def drain(self, why: str) -> None:
        self._draining = why

    def abort_all(self, why: str) -> None:
        error = NotServing(why)
        end = EndRequest(tuple(self._all_requests()), FinishReason.ABORT, error, time.monotonic())
        if self._inbox.post(lambda: self._end_all(FinishReason.ABORT, error)):
            self._watchdog.expect(end)

    def fail(self, error: BaseException, patience: float = math.inf) -> None:
        """Makes the engine's thread end with ``error`` before its next step. Any thread may call it.

        If the current step does not return within ``patience`` seconds, the watchdog ends the streams.
        """
        self.pending_death = PendingDeath(error, time.monotonic() + patience)
        self._inbox.post(lambda: None)
        self._watchdog.look()

    def shutdown(self) -> None:
        self._stopping = True
        self._inbox.post(lambda: None)
        self._thread.join()
        self._watchdog.stop()
        self._watchdog.join()
        # This object and its watchdog refer to each other, but weights and KV cache must not wait for a garbage
        # collection.
        self._batcher, self._replacement = DeadBatcher(self._batcher.stats), BatcherReplacement(None)

    def _wake(self) -> None:
        self._inbox.post(lambda: None)

    def _closed(self, mailbox: Mailbox) -> None:
        self._inbox.post(lambda: self._cancel(mailbox))

    # --- for the watchdog ---

    def works(self) -> Sequence[Work]:
        return self._batcher.progress.works()

    def ask(self, end: EndRequest) -> None:
        self._inbox.post(lambda: self._time_out(end))

    def give_up(self, error: BaseException) -> bool:
        if self._batcher.end_step(error):
            return False
        if self._mark_dead(error):
            logger.error("The engine's thread does not return, so its streams end without it: %s", error)
            failure = GenerationFailed(f"the engine died: {in_short(error)}")
            for request in self._all_requests():
                request.end_for_reader(FinishReason.ERROR, failure)
            self._report_death(error)
        return True

    def _all_requests(self) -> list[RequestState]:
        return [request for requests in list(self._open.values()) for request in requests]

    # --- on the engine's thread ---

    def _accept(self, mailbox: Mailbox, requests: list[RequestState]) -> None:
        self._admission.accepted(requests)
        if mailbox.closed_at is not None:
            self._cancel(mailbox)
        elif mailbox in self._open:  # else ``_end_all`` has ended it
            now = time.monotonic()
            for request in requests:
                self._batcher.add(request)
                if request.timeout_s is not None and request.submitted_at + request.timeout_s <= now:
                    self._time_out(out_of_time(request, True, now))

    def _cancel(self, mailbox: Mailbox) -> None:
        requests = self._open.get(mailbox)
        if requests is not None:
            cancelled = sum(request.unfinished for request in requests)
            self._end(requests, FinishReason.ABORT, None)
            self._cancelled += cancelled  # only now: a sequence that counts as cancelled holds no slot

    def _time_out(self, end: EndRequest) -> None:
        self._timed_out += sum(request.unfinished for request in end.requests)  # before its reader sees the end
        self._end(end.requests, end.reason, end.error)

    def _end(self, requests: Sequence[RequestState], reason: FinishReason, error: Exception | None) -> None:
        """Ends requests; their answers keep the text generated so far.

        If the engine died before it could deliver the last event of an ended sequence, that event is delivered here.
        """
        sequences = [
            sequence for request in requests for sequence in request.sequences if not sequence.last_event_taken
        ]
        for sequence in sequences:
            sequence.finish(reason, error)
        self._batcher.evict(requests)
        self._deliver(sequences)

    def _end_all(self, reason: FinishReason, error: Exception) -> None:
        self._end(self._all_requests(), reason, error)

    def _run(self) -> None:
        while (error := self._run_until_death()) is not None and self._revive(error):
            pass

    def _run_until_death(self) -> BaseException | None:
        """Returns the error that ended the loop; None after a shutdown, or if the watchdog has abandoned the thread.

        The traceback is removed from the error, because its frames would keep the dead batcher and its cache alive.
        """
        try:
            with self._context():
                self._loop()
            self._batcher.close()
            return None
        except BaseException as error:
            if self._dead is not None:
                return None
            trace = None if isinstance(error, VllmLost) else error  # a lost process has no line of ours to blame
            logger.error("the engine failed, and every stream ends with an error: %s", error, exc_info=trace)
            drop_tracebacks(error)
            return error

    def _revive(self, error: BaseException) -> bool:
        """Ends every stream and continues with a new batcher. Returns False if the engine stays dead.

        The new batcher allocates memory only after the dead batcher has freed its own, because a GPU has no room for
        two caches.
        """
        again = self._replacement.permits(time.monotonic())
        dead, self._batcher = self._batcher, DeadBatcher(self._batcher.stats)
        if not again:
            self._stay_dead(error)
        self._batcher.progress.at("the last forward of the engine that died")
        dead.close()
        del dead
        gc.collect()  # what holds the cache in reference cycles
        self._batcher.progress.rest()
        return again and self._start_again(error)

    def _start_again(self, error: BaseException) -> bool:
        self._batcher.progress.at("the engine's fresh start")
        batcher = self._replacement.make()
        self._batcher.progress.rest()
        if batcher is None:
            self._stay_dead(error)
            return False
        logger.error("the engine was started again")
        self._stats_before = self._batcher.stats.counting_on(self._stats_before)
        self._batcher = batcher
        batcher.attach(self._wake)
        self._end_of_death(error)
        return True

    def _stay_dead(self, error: BaseException) -> None:
        if self._mark_dead(error):
            self._end_of_death(error, last=True)
            self._report_death(error)

    def _end_of_death(self, error: BaseException, *, last: bool = False) -> None:
        """Ends every stream with the error. With ``last`` the inbox is closed and accepts no further actions."""
        self._inbox.take_in(last=last)
        self._end_all(FinishReason.ERROR, GenerationFailed(f"the engine died: {in_short(error)}"))

    def _mark_dead(self, error: BaseException) -> bool:
        """Marks the engine dead.

        Returns True only to the first caller, which is the engine's thread or the watchdog.
        """
        with self._death_lock:
            if self._dead is not None:
                return False
            self._dead = error  # before the streams end: their readers find `alive` false
        self._inbox.close()
        return True

    def _report_death(self, error: BaseException) -> None:
        self._watchdog.stop()
        if self._on_death is not None:
            self._on_death(error)

    def _loop(self) -> None:
        busy = False
        while True:
            if not busy and not self._stopping:  # shutdown's wake-up may have been taken in already
                self._inbox.wait()
            if self._poll():
                return
            busy = self._step()

    def _poll(self) -> bool:
        """Takes in new requests, closed streams and passed deadlines. Returns True after a shutdown."""
        stopping = self._stopping  # read once: the inbox refuses what is posted after the last look
        self._inbox.take_in(last=stopping)
        if self._dead is not None:
            # The readers already have their last events; this only frees the slots.
            self._end_all(FinishReason.ERROR, GenerationFailed("the engine died"))
            return True
        if (pending_death := self.pending_death) is not None and not stopping:
            self.pending_death = None
            raise pending_death.error
        for end in self._watchdog.due():
            self._time_out(end)
        if stopping:
            self._end_all(FinishReason.ABORT, NotServing("the engine was shut down"))
        return stopping

    def _step(self) -> bool:
        lock = self._fair_lock
        with nullcontext(0) if lock is None else lock.held_by(self._batcher.progress) as others:
            if others and self._poll():  # takes in what came while this thread waited
                return True  # the loop looks again, and ends
            self._batcher.takes_turns_with(others)
            began = time.monotonic()
            self._batcher.progress.at("a step")
            busy = self._batcher.step(self._deliver, self._poll, self._yield_device)
            self._batcher.progress.rest()
            self._admission.service_rate.note(self._batcher.busy_seconds(began, time.monotonic()))
            return busy

    def _yield_device(self) -> None:
        """Lets other engines use the device between two forward passes of this engine's step."""
        self._batcher.progress.rest()
        if self._fair_lock is not None:
            self._fair_lock.yield_turn()
        self._batcher.progress.at("the next token of an answer by generate")

    def _deliver(self, sequences: Sequence[SequenceState]) -> None:
        """Posts the new events of the sequences and forgets the streams that have ended."""
        _post_events(sequences)
        for sequence in sequences:
            if sequence.finish_reason is not None:
                mailbox = sequence.request.mailbox
                if mailbox in self._open and all(request.finished for request in self._open[mailbox]):
                    self._admission.service_rate.finished(len(self._open.pop(mailbox)))


def _post_events(sequences: Sequence[SequenceState]) -> None:
    """Posts the new events of the sequences.

    Runs on the engine's thread, which owns the sequences. Each loop is woken up once.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, TokenEvent]]] = {}
    for sequence in sequences:
        if events := sequence.take_events():
            mailbox = sequence.request.mailbox
            if mailbox.closed_at is None:
                by_loop.setdefault(mailbox.loop, []).extend([(mailbox, event) for event in events])
    for loop, of_loop in by_loop.items():
        call_on(loop, partial(_deliver_all, of_loop))


def _deliver_all(events: Sequence[tuple[Mailbox, TokenEvent]]) -> None:
    for mailbox, event in events:
        mailbox.deliver(event)
