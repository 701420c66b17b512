"""The one thread that owns a model: it takes jobs from the event loop, steps a backend and delivers what comes out.

Knows nothing of how a backend generates, nor of who reads the streams.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from mlserver_torch_stream.engine.api import EngineStats, PromptJob
from mlserver_torch_stream.engine.mailbox import Mailbox
from mlserver_torch_stream.engine.sequence import Job
from mlserver_torch_stream.engine.sequence import Sequence as Answer
from mlserver_torch_stream.engine.shares import Turns
from mlserver_torch_stream.engine.tokenizer import TextCodec
from mlserver_torch_stream.errors import GenerationFailed, InvalidInput, NotServing, QueueFull
from mlserver_torch_stream.types import FinishReason, ModelInfo, TokenEvent

logger = logging.getLogger(__name__)

Deliver = Callable[[Sequence[Answer]], None]


class Backend(Protocol):
    """What a worker steps. All methods run on its thread, but for ``refusal``, ``interrupt`` and ``stats``."""

    def refusal(self, rows: int, prompt: int, final_length: int) -> str | None:
        """Why a job of this size could never run; None if it can."""

    def add(self, job: Job) -> None: ...

    def cancel(self, mailbox: Mailbox) -> None:
        """Frees all that the jobs of a closed stream hold, before it returns."""

    def step(self, deliver: Deliver) -> bool:
        """Does a bounded piece of work; False if there was nothing to do."""

    def interrupt(self) -> None:
        """Makes a long step return soon: the worker is stopping."""

    def stats(self) -> EngineStats: ...


class EngineWorker:
    """An ``Engine`` (see ``engine.api``) over any backend."""

    def __init__(
        self,
        backend: Backend,
        codec: TextCodec,
        info: ModelInfo,
        eos_token_ids: tuple[int, ...],
        *,
        max_queue: int,
        threads: int,
        turns: Turns | None,
        name: str,
    ) -> None:
        self.info = info
        self._backend = backend
        self._codec = codec
        self._eos_token_ids = eos_token_ids
        self._max_queue = max_queue
        self._threads = threads
        self._turns = turns  # None: this engine's device is its own
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[Mailbox, list[Job]] = {}
        self._submitted = 0  # jobs, written by the loop's thread
        self._taken = 0  # of them, handed to the backend
        self._stopping = False
        self._dead: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def submit(self, jobs: Sequence[PromptJob]) -> Mailbox:
        if not self.alive:
            raise NotServing("the engine is not running" if self._dead is None else f"the engine died: {self._dead}")
        self._validate(jobs)
        if self._waiting() + len(jobs) > self._max_queue:
            raise QueueFull(f"{self._waiting()} prompts are waiting already, of {self._max_queue} allowed")
        mailbox = Mailbox(asyncio.get_running_loop(), sum(job.sampling.n for job in jobs), self._closed)
        context = self.info.max_context
        accepted = [Job.of(job, mailbox, self._codec, self._eos_token_ids, context) for job in jobs]
        if any(job.open for job in jobs):
            self._open_prompt(mailbox, accepted)
        self._submitted += len(accepted)
        self._inbox.put(lambda: self._accept(mailbox, accepted))
        return mailbox

    def _validate(self, jobs: Sequence[PromptJob]) -> None:
        context = self.info.max_context
        for job in jobs:
            length = len(job.prompt_ids)
            if length == 0 and not job.open:
                raise InvalidInput("text_input", "the prompt is empty")
            if length >= context:
                raise InvalidInput("text_input", f"the prompt has {length} tokens, the context holds {context}")
            asked = job.sampling.max_tokens
            final = context if asked is None or job.open else min(context, length + asked)
            refusal = self._backend.refusal(job.sampling.n, length, final)
            if refusal is not None:
                raise InvalidInput("n" if job.sampling.n > 1 else "max_tokens", refusal)

    def _open_prompt(self, mailbox: Mailbox, jobs: list[Job]) -> None:
        if len(jobs) != 1:
            raise ValueError("an open prompt is the only job of its stream")
        job, context = jobs[0], self.info.max_context
        known = len(job.prompt)

        def extend(prompt_ids: Sequence[int], whole: bool) -> None:
            nonlocal known
            known = len(prompt_ids) if whole else known + len(prompt_ids)
            if known >= context:
                raise InvalidInput("text_input", f"the prompt has {known} tokens, the context holds {context}")
            if known == 0 and whole:
                raise InvalidInput("text_input", "the prompt is empty")
            ids = list(prompt_ids)
            self._inbox.put(lambda: self._extend(job, ids, whole))

        mailbox.feed_prompt_to(extend)

    def _extend(self, job: Job, prompt_ids: list[int], whole: bool) -> None:
        if job.mailbox in self._open:
            job.grow(prompt_ids, whole)

    def _waiting(self) -> int:
        return self._submitted - self._taken + self._backend.stats().waiting_jobs

    def stats(self) -> EngineStats:
        return self._backend.stats()

    def shutdown(self) -> None:
        self._stopping = True
        self._backend.interrupt()
        self._inbox.put(lambda: None)
        self._thread.join()

    def _closed(self, mailbox: Mailbox) -> None:
        self._inbox.put(lambda: self._cancel(mailbox))

    def _accept(self, mailbox: Mailbox, jobs: list[Job]) -> None:
        self._taken += len(jobs)
        if mailbox.closed_at is None:
            self._open[mailbox] = jobs
            for job in jobs:
                self._backend.add(job)

    def _cancel(self, mailbox: Mailbox) -> None:
        if self._open.pop(mailbox, None) is not None:
            self._backend.cancel(mailbox)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                self._loop()
            self._fail_all(NotServing("the engine was shut down"), FinishReason.ABORT)
        except BaseException as error:
            self._dead = error
            logger.exception("the engine's thread died; every stream ends with an error")
            self._fail_all(GenerationFailed(f"the engine died: {error}"), FinishReason.ERROR)

    def _loop(self) -> None:
        busy = False
        while not self._stopping:
            if not busy:
                self._inbox.get()()
            while not self._inbox.empty():
                self._inbox.get()()
            busy = not self._stopping and self._step()

    def _step(self) -> bool:
        if self._turns is None:
            return self._backend.step(self._deliver)
        with self._turns.turn():
            return self._backend.step(self._deliver)

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
        jobs = self._open.get(mailbox, [])
        if all(answer.finish_reason is not None for job in jobs for answer in job.sequences):
            self._open.pop(mailbox, None)

    def _fail_all(self, error: Exception, reason: FinishReason) -> None:
        while not self._inbox.empty():
            self._inbox.get()()
        for jobs in list(self._open.values()):
            for job in jobs:
                unfinished = [answer for answer in job.sequences if answer.finish_reason is None]
                job.finish(reason, error)
                self._deliver(unfinished)


def _hand_out(post: list[tuple[Mailbox, TokenEvent]]) -> None:
    for mailbox, event in post:
        mailbox.deliver(event)
