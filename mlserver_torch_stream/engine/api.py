"""What the rest of the project sees of an engine: submit prompts, read one stream of events, close it.

Knows no tensor: the modules on either side of it meet here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from mlserver_torch_stream.types import ModelInfo, SamplingParameters, TokenEvent

DEFAULT_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt and its ``sampling.n`` sequences, whose events carry ``first_index`` … ``first_index + n - 1``.

    ``open``: more ids follow through ``TokenStream.extend``; decoding starts when ``TokenStream.seal`` is called.
    ``priority``: lower ones are admitted first; ``client``: whose backlog counts when requests wait; ``timeout_s``:
    from submit to the last token, after which the sequences end with what they have.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    first_index: int = 0
    open: bool = False
    priority: int = DEFAULT_PRIORITY
    client: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of counters and gauges; counters only ever grow."""

    running_sequences: int = 0  # decoding now
    waiting_requests: int = 0  # queued
    waiting_tokens: int = 0  # of their prompts
    prefilling_requests: int = 0
    open_prompts: int = 0  # whose end has not come: they hold no row
    kv_cache_bytes: int = 0  # reserved by running and prefilling rows, and by what is prefilled of open prompts
    kv_cache_budget: int = 0
    prefix_cache_bytes: int = 0  # of prompts that are kept for later ones that begin alike
    decode_steps: int = 0
    prefill_tokens: int = 0
    prefix_cache_hit_tokens: int = 0  # of prompts, copied instead of prefilled
    generation_tokens: int = 0
    cancelled_sequences: int = 0  # their stream was closed
    timed_out_sequences: int = 0
    wasted_tokens: int = 0  # rows decoded in a step that began after their stream was closed

    def counting_on(self, before: EngineStats) -> EngineStats:
        """With the counts of what was in this one's place before."""
        return replace(self, **{name: getattr(self, name) + getattr(before, name) for name in COUNTERS})


COUNTERS = (
    "decode_steps",
    "prefill_tokens",
    "prefix_cache_hit_tokens",
    "generation_tokens",
    "cancelled_sequences",
    "timed_out_sequences",
    "wasted_tokens",
)


class TokenStream(Protocol):
    """The events of one submit, in order within each sequence; ends after the last event of every sequence.

    A reader that lags gets fewer, larger events, none of which is larger than ``MOST_PER_EVENT``: the engine never
    waits for it.
    """

    def __aiter__(self) -> AsyncIterator[TokenEvent]: ...

    async def __anext__(self) -> TokenEvent: ...

    def extend(self, prompt_ids: Sequence[int]) -> None:
        """Appends ids to the (single, open) request. They are prefilled as they come where the memory is free.

        Raises InvalidInput when the prompt has become too long.
        """

    def seal(self, prompt_ids: Sequence[int]) -> None:
        """Ends an open request with its whole prompt; what was prefilled and is no prefix of it is prefilled anew."""

    def close(self) -> None:
        """Cancels what still runs. Synchronous, idempotent, safe from any task: call it in a ``finally``."""


class Engine(Protocol):
    """A loaded model that generates. All methods are called on the event loop's thread."""

    info: ModelInfo

    def submit(self, requests: Sequence[EngineRequest]) -> TokenStream:
        """Queues the requests of one request.

        Raises InvalidInput (a prompt that can never fit the context or the cache), QueueFull or NotServing.
        """

    def stats(self) -> EngineStats: ...

    @property
    def load(self) -> int:
        """Prompts that wait or are prefilled, and rows that are decoded."""

    @property
    def alive(self) -> bool:
        """False once the engine's thread has died, or was shut down."""

    @property
    def trouble(self) -> str | None:
        """Why new requests had better go elsewhere: it is dead, or does not come back from a step; None if neither."""

    def drain(self, why: str) -> None:
        """From now on ``submit`` raises NotServing with the reason ``why``; what runs goes on."""

    def abort_all(self, why: str) -> None:
        """Ends every stream with the finish reason ``abort``, the text it has, and the reason ``why``."""

    def shutdown(self) -> None:
        """Ends every stream with an error and joins the engine's thread. Blocks; call it off the loop."""
