"""The one thread that owns a model: it takes jobs from the event loop, steps a backend and delivers what comes out.

Knows nothing of how a backend generates, nor of who reads the streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from mlserver_torch_stream.engine.admission import Admission
from mlserver_torch_stream.engine.api import EngineStats, PromptJob
from mlserver_torch_stream.engine.backend import Backend, Remains
from mlserver_torch_stream.engine.bounds import Bounds, Deadlines, Pace
from mlserver_torch_stream.engine.failure import in_short
from mlserver_torch_stream.engine.mailbox import Mailbox
from mlserver_torch_stream.engine.sequence import Job
from mlserver_torch_stream.engine.sequence import Sequence as Answer
from mlserver_torch_stream.engine.shares import Turns
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.errors import GenerationFailed, NotServing, TimedOut
from mlserver_torch_stream.types import FinishReason, ModelInfo, TokenEvent

logger = logging.getLogger(__name__)

# An engine that dies more often than this is not started anew: something is wrong that a fresh start does not mend.
_MOST_DEATHS = 3
_DEATHS_WITHIN = 600.0  # seconds


class EngineWorker:
    """An ``Engine`` (see ``engine.api``) over any backend.

    ``rebuild`` makes a backend in the place of one that died; without it, or after too many deaths, the engine stays
    dead and ``on_death`` is called on its thread. ``turns`` is None for an engine whose device is its own.
    """

    def __init__(
        self,
        backend: Backend,
        codec: TextCodec,
        info: ModelInfo,
        eos_token_ids: tuple[int, ...],
        *,
        bounds: Bounds | None = None,
        threads: int = 1,
        turns: Turns | None = None,
        rebuild: Callable[[], Backend] | None = None,
        on_death: Callable[[BaseException], None] | None = None,
        name: str = "",
    ) -> None:
        self.info = info
        self._backend = backend
        self._codec = codec
        self._eos_token_ids = eos_token_ids
        self._bounds = bounds or Bounds()
        self._admission = Admission(info, self._bounds)
        self._threads = threads
        self._turns = turns
        self._rebuild = rebuild
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[Mailbox, list[Job]] = {}
        self._deadlines = Deadlines()
        self._deaths: list[float] = []
        self._pace = Pace()
        self._submitted = self._submitted_tokens = 0  # jobs and their prompts, written by the loop's thread
        self._taken = self._taken_tokens = 0  # of them, handed to the backend
        self._cancelled = 0  # sequences
        self._timed_out = 0
        self._before = EngineStats()  # what backends counted that died
        self._draining = False
        self._stopping = False
        self._last_word = threading.Lock()  # between who posts and the thread that ends
        self._ended = False
        self._dead: BaseException | None = None
        self._doom: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._dead is None and not self._stopping

    def submit(self, jobs: Sequence[PromptJob]) -> Mailbox:
        if not self.alive:
            dead = self._dead
            raise NotServing("the engine is not running" if dead is None else f"the engine died: {in_short(dead)}")
        if self._draining:
            raise NotServing("the server is shutting down")
        self._admission.check(jobs, self._backend.refusal)
        stats = self._backend.stats()
        waiting = self._submitted - self._taken + stats.waiting_jobs
        waiting_tokens = self._submitted_tokens - self._taken_tokens + stats.waiting_tokens
        self._admission.check_queue(jobs, waiting, waiting_tokens, self._pace.seconds_for(waiting))
        mailbox = Mailbox(asyncio.get_running_loop(), sum(job.sampling.n for job in jobs), self._closed)
        context = self.info.max_context
        accepted = [Job.of(job, mailbox, self._codec, self._eos_token_ids, context) for job in jobs]
        if any(job.open for job in jobs):
            self._open_prompt(mailbox, accepted)
        timeouts = [self._bounds.request_timeout if job.timeout_s is None else job.timeout_s for job in jobs]
        tokens = sum(len(job.prompt_ids) for job in jobs)
        self._submitted += len(accepted)
        self._submitted_tokens += tokens
        if not self._post(lambda: self._accept(mailbox, accepted, timeouts, tokens)):
            raise NotServing("the engine has just stopped")
        return mailbox

    def _post(self, action: Callable[[], None]) -> bool:
        """Has the engine's thread do something before its next step; False if it will not step again."""
        with self._last_word:
            if self._ended:
                return False
            self._inbox.put(action)
            return True

    def _open_prompt(self, mailbox: Mailbox, jobs: list[Job]) -> None:
        if len(jobs) != 1:
            raise ValueError("an open prompt is the only job of its stream")
        job = jobs[0]
        known = len(job.prompt)

        def extend(prompt_ids: Sequence[int], whole: bool) -> None:
            nonlocal known
            known = len(prompt_ids) if whole else known + len(prompt_ids)
            self._admission.check_length(known, open_ended=not whole)
            self._admission.check_ids(prompt_ids)
            ids = list(prompt_ids)
            self._post(lambda: self._extend(job, ids, whole))

        mailbox.feed_prompt_to(extend)

    def _extend(self, job: Job, prompt_ids: list[int], whole: bool) -> None:
        if job.mailbox in self._open:
            job.grow(prompt_ids, whole)

    @property
    def load(self) -> int:
        """Prompts that wait or are prefilled, and rows that are decoded."""
        stats = self._backend.stats()
        return self._submitted - self._taken + stats.waiting_jobs + stats.prefilling_jobs + stats.running_rows

    def stats(self) -> EngineStats:
        stats = self._backend.stats().counting_on(self._before)
        return replace(stats, cancelled_sequences=self._cancelled, timed_out_sequences=self._timed_out)

    def drain(self) -> None:
        self._draining = True

    def abort_all(self) -> None:
        self._post(lambda: self._end_all(FinishReason.ABORT, NotServing("the server is shutting down")))

    def fail(self, error: BaseException, patience: float | None = None) -> None:
        """Has the engine's thread die of ``error`` before its next step. From any thread.

        ``patience``: seconds after which the streams are told without it, should it not come back from a device.
        """
        self._doom = error
        self._post(lambda: None)
        if patience is not None:
            threading.Thread(target=self._outwait, args=(error, patience), daemon=True).start()

    def _outwait(self, error: BaseException, patience: float) -> None:
        self._thread.join(patience)
        if self._thread.is_alive() and self._doom is error:
            logger.error("the engine's thread does not come back: its streams end without it")
            self._bury(error)

    def shutdown(self) -> None:
        self._stopping = True
        self._post(lambda: None)
        self._thread.join()

    def _closed(self, mailbox: Mailbox) -> None:
        self._post(lambda: self._cancel(mailbox))

    def _accept(self, mailbox: Mailbox, jobs: list[Job], timeouts: list[float | None], tokens: int) -> None:
        self._taken += len(jobs)
        self._taken_tokens += tokens
        if mailbox.closed_at is not None:
            return
        self._open[mailbox] = jobs
        for job, timeout in zip(jobs, timeouts, strict=True):
            self._deadlines.add(job, self._bounds.queue_timeout, while_waiting=True)
            self._deadlines.add(job, timeout, while_waiting=False)
            self._backend.add(job)

    def _cancel(self, mailbox: Mailbox) -> None:
        jobs = self._open.get(mailbox)
        if jobs is not None:
            self._cancelled += self._end(jobs, FinishReason.ABORT, None)

    def _expire(self) -> None:
        for job, waited in self._deadlines.due(time.monotonic()):
            what = "waited too long in the queue" if waited else "took too long"
            self._timed_out += self._end([job], FinishReason.TIMEOUT, TimedOut(f"the request {what}"))

    def _end(self, jobs: Sequence[Job], reason: FinishReason, error: Exception | None) -> int:
        """Ends jobs wherever they are, with the text they have; says how many sequences that were.

        Tells also those of their end that had met it when the engine died.
        """
        answers = [answer for job in jobs for answer in job.sequences if not answer.told]
        ended = sum(answer.finish_reason is None for answer in answers)
        for answer in answers:
            answer.finish(reason, error)
        self._backend.evict(jobs)
        self._deliver(answers)
        return ended

    def _end_all(self, reason: FinishReason, error: Exception) -> None:
        self._end([job for jobs in self._open.values() for job in jobs], reason, error)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        while True:
            try:
                with torch.inference_mode():
                    self._loop()
                self._backend.close()
                return
            except BaseException as error:
                logger.exception("the engine's thread failed; every stream ends with an error")
                if not self._revive(error):
                    return

    def _revive(self, error: BaseException) -> bool:
        """Ends every stream and starts anew with a fresh backend; False if the engine stays dead."""
        now = time.monotonic()
        self._deaths = [*(death for death in self._deaths if death > now - _DEATHS_WITHIN), now]
        backend = None
        if self._rebuild is not None and len(self._deaths) <= _MOST_DEATHS:
            try:
                backend = self._rebuild()
            except Exception:
                logger.exception("the engine could not be started anew")
        dead = self._backend
        if backend is None:
            self._bury(error)
        else:
            logger.error("the engine was started anew")
            self._before = dead.stats().counting_on(self._before)
            self._go_on_with(backend, error)
        dead.close()
        return backend is not None

    def _bury(self, error: BaseException) -> None:
        """Ends every stream for good; done once, by the engine's thread or by one that has waited for it in vain."""
        with self._last_word:
            if self._dead is not None:
                return
            self._dead = error  # before the streams end: who is told of it finds `alive` false
        self._go_on_with(Remains(self._backend.stats()), error, last=True)
        if self._on_death is not None:
            self._on_death(error)

    def _go_on_with(self, backend: Backend, error: BaseException, *, last: bool = False) -> None:
        self._backend = backend
        self._take_in(last)
        self._end_all(FinishReason.ERROR, GenerationFailed(f"the engine died: {in_short(error)}"))

    def _loop(self) -> None:
        busy = False
        while True:
            if not busy and not self._stopping:  # whose wake-up may have been taken in since it was looked at
                self._wait()
            if self._poll():
                return
            busy = self._step()

    def _wait(self) -> None:
        """Sleeps until something arrives or a deadline is due."""
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=self._deadlines.seconds_left(time.monotonic()))()

    def _poll(self) -> bool:
        """Takes in what has arrived: jobs, closed streams, deadlines; True if it was the end."""
        stopping = self._stopping  # read once: who posts after the last look must be told that it was the last
        self._take_in(last=stopping)
        if (doom := self._doom) is not None and not stopping:
            self._doom = None
            raise doom
        self._expire()
        if stopping:
            self._end_all(FinishReason.ABORT, NotServing("the engine was shut down"))
        return stopping

    def _take_in(self, last: bool) -> None:
        with self._last_word if last else contextlib.nullcontext():
            self._ended = self._ended or last
            while not self._inbox.empty():
                self._inbox.get()()

    def _step(self) -> bool:
        turn = self._turns.turn() if self._turns is not None else contextlib.nullcontext()
        with turn:
            began = time.monotonic()
            busy = self._backend.step(self._deliver, self._between_tokens)
            self._pace.note(time.monotonic() - began)
            return busy

    def _between_tokens(self) -> None:
        """In a long step: takes in what has arrived, and lets other engines on these cores have their turn."""
        self._poll()
        if self._turns is not None:
            self._turns.pass_on()

    def _deliver(self, answers: Sequence[Answer]) -> None:
        """Posts what the answers have to say with one wake-up per event loop, and forgets streams that ended."""
        posts: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, TokenEvent]]] = {}
        for answer in answers:
            event = answer.take_event()
            mailbox = answer.job.mailbox
            if event is not None and mailbox.closed_at is None:
                posts.setdefault(mailbox.loop, []).append((mailbox, event))
            if answer.finish_reason is not None:
                self._forget(mailbox)
        for loop, post in posts.items():
            try:
                loop.call_soon_threadsafe(_hand_out, post)
            except RuntimeError:  # the loop was closed: nobody is left to read
                logger.debug("an event loop went away under %d events", len(post))

    def _forget(self, mailbox: Mailbox) -> None:
        if mailbox in self._open and all(job.finished for job in self._open[mailbox]):
            self._pace.finished(len(self._open.pop(mailbox)))


def _hand_out(post: list[tuple[Mailbox, TokenEvent]]) -> None:
    for mailbox, event in post:
        mailbox.deliver(event)
