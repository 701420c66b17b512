"""Defines the interface of an engine: submit requests, read one stream of their events, close the stream.

Imports no torch, so that the rooms outside the engine can import it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

from mlserver_torch_stream.engine.constraints.compile_threads import Compilation as Compilation
from mlserver_torch_stream.engine.constraints.token_matcher import CompiledConstraint as CompiledConstraint
from mlserver_torch_stream.engine.text.answer_format import AnswerFormat
from mlserver_torch_stream.types import ModelInfo, SamplingParameters, TokenEvent

DEFAULT_PRIORITY = 100


@dataclass(slots=True)
class EngineRequest:
    """One prompt and its ``sampling.n`` sequences, whose events carry ``first_index`` … ``first_index + n - 1``.

    The engine holds the object itself: it belongs to one submit. An ``open`` request waits for the rest of its prompt;
    ``TokenStream.seal`` sets the whole, and then it is queued. The scheduler admits requests with a lower ``priority``
    first. Waiting requests of one ``client`` share its place in the queue. ``timeout_s`` after the submit, the
    sequences end with the tokens that they have. Each answer is kept to the ``constraint``; the prompt is not.
    ``answer`` says how their text is divided; None: it is text as a whole. ``prompt_text`` is put before each answer.
    ``adapter`` names the LoRA adapter that the tokens are generated with.
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
    """Counts from the start of an engine on."""

    decode_steps: int = 0
    mixed_steps: int = 0  # in which sequences decoded beside chunks of prompts
    mixed_step_seconds: float = 0.0  # of those steps
    prefill_tokens: int = 0
    prefix_cache_hit_tokens: int = 0  # prompt tokens found in the prefix cache instead of prefilled
    generation_tokens: int = 0
    num_preemptions: int = 0  # sequences that gave their pages to older ones, to be computed again
    draft_tokens: int = 0  # drafted by prompt lookup
    accepted_draft_tokens: int = 0  # drafts that equal the tokens that were then sampled
    forced_tokens: int = 0  # that a constraint left no choice about, computed together with the token before them
    cancelled_sequences: int = 0  # whose stream was closed
    timed_out_sequences: int = 0
    wasted_tokens: int = 0  # sequences decoded in a step that began after their stream was closed


COUNTERS = tuple(each.name for each in fields(EngineCounters))


@dataclass(frozen=True, slots=True)
class EngineStats(EngineCounters):
    """A snapshot of counters and gauges."""

    running_sequences: int = 0  # that decode
    waiting_requests: int = 0  # in the queue
    waiting_tokens: int = 0  # of the prompts of waiting requests
    prefilling_requests: int = 0
    open_prompts: int = 0  # that are not whole yet: they hold no slot and no memory of the cache
    kv_cache_bytes: int = 0  # in pages of running and prefilling sequences
    kv_cache_budget: int = 0
    prefix_cache_bytes: int = 0  # used by the prefix cache

    def counting_on(self, before: EngineStats) -> EngineStats:
        """Returns these stats with the counters of ``before``, a batcher that this one has replaced, added."""
        return replace(self, **{name: getattr(self, name) + getattr(before, name) for name in COUNTERS})


class StreamObserver(Protocol):
    """Sees how the reader of a stream takes it."""

    def event(self, event: TokenEvent) -> None:
        """Called for every event that the reader takes, so it must be cheap."""

    def closed(self) -> None:
        """The stream is closed: no event is read any more."""


class TokenStream(Protocol):
    """Yields the events of one submit, in order within each sequence, and ends after the last event of all sequences.

    The engine never waits for a reader. A slow reader gets fewer, larger events, of at most ``MAX_PER_EVENT``.
    """

    def __aiter__(self) -> AsyncIterator[TokenEvent]: ...

    async def __anext__(self) -> TokenEvent: ...

    def observe(self, observer: StreamObserver) -> None:
        """Calls ``observer`` from now on."""

    def extend(self, prompt_ids: Sequence[int]) -> None:
        """Announces further ids of the open request, which is the only one of its stream.

        Raises InvalidInput once no prompt that begins with the ids so far can run.
        """

    def seal(self, prompt_ids: Sequence[int]) -> None:
        """Gives an open request its whole prompt, which need not begin with the announced ids, and queues it."""

    def close(self) -> None:
        """Cancels what still runs. Synchronous, idempotent, safe from any task: call it in a ``finally``."""


class Engine(Protocol):
    """A loaded model that generates. Callers use it on the event loop's thread."""

    info: ModelInfo

    def submit(self, requests: Sequence[EngineRequest]) -> TokenStream:
        """Queues requests whose events share one stream.

        Raises InvalidInput (a prompt can never fit the context or the cache), QueueFull or NotServing.
        """

    def stats(self) -> EngineStats:
        """Returns a snapshot of the engine's counters and gauges."""

    @property
    def load(self) -> int:
        """The number of requests that wait or are prefilled, and of sequences that decode."""

    @property
    def alive(self) -> bool:
        """False once the engine's thread has died or the engine was shut down."""

    @property
    def trouble(self) -> str | None:
        """Why new requests should go to another engine; None if this one is fine.

        The engine is dead, does not return from a step, or waits for a device that such an engine holds.
        """

    @property
    def overdue(self) -> str | None:
        """Which step of the engine itself does not return; None if there is none."""

    def drain(self, why: str) -> None:
        """Makes ``submit`` raise NotServing with the reason ``why`` from now on. Submitted requests go on."""

    def abort_all(self, why: str) -> None:
        """Ends every stream with the finish reason ``abort``, the text that it has, and the reason ``why``."""

    def shutdown(self) -> None:
        """Ends every stream with an error and joins the engine's thread. Blocks; call it off the loop."""


class AdapterSet(Protocol):
    """The LoRA adapters of one engine. Callers use it on the event loop's thread."""

    @property
    def names(self) -> frozenset[str]:
        """Those that requests may name."""

    async def load(self, name: str, path: str) -> None:
        """``path``: a folder or a hub id. Raises InvalidInput if vLLM cannot load it or the name is taken."""

    async def unload(self, name: str) -> None:
        """Refuses further requests for it, and returns when its streams have ended and its memory is free.

        Raises UnknownModel.
        """
