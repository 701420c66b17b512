"""Declares the interface of spellings: how a request is read, how its replies are written, and what all replies count.

A new spelling is one file that derives from ``Spelling`` and one row of the table in ``spellings``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.openai_objects import ChatChoice, call_deltas, finite, usage_counts, whole_calls
from mlserver_torch_stream.tool_calls import ToolCallDelta, join_calls
from mlserver_torch_stream.types import (
    FinishReason,
    GenerationRequest,
    ModelInfo,
    Prompt,
    ReplyOptions,
    TokenEvent,
    TokenLogprob,
    Usage,
)

JsonObject = dict[str, Any]
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PostedBody:
    """The body of one request: its JSON object, the raw bytes that follow the object, and the HTTP headers."""

    json: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes = b""


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """What a reply shows besides the request and its tokens.

    ``created`` is in seconds since the epoch. ``request_index`` numbers the requests of one gRPC stream. ``headers``
    are CloudEvents attributes; a spelling that has a place for them writes them into the first message.
    """

    model_name: str
    model_version: str | None = None
    created: int = 0
    request_index: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class StreamEncoder(Protocol):
    """Writes the messages of one streamed request. An event of ``MAX_PER_EVENT`` is at most 48 KiB in each message."""

    def event(self, event: TokenEvent) -> Sequence[JsonObject]:
        """The messages of one event; the last event's include all that follows it, such as the usage.

        Raises RequestError where a sequence has failed and the spelling ends the whole request with it.
        """

    def fail(self, error: Exception) -> Sequence[JsonObject]:
        """Ends every sequence that has not ended because of ``error``; no message if all have ended."""

    def end(self) -> bytes | None:
        """The data of the event that ends the stream, such as ``[DONE]``; None if the last message is the end."""


class WholeEncoder(Protocol):
    """Writes the one reply of a request that is not streamed: every event is added, then ``body`` is called once."""

    def add(self, event: TokenEvent) -> None: ...

    def body(self) -> JsonObject: ...


class Spelling(ABC):
    """One way to write a request and its replies. A spelling has no state; its encoders have.

    ``keep_alive``: the block of SSE that is sent while a stream has no events; empty: none. ``event_name_field``: the
    field of a message that names its SSE event; None: the events have no names.
    """

    keep_alive = b": ping\n\n"
    event_name_field: str | None = None

    def accepts(self, body: Mapping[str, Any]) -> bool:
        """True if a body is in this spelling; the spellings of a path are asked in the order of the table."""
        return True

    def model(self, path: Mapping[str, str], body: Mapping[str, Any]) -> tuple[str, str | None]:
        """Name and version of the model: from the path, unless the spelling has them in the body."""
        return path["model_name"], path.get("model_version")

    def streams(self, body: Mapping[str, Any]) -> bool:
        """True if the body asks for a stream. Asked only where the path leaves that to the body."""
        return body.get("stream") is True

    def request_id(self, body: Mapping[str, Any], headers: Mapping[str, str] = NO_HEADERS) -> str:
        """The client's own id of the request; empty if there is none. ``headers`` are those of HTTP, in lower case."""
        return str(body.get("id") or "")

    def headers(self, request_id: str) -> Mapping[str, str]:
        """The HTTP headers of every reply in this spelling, also of an error."""
        return {}

    @abstractmethod
    def decode(self, posted: PostedBody, info: ModelInfo, *, streaming: bool, request_id: str) -> GenerationRequest:
        """Raises InvalidInput."""

    @abstractmethod
    def stream(self, request: GenerationRequest, context: ReplyContext) -> StreamEncoder: ...

    @abstractmethod
    def whole(self, request: GenerationRequest, context: ReplyContext) -> WholeEncoder: ...

    def attach(self, posted: PostedBody, body: JsonObject) -> tuple[JsonObject, bytes | None]:
        """The whole reply as it is sent, and the raw bytes that follow its JSON; None: the reply is JSON alone."""
        return body, None

    def refusal(self, error: RequestError) -> tuple[int, JsonObject]:
        """Status and body of an error before the first token."""
        return error.status, {"error": error.message}


class PromptCodec(Protocol):
    """A model's tokenizer and its chat template. Every method may take long, and may raise InvalidInput."""

    def encode(self, prompt: Prompt) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def token_strings(self, ids: Sequence[int]) -> Sequence[str]:
        """The tokens as the tokenizer's vocabulary has them."""


class PromptSpelling(ABC):
    """What a spelling has besides if its requests ask about a prompt alone, so that nothing is generated."""

    @abstractmethod
    def answer(self, request: GenerationRequest, codec: PromptCodec, info: ModelInfo) -> JsonObject:
        """The whole reply. Called in a thread; raises RequestError."""


class UsageCounter:
    """The usages of one request's sequences, filled in by their last events."""

    def __init__(self, request: GenerationRequest) -> None:
        self._per_prompt = request.sampling.n
        self._usages: list[Usage | None] = [None] * (len(request.prompts) * request.sampling.n)
        self._open = set(range(len(self._usages)))

    @property
    def unfinished(self) -> Sequence[int]:
        """The sequences whose last event has not been noted."""
        return sorted(self._open)

    def note(self, event: TokenEvent) -> bool:
        """True when this event is the very last of the request."""
        if event.finish_reason is None:
            return False
        self._open.remove(event.index)
        self._usages[event.index] = event.usage
        return not self._open

    @property
    def prompt_tokens_each(self) -> list[int]:
        """The number of tokens of each prompt; 0 if none of its sequences was counted."""
        sizes = [usage.num_input_tokens if usage is not None else 0 for usage in self._usages]
        return [max(sizes[start : start + self._per_prompt]) for start in range(0, len(sizes), self._per_prompt)]

    @property
    def completion_tokens_each(self) -> list[int]:
        """The number of tokens of each sequence, in the order of the prompts."""
        return [usage.num_output_tokens if usage is not None else 0 for usage in self._usages]

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompt_tokens_each)

    @property
    def completion_tokens(self) -> int:
        return sum(self.completion_tokens_each)

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens, of all prompts, that came from the prefix cache."""
        cached = [usage.num_cached_tokens if usage is not None else 0 for usage in self._usages]
        return sum(max(cached[start : start + self._per_prompt]) for start in range(0, len(cached), self._per_prompt))

    @property
    def reasoning_tokens(self) -> int:
        return sum(usage.num_reasoning_tokens for usage in self._usages if usage is not None)

    @property
    def ttft_ms(self) -> int:
        """Milliseconds until the first token of any sequence of the request."""
        return self._earliest([usage.ttft_s for usage in self._usages if usage is not None])

    @property
    def queue_ms(self) -> int:
        """Milliseconds until the first sequence of the request began."""
        return self._earliest([usage.queue_s for usage in self._usages if usage is not None])

    @staticmethod
    def _earliest(seconds: list[float]) -> int:
        return round(min(seconds, default=0.0) * 1000)


class RunningUsage:
    """The usages of one request's sequences so far, for ``continuous_usage_stats``: a chunk has its sequence's."""

    def __init__(self, request: GenerationRequest) -> None:
        self._completion_tokens = [0] * (len(request.prompts) * request.sampling.n)

    def before_and_after(self, event: TokenEvent) -> tuple[JsonObject, JsonObject]:
        """OpenAI's usage of the event's sequence without and with the event's tokens, which are counted."""
        before = self._completion_tokens[event.index]
        self._completion_tokens[event.index] = after = before + len(event.token_ids)
        return usage_counts(event.num_input_tokens, before), usage_counts(event.num_input_tokens, after)


def head(context: ReplyContext, request_id: str) -> JsonObject:
    """The beginning of every response to one request."""
    version = {} if context.model_version is None else {"model_version": context.model_version}
    return {"model_name": context.model_name, **version, "id": request_id}


_MAX_ERROR_CHARACTERS = 512  # of a message in a stream, whose lines are bounded; it may quote anything


def shown_values(reply: ReplyOptions) -> frozenset[str]:
    """The names of the values that a reply shows: only the named ones, if the request names outputs."""
    asked = {
        names.TEXT_OUTPUT: True,
        names.FINISH_REASON: reply.finish_reason,
        names.NUM_INPUT_TOKENS: reply.num_input_tokens,
        names.NUM_OUTPUT_TOKENS: reply.num_output_tokens,
        names.CUMULATIVE_LOGPROB: reply.cumulative_logprob,
        names.LOGPROBS: reply.logprobs,
        names.PROMPT_LOGPROBS: reply.prompt_logprobs,
        names.TOKEN_IDS: reply.token_ids,
        names.REASONING: True,
        names.TOOL_CALLS: True,
    }
    return frozenset(
        name for name, wanted in asked.items() if wanted and (reply.outputs is None or name in reply.outputs)
    )


def event_values(event: TokenEvent, shown: frozenset[str]) -> dict[str, Any]:
    """The values of one event by name: one each, but a list of ids and a list of log-probabilities."""
    values: dict[str, Any] = {names.TEXT_OUTPUT: event.prompt_text + event.text} if names.TEXT_OUTPUT in shown else {}
    if event.reasoning and names.REASONING in shown:
        values[names.REASONING] = event.reasoning
    if event.tool_calls and names.TOOL_CALLS in shown:
        values[names.TOOL_CALLS] = call_deltas(event.tool_calls)
    if names.TOKEN_IDS in shown and event.token_ids:
        values[names.TOKEN_IDS] = list(event.token_ids)
    if event.logprobs and names.LOGPROBS in shown:
        values[names.LOGPROBS] = logprob_objects(event.logprobs)
    if event.prompt_logprobs and names.PROMPT_LOGPROBS in shown:
        values[names.PROMPT_LOGPROBS] = logprob_objects(event.prompt_logprobs)
    if names.CUMULATIVE_LOGPROB in shown and event.cumulative_logprob is not None:
        values[names.CUMULATIVE_LOGPROB] = finite(event.cumulative_logprob)
    if event.finish_reason is not None:
        if names.FINISH_REASON in shown:
            values[names.FINISH_REASON] = event.finish_reason.value
        if event.usage is not None and names.NUM_INPUT_TOKENS in shown:
            values[names.NUM_INPUT_TOKENS] = event.usage.num_input_tokens
        if event.usage is not None and names.NUM_OUTPUT_TOKENS in shown:
            values[names.NUM_OUTPUT_TOKENS] = event.usage.num_output_tokens
    return values


def logprob_objects(entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Returns tokens and their most likely alternatives as JSON objects. Log-probabilities are natural ones."""
    return [
        {
            "token_id": entry.token_id,
            "logprob": finite(entry.logprob),
            "top": [[token_id, finite(logprob)] for token_id, logprob in entry.top],
        }
        for entry in entries
    ]


class StreamProgress:
    """Numbers the messages of one streamed request, and knows which of them is the last."""

    def __init__(self, request: GenerationRequest, request_index: int | None) -> None:
        self.usage = UsageCounter(request)
        self.error = ""  # the message of the last sequence that failed
        self._request_index = request_index
        self._messages = 0

    def describe(self, event: TokenEvent, target: dict[str, Any]) -> bool:
        """Writes into ``target`` where the event's message stands in its stream. True: it is the request's last."""
        final = event.finish_reason is not None and self.usage.note(event)
        target["index"] = event.index
        target["chunk_index"] = self._messages
        target["triton_final_response"] = final
        self._messages += 1
        if self._request_index is not None:
            target["request_index"] = self._request_index
        if event.error is not None:
            self.error = target["error"] = shortened(str(event.error) or type(event.error).__name__)
        if final:
            target.update(totals(self.usage))
        return final

    def endings(self, error: Exception) -> list[TokenEvent]:
        """The last events of all sequences that have not ended, which ``error`` ends."""
        return [TokenEvent(index, finish_reason=FinishReason.ERROR, error=error) for index in self.usage.unfinished]


def totals(usage: UsageCounter) -> dict[str, int]:
    """The counts that only the last message has."""
    return {
        "usage_prompt_tokens": usage.prompt_tokens,
        "usage_completion_tokens": usage.completion_tokens,
        "ttft_ms": usage.ttft_ms,
        "queue_ms": usage.queue_ms,
    }


def shortened(message: str) -> str:
    """Returns an error's message, cut off where it is too long for an event."""
    return message if len(message) <= _MAX_ERROR_CHARACTERS else f"{message[: _MAX_ERROR_CHARACTERS - 1]}…"


class CollectedSequence:
    """The events of one sequence, joined."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.prompt_ids: Sequence[int] = ()
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> tuple[ToolCallDelta, ...]:
        """The whole calls of the sequence."""
        return join_calls(self._calls)

    def add(self, event: TokenEvent) -> None:
        self.texts.append(event.prompt_text + event.text)
        self._reasoning.append(event.reasoning)
        self._calls += event.tool_calls
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        self.finish_reason = event.finish_reason
        self.stop_reason = event.stop_reason
        self.prompt_ids = event.prompt_ids or self.prompt_ids
        if event.cumulative_logprob is not None:
            self.cumulative_logprob = event.cumulative_logprob


class CollectedReply:
    """All events of a request, joined by sequence."""

    def __init__(self, request: GenerationRequest) -> None:
        self.usage = UsageCounter(request)
        self._request = request
        self.sequences = [CollectedSequence() for _ in self.usage.unfinished]

    def add(self, event: TokenEvent) -> None:
        self.usage.note(event)
        self.sequences[event.index].add(event)

    def values(self, shown: frozenset[str]) -> dict[str, list[Any]]:
        """The values by name, one element for each sequence or prompt; the ids of all sequences are one list."""
        assert not self.usage.unfinished, "a whole reply is asked for before its last event"
        sequences = self.sequences
        every: dict[str, list[Any]] = {
            names.TEXT_OUTPUT: ["".join(each.texts) for each in sequences],
            names.FINISH_REASON: [each.finish_reason.value for each in sequences if each.finish_reason is not None],
            names.NUM_INPUT_TOKENS: self.usage.prompt_tokens_each,
            names.NUM_OUTPUT_TOKENS: self.usage.completion_tokens_each,
            names.CUMULATIVE_LOGPROB: [finite(each.cumulative_logprob) for each in sequences],
            names.LOGPROBS: [logprob_objects(each.logprobs) for each in sequences],
            names.PROMPT_LOGPROBS: [logprob_objects(each.prompt_logprobs) for each in sequences],
            names.TOKEN_IDS: [token_id for each in self._filled_ids() for token_id in each],
        }
        asked = self._request.reply.outputs or ()
        told: dict[str, list[Any]] = {
            names.REASONING: [each.reasoning for each in sequences],
            names.TOOL_CALLS: [whole_calls(each.tool_calls) for each in sequences],
        }
        every.update((name, values) for name, values in told.items() if any(values) or name in asked)
        return {name: value for name, value in every.items() if name in shown}

    def choices(self) -> list[ChatChoice]:
        """Every sequence, for OpenAI's objects."""
        wanted, ids = self._request.sampling.logprobs, self._request.reply.token_ids
        return [
            ChatChoice(
                *(index, "".join(each.texts), each.finish_reason),
                *(each.prompt_logprobs + each.logprobs if wanted else None, each.reasoning, each.tool_calls),
                *((each.token_ids, each.prompt_ids) if ids else ()),
            )
            for index, each in enumerate(self.sequences)
        ]

    def _filled_ids(self) -> list[list[int]]:
        """The ids of each sequence; the shorter ones are filled up with -1."""
        longest = max(len(each.token_ids) for each in self.sequences)
        return [[*each.token_ids, *[-1] * (longest - len(each.token_ids))] for each in self.sequences]


class WholeReply(CollectedReply):
    """The values of a whole reply, and the further fields that it shows."""

    def __init__(self, request: GenerationRequest, context: ReplyContext) -> None:
        super().__init__(request)
        self._context = context
