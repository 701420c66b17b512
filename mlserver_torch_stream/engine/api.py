"""Defines the interface of an engine: a caller submits requests, reads events from their mailbox and closes it.

This module does not import torch, so code outside the engine can import it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

from mlserver_torch_stream.engine.constraints.compile_threads import Compilation as Compilation
from mlserver_torch_stream.engine.constraints.token_matcher import CompiledConstraint as CompiledConstraint
from mlserver_torch_stream.engine.text.answer_format import AnswerFormat
from mlserver_torch_stream.types import ModelInfo, SamplingParameters, TokenEvent, add_event

logger = logging.getLogger(__name__)

DEFAULT_PRIORITY = 100


@dataclass(slots=True)
class EngineRequest:
    """One prompt and its ``sampling.n`` sequences, whose indices start at ``first_index``.

    The engine keeps and changes the object, so submit each object only once. The prompt of an ``open`` request is not
    complete yet; ``Mailbox.seal`` sets the whole prompt and queues the request. The scheduler admits requests with a
    lower ``priority`` number first. The more waiting requests a ``client`` has, the later its next request is admitted.
    If the sequences have not ended ``timeout_s`` seconds after the submit, they end with the tokens generated so far.
    Each answer matches the ``constraint``, which does not apply to the prompt. ``answer`` says how an answer is divided
    into text, reasoning and tool calls; None means that the whole answer is text. The text of each answer begins with
    ``prompt_text``. ``adapter`` names the LoRA adapter to generate with.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    first_index: int = 0
    open: bool = False
    priority: int = DEFAULT_PRIORITY
    client: str = ""
    timeout_s: float | None = None
    constraint: CompiledConstraint | None = None
    answer: AnswerFormat | None = None
    adapter: str | None = None
    prompt_text: str = ""


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Counts events since the engine started."""

    decode_steps: int = 0
    mixed_steps: int = 0  # steps in which sequences decoded beside chunks of prompts
    mixed_step_seconds: float = 0.0  # seconds that the mixed steps took
    prefill_tokens: int = 0
    prefix_cache_hit_tokens: int = 0  # prompt tokens found in the prefix cache instead of prefilled
    generation_tokens: int = 0
    num_preemptions: int = 0  # how often a sequence lost its pages to an older one, and had to be computed again
    draft_tokens: int = 0  # drafted by prompt lookup
    accepted_draft_tokens: int = 0  # drafts that were equal to the sampled tokens
    forced_tokens: int = 0  # tokens that a constraint forced, computed together with the token before them
    cancelled_sequences: int = 0  # sequences whose stream was closed
    timed_out_sequences: int = 0
    wasted_tokens: int = 0  # tokens of steps that began after the sequence's stream was closed


COUNTERS = tuple(each.name for each in fields(EngineCounters))


@dataclass(frozen=True, slots=True)
class EngineStats(EngineCounters):
    """A snapshot of counters and gauges."""

    running_sequences: int = 0  # sequences that decode
    waiting_requests: int = 0  # requests in the queue
    waiting_tokens: int = 0  # tokens in the prompts of waiting requests
    prefilling_requests: int = 0
    open_prompts: int = 0  # prompts that are not whole yet; they take no slot and no memory of the cache
    kv_cache_bytes: int = 0  # the size of the pages of running and prefilling sequences
    kv_cache_budget: int = 0
    prefix_cache_bytes: int = 0  # the size of the pages that only the prefix cache holds

    def counting_on(self, before: EngineStats) -> EngineStats:
        """Adds the counters of ``before``, the last stats of a batcher that was replaced, and returns the sums."""
        return replace(self, **{name: getattr(self, name) + getattr(before, name) for name in COUNTERS})


class StreamObserver(Protocol):
    """Observes how the reader of a stream receives its events."""

    def event(self, event: TokenEvent) -> None:
        """Called for every event that the reader receives, so the method must be cheap."""

    def closed(self) -> None:
        """Called when the reader has closed the stream; no further events are read."""


@dataclass(slots=True)
class Delivered:
    """Summarises the delivered events of one sequence."""

    tokens: int = 0
    first_at: float | None = None
    cumulative_logprob: float | None = None
    ended: bool = False

    def take(self, event: TokenEvent) -> None:
        if self.first_at is None:
            self.first_at = time.monotonic()
        self.tokens += len(event.token_ids)
        self.cumulative_logprob = event.cumulative_logprob
        self.ended = event.finish_reason is not None


class Mailbox:
    """The stream of the events of one submit; the events of each sequence are in order.

    The stream ends when all its sequences have ended. The engine never waits for a reader. A slow reader gets fewer and
    larger events, each with at most ``MAX_PER_EVENT`` characters; its mailbox cannot grow beyond the length of its
    sequences. All methods run on the loop's thread; the engine's thread reads only ``closed_at``.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sequences: int, on_close: Callable[[Mailbox], object]) -> None:
        """``on_close`` is called if the reader closes the mailbox before the end of all sequences."""
        self.loop = loop
        self.closed_at: float | None = None
        self._unfinished = sequences
        self._pending: defaultdict[int, deque[TokenEvent]] = defaultdict(deque)  # by sequence; no queue in it is empty
        self._delivered: defaultdict[int, Delivered] = defaultdict(Delivered)
        self._observer: StreamObserver | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._on_close = on_close
        self._on_extend: Callable[[Mailbox, Sequence[int], bool], None] | None = None

    def feed_prompt_to(self, extend: Callable[[Mailbox, Sequence[int], bool], None]) -> None:
        """Sets the callback for the ids of an open request: ``extend(mailbox, prompt_ids, whole)``."""
        self._on_extend = extend

    def observe(self, observer: StreamObserver) -> None:
        """Calls ``observer`` for each event from now on."""
        self._observer = observer

    def delivered(self, index: int) -> Delivered:
        """Returns a summary of those events of a sequence that the reader has received."""
        return self._delivered[index]

    def deliver(self, event: TokenEvent) -> None:
        """Adds an event.

        Events after a sequence's last event are dropped, because the watchdog may already have ended the sequence.
        """
        delivered = self._delivered[event.index]
        if self.closed_at is not None or delivered.ended:
            return
        delivered.take(event)
        add_event(self._pending[event.index], event)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._pending:
            # This suspends once per event: a generator that never waits starves the server and misses disconnects.
            await asyncio.sleep(0)
        while not self._pending:
            if self._unfinished == 0 or self.closed_at is not None:
                raise StopAsyncIteration
            self._arrival = self.loop.create_future()
            try:
                await self._arrival
            finally:
                self._arrival = None
        waiting = self._pending.pop(next(iter(self._pending)))
        event = waiting.popleft()
        if waiting:
            self._pending[event.index] = waiting  # behind the other sequences, so that all of them advance
        if event.finish_reason is not None:
            self._unfinished -= 1
        if self._observer is not None:
            self._observer.event(event)
        return event

    def extend(self, prompt_ids: Sequence[int]) -> None:
        """Announces further prompt ids of the stream's only request, which must be open.

        Raises InvalidInput as soon as no prompt that begins with the announced ids could run.
        """
        self._feed(prompt_ids, whole=False)

    def seal(self, prompt_ids: Sequence[int]) -> None:
        """Sets an open request's whole prompt and queues the request. The prompt may differ from the announced ids."""
        self._feed(prompt_ids, whole=True)

    def _feed(self, prompt_ids: Sequence[int], whole: bool) -> None:
        if self._on_extend is None:
            raise ValueError("only a stream with a single open request accepts more prompt ids")
        self._on_extend(self, prompt_ids, whole)
        if whole:
            self._on_extend = None

    def close(self) -> None:
        """Cancels the sequences that still run.

        The call does not block and may be repeated from any task, so it belongs in a ``finally`` block.
        """
        if self.closed_at is not None:
            return
        self.closed_at = time.monotonic()
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
        if self._unfinished > 0:
            self._on_close(self)
        if self._observer is not None:
            self._observer.closed()


def call_on(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    """Calls ``action`` on the loop's thread. Any thread may call this. Does nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(action)
    except RuntimeError:  # there is no reader left
        logger.debug("an event loop was closed before its action ran")


class Engine(Protocol):
    """A loaded model that generates tokens. Callers use it on the event loop's thread."""

    info: ModelInfo

    def submit(self, requests: Sequence[EngineRequest]) -> Mailbox:
        """Queues requests whose events share one stream.

        Raises QueueFull if too many requests wait, NotServing if the engine accepts no requests, and InvalidInput if a
        prompt can never fit the context or the cache.
        """

    def stats(self) -> EngineStats:
        """Returns a snapshot of the engine's counters and gauges."""

    @property
    def load(self) -> int:
        """The sum of the waiting requests, the prefilling requests and the decoding sequences."""

    @property
    def alive(self) -> bool:
        """False once the engine's thread has died or the engine was shut down."""

    @property
    def trouble(self) -> str | None:
        """Why new requests should go to another engine; None if this engine can accept them.

        Possible reasons: the engine is dead, its step does not return, or another engine's step occupies the device.
        """

    @property
    def overdue(self) -> str | None:
        """Describes this engine's step if it has not returned in time; None otherwise."""

    def drain(self, why: str) -> None:
        """Makes ``submit`` raise NotServing with the reason ``why`` from now on. Submitted requests go on."""

    def abort_all(self, why: str) -> None:
        """Ends every stream.

        Readers get the text so far, the finish reason ``abort`` and an error that says ``why``.
        """

    def shutdown(self) -> None:
        """Ends every stream with an error and joins the engine's thread. Blocks, so call it outside the event loop."""


class AdapterSet(Protocol):
    """The LoRA adapters of one engine. Callers use it on the event loop's thread."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the adapters that requests may use."""

    async def load(self, name: str, path: str) -> None:
        """Loads an adapter from ``path``, a folder or a hub id.

        Raises InvalidInput if the adapter cannot be loaded or the name is taken.
        """

    async def unload(self, name: str) -> None:
        """Refuses further requests for an adapter, waits until its streams have ended, and frees its memory.

        Raises UnknownModel if no adapter of this name is loaded.
        """
