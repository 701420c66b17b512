"""The one thread that owns a model: it takes requests from the event loop, steps a backend and delivers what comes out.

Knows nothing of how a backend generates, nor of who reads the streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from mlserver_torch_stream.engine.api import EngineRequest, EngineStats
from mlserver_torch_stream.engine.batching.batcher import Batcher, DeadBatcher
from mlserver_torch_stream.engine.client_messages import in_short
from mlserver_torch_stream.engine.event_delivery import end_for_readers, post_events
from mlserver_torch_stream.engine.inbox import Inbox
from mlserver_torch_stream.engine.mailbox import Mailbox
from mlserver_torch_stream.engine.process_resources import FairLock
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.scheduling.admission import Admission
from mlserver_torch_stream.engine.scheduling.queue_limits import QueueLimits, ServiceRate
from mlserver_torch_stream.engine.step_progress import Work
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.engine.watchdog import EndRequest, PendingDeath, Watchdog, out_of_time, trouble
from mlserver_torch_stream.errors import GenerationFailed, NotServing
from mlserver_torch_stream.types import FinishReason, ModelInfo

logger = logging.getLogger(__name__)

# An engine that dies more often than this is not started anew: something is wrong that a fresh start does not mend.
_MOST_DEATHS = 3
_DEATHS_WITHIN = 600.0  # seconds


class EngineCore:
    """An ``Engine`` (see ``engine.api``) over any backend.

    ``rebuild`` makes a backend in the place of one that died; without it, or after too many deaths, the engine stays
    dead and ``on_death`` is called on its thread. ``turns`` is None for an engine whose device is its own. While its
    thread does not come back from a step its watchdog keeps the deadlines, and gives it up at last.
    """

    def __init__(
        self,
        backend: Batcher,
        codec: TextCodec,
        info: ModelInfo,
        eos_token_ids: tuple[int, ...],
        *,
        bounds: QueueLimits | None = None,
        threads: int = 1,
        turns: FairLock | None = None,
        rebuild: Callable[[], Batcher] | None = None,
        on_death: Callable[[BaseException], None] | None = None,
        name: str = "",
    ) -> None:
        self.info = info
        self._backend = backend
        self._codec = codec
        self._eos_token_ids = eos_token_ids
        self._bounds = bounds or QueueLimits()
        self._admission = Admission(info, self._bounds)
        self._threads = threads
        self._turns = turns
        self._rebuild = rebuild
        self._on_death = on_death
        self._inbox = Inbox()
        self._open: dict[Mailbox, list[RequestState]] = {}
        self._deaths: list[float] = []
        self._pace = ServiceRate()
        self._submitted = self._submitted_tokens = 0  # requests and their prompts, written by the loop's thread
        self._taken = self._taken_tokens = 0  # of them, handed to the backend
        self._cancelled = 0  # sequences
        self._timed_out = 0
        self._before = EngineStats()  # what backends counted that died
        self._draining: str | None = None  # why
        self._stopping = False
        self._burying = threading.Lock()
        self._dead: BaseException | None = None
        self.pending_death: PendingDeath | None = None
        self._watchdog = Watchdog(self, self._bounds, name)
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._dead is None and not self._stopping

    @property
    def trouble(self) -> str | None:
        return trouble(self.works(), self._bounds, time.monotonic()) if self.alive else "its engine died"

    def submit(self, requests: Sequence[EngineRequest]) -> Mailbox:
        if not self.alive:
            dead = self._dead
            raise NotServing("the engine is not running" if dead is None else f"the engine died: {in_short(dead)}")
        if self._draining is not None:
            raise NotServing(self._draining)
        self._admission.check(requests, self._backend.refusal)
        stats = self._backend.stats()
        waiting = self._submitted - self._taken + stats.waiting_requests
        waiting_tokens = self._submitted_tokens - self._taken_tokens + stats.waiting_tokens
        self._admission.check_queue(requests, waiting, waiting_tokens, self._pace.seconds_for(waiting))
        if any(request.open for request in requests):
            self._admission.check_open(self._submitted - self._taken + stats.open_prompts, 1)
        mailbox = Mailbox(asyncio.get_running_loop(), sum(request.sampling.n for request in requests), self._closed)
        context = self.info.max_context
        accepted = [
            RequestState.of(request, mailbox, self._codec, self._eos_token_ids, context) for request in requests
        ]
        if any(request.open for request in requests):
            self._open_prompt(mailbox, requests, accepted)
        timeouts = [
            self._bounds.request_timeout if request.timeout_s is None else request.timeout_s for request in requests
        ]
        tokens = sum(len(request.prompt_ids) for request in requests)
        self._submitted += len(accepted)
        self._submitted_tokens += tokens
        self._open[mailbox] = accepted  # at once: the watchdog ends it too, should the thread not come to take it in
        self._watchdog.watch(accepted, timeouts)
        if not self._inbox.post(lambda: self._accept(mailbox, accepted, timeouts, tokens)):
            self._open.pop(mailbox, None)
            raise NotServing("the engine has just stopped")
        return mailbox

    def _open_prompt(self, mailbox: Mailbox, given: Sequence[EngineRequest], requests: list[RequestState]) -> None:
        if len(requests) != 1:
            raise ValueError("an open prompt is the only request of its stream")
        request = requests[0]
        known = len(request.prompt)

        def extend(prompt_ids: Sequence[int], whole: bool) -> None:
            nonlocal known
            known = len(prompt_ids) if whole else known + len(prompt_ids)
            self._admission.check_length(known, open_ended=not whole)
            self._admission.check_ids(prompt_ids)
            self._admission.check_size(given[0], known, self._backend.refusal)
            ids = list(prompt_ids)
            self._inbox.post(lambda: self._extend(request, ids, whole))

        mailbox.feed_prompt_to(extend)

    def _extend(self, request: RequestState, prompt_ids: list[int], whole: bool) -> None:
        if request.mailbox in self._open:
            request.grow(prompt_ids, whole)
            if whole:
                self._watchdog.watch_wait(request)

    @property
    def load(self) -> int:
        """Prompts that wait or are prefilled, and rows that are decoded."""
        stats = self._backend.stats()
        return (
            self._submitted - self._taken + stats.waiting_requests + stats.prefilling_requests + stats.running_sequences
        )

    def stats(self) -> EngineStats:
        stats = self._backend.stats().counting_on(self._before)
        return replace(stats, cancelled_sequences=self._cancelled, timed_out_sequences=self._timed_out)

    def drain(self, why: str) -> None:
        self._draining = why

    def abort_all(self, why: str) -> None:
        error = NotServing(why)
        end = EndRequest(tuple(self._all_jobs()), FinishReason.ABORT, error, time.monotonic())
        if self._inbox.post(lambda: self._end_all(FinishReason.ABORT, error)):
            self._watchdog.asked(end)

    def fail(self, error: BaseException, patience: float | None = None) -> None:
        """Has the engine's thread die of ``error`` before its next step. From any thread.

        ``patience``: seconds after which the streams are told without it, should it not come back from a device.
        """
        self.pending_death = PendingDeath(error, None if patience is None else time.monotonic() + patience)
        self._inbox.post(lambda: None)
        self._watchdog.look()

    def shutdown(self) -> None:
        self._stopping = True
        self._inbox.post(lambda: None)
        self._thread.join()
        self._watchdog.stop()
        self._watchdog.join()

    # --- what its watchdog asks and does ---

    def works(self) -> Sequence[Work]:
        return self._backend.progress.works()

    def ask(self, end: EndRequest) -> None:
        self._inbox.post(lambda: self._time_out(end))

    def give_up(self, error: BaseException) -> None:
        if self._bury(error):
            logger.error("The engine's thread is not waited for any more, its streams end without it: %s", error)
            failure = GenerationFailed(f"the engine died: {in_short(error)}")
            end_for_readers(self._all_jobs(), FinishReason.ERROR, failure)
            self._say_dead(error)

    def _all_jobs(self) -> list[RequestState]:
        return [request for requests in list(self._open.values()) for request in requests]

    # --- on the engine's thread ---

    def _closed(self, mailbox: Mailbox) -> None:
        self._inbox.post(lambda: self._cancel(mailbox))

    def _accept(
        self, mailbox: Mailbox, requests: list[RequestState], timeouts: list[float | None], tokens: int
    ) -> None:
        self._taken += len(requests)
        self._taken_tokens += tokens
        if mailbox.closed_at is not None:
            self._open.pop(mailbox, None)
        elif mailbox in self._open:  # and has not ended with all others
            now = time.monotonic()
            for request, timeout in zip(requests, timeouts, strict=True):
                self._backend.add(request)
                if timeout is not None and request.submitted_at + timeout <= now:
                    self._time_out(out_of_time(request, request.sealed, now))

    def _cancel(self, mailbox: Mailbox) -> None:
        requests = self._open.get(mailbox)
        if requests is not None:
            self._cancelled += _unfinished(requests)
            self._end(requests, FinishReason.ABORT, None)

    def _time_out(self, end: EndRequest) -> None:
        self._timed_out += _unfinished(end.requests)  # before its reader sees the end
        self._end(end.requests, end.reason, end.error)

    def _end(self, requests: Sequence[RequestState], reason: FinishReason, error: Exception | None) -> None:
        """Ends requests wherever they are, with the text they have.

        Delivers also the ends of sequences that had finished when the engine died.
        """
        sequences = [sequence for request in requests for sequence in request.sequences if not sequence.told]
        for sequence in sequences:
            sequence.finish(reason, error)
        self._backend.evict(requests)
        self._deliver(sequences)

    def _end_all(self, reason: FinishReason, error: Exception) -> None:
        self._end(self._all_jobs(), reason, error)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        while True:
            try:
                with torch.inference_mode():
                    self._loop()
                self._backend.close()
                return
            except BaseException as error:
                if self._dead is not None:
                    return  # it was given up before it came back
                logger.exception("the engine's thread failed; every stream ends with an error")
                if not self._revive(error):
                    return

    def _revive(self, error: BaseException) -> bool:
        """Ends every stream and starts anew with a fresh backend; False if the engine stays dead."""
        now = time.monotonic()
        self._deaths = [*(death for death in self._deaths if death > now - _DEATHS_WITHIN), now]
        backend = None
        self._backend.progress.at("the engine's fresh start")
        if self._rebuild is not None and len(self._deaths) <= _MOST_DEATHS:
            try:
                backend = self._rebuild()
            except Exception:
                logger.exception("the engine could not be started anew")
        dead = self._backend
        if backend is None:
            if self._bury(error):
                self._go_on_with(DeadBatcher(dead.stats()), error, last=True)
                self._say_dead(error)
        else:
            logger.error("the engine was started anew")
            self._before = dead.stats().counting_on(self._before)
            self._go_on_with(backend, error)
        self._backend.progress.at("the last forward of the engine that died")
        dead.close()
        self._backend.progress.rest()
        return backend is not None

    def _bury(self, error: BaseException) -> bool:
        """Makes this the end, once: True for the first of the engine's thread and its watchdog."""
        with self._burying:
            if self._dead is not None:
                return False
            self._dead = error  # before the streams end: who is told of it finds `alive` false
        self._inbox.close()
        return True

    def _say_dead(self, error: BaseException) -> None:
        self._watchdog.stop()
        if self._on_death is not None:
            self._on_death(error)

    def _go_on_with(self, backend: Batcher, error: BaseException, *, last: bool = False) -> None:
        self._backend = backend
        self._inbox.take_in(last=last)
        self._end_all(FinishReason.ERROR, GenerationFailed(f"the engine died: {in_short(error)}"))

    def _loop(self) -> None:
        busy = False
        while True:
            if not busy and not self._stopping:  # whose wake-up may have been taken in since it was looked at
                self._inbox.wait()
            if self._poll():
                return
            busy = self._step()

    def _poll(self) -> bool:
        """Takes in what has arrived: requests, closed streams, deadlines that are over; True if it was the end."""
        stopping = self._stopping  # read once: who posts after the last look must be told that it was the last
        self._inbox.take_in(last=stopping)
        if self._dead is not None:
            self._end_all(FinishReason.ERROR, GenerationFailed("the engine died"))  # its readers know: it frees rows
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
        turn = self._turns.turn() if self._turns is not None else contextlib.nullcontext()
        with turn:
            began = time.monotonic()
            self._backend.progress.at("a step")
            busy = self._backend.step(self._deliver, self._between_tokens)
            self._backend.progress.rest()
            self._pace.note(time.monotonic() - began)
            return busy

    def _between_tokens(self) -> None:
        """In a long step: takes in what has arrived, and lets other engines on these cores have their turn."""
        self._poll()
        self._backend.progress.rest()
        if self._turns is not None:
            self._turns.pass_on()
        self._backend.progress.at("the next token of an answer alone")

    def _deliver(self, sequences: Sequence[SequenceState]) -> None:
        """Posts what the answers have to say, and forgets streams that ended."""
        post_events(sequences)
        for sequence in sequences:
            if sequence.finish_reason is not None:
                self._forget(sequence.request.mailbox)

    def _forget(self, mailbox: Mailbox) -> None:
        if mailbox in self._open and all(request.finished for request in self._open[mailbox]):
            self._pace.finished(len(self._open.pop(mailbox)))


def _unfinished(requests: Sequence[RequestState]) -> int:
    """How many sequences of these requests have not finished."""
    return sum(sequence.finish_reason is None for request in requests for sequence in request.sequences)
