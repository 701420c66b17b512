"""Defines the interface of spellings, which read requests and write replies, and the token counts that all replies
share.

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
    """The values of a reply that come neither from its request nor from the model.

    ``created`` is in seconds since the epoch. ``request_index`` numbers the requests of one gRPC stream. ``headers``
    are CloudEvents attributes; a spelling that has a place for them writes them into the first message.
    """

    model_name: str
    model_version: str | None = None
    created: int = 0
    request_index: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class StreamEncoder(Protocol):
    """Writes the messages of one streamed request.

    An event of size ``MAX_PER_EVENT`` makes a message of at most 48 KiB.
    """

    def event(self, event: TokenEvent) -> Sequence[JsonObject]:
        """Returns the messages of one event. Those of the last event include the usage and whatever ends the reply.

        Raises RequestError if a sequence has failed and a failed sequence ends the whole request in this spelling.
        """

    def fail(self, error: Exception) -> Sequence[JsonObject]:
        """Returns the messages that end all open sequences because of ``error``; none if all have ended."""

    def end(self) -> bytes | None:
        """Returns the data of a final event, such as ``[DONE]``; None if the stream ends with its last message."""


class WholeEncoder(Protocol):
    """Writes the reply to a request that is not streamed: ``add`` gets every event, then ``body`` is called once."""

    def add(self, event: TokenEvent) -> None:
        """Adds the next event of any sequence of the request."""

    def body(self) -> JsonObject:
        """Returns the whole reply, made from the events that were added."""


class Spelling(ABC):
    """One format of requests and replies. A spelling has no state; the encoders that it makes do.

    ``keep_alive`` is the SSE block that is sent while a stream has no events; if it is empty, none is sent.
    ``event_name_field`` is the field of a message that becomes the name of its SSE event; None means no names.
    """

    keep_alive = b": ping\n\n"
    event_name_field: str | None = None

    def accepts(self, body: Mapping[str, Any]) -> bool:
        """Whether a body is in this spelling. A path uses the first of its spellings that accepts the body."""
        return True

    def model(self, path: Mapping[str, str], body: Mapping[str, Any]) -> tuple[str, str | None]:
        """Returns the model's name and version, from the path or, in spellings such as OpenAI's, from the body."""
        return path["model_name"], path.get("model_version")

    def streams(self, body: Mapping[str, Any]) -> bool:
        """Whether the body asks for a stream. It is called only for paths where the body decides."""
        return body.get("stream") is True

    def request_id(self, body: Mapping[str, Any], headers: Mapping[str, str] = NO_HEADERS) -> str:
        """Returns the id that the client gave the request; empty if it gave none. ``headers`` are HTTP's, in lower
        case.
        """
        return str(body.get("id") or "")

    def headers(self, request_id: str) -> Mapping[str, str]:
        """Returns the HTTP headers of every reply in this spelling, including errors."""
        return {}

    @abstractmethod
    def decode(self, posted: PostedBody, info: ModelInfo, *, streaming: bool, request_id: str) -> GenerationRequest:
        """Reads the body into a request, checked against the model's ``info``. Raises InvalidInput."""

    @abstractmethod
    def stream(self, request: GenerationRequest, context: ReplyContext) -> StreamEncoder:
        """Makes the encoder of a streamed reply."""

    @abstractmethod
    def whole(self, request: GenerationRequest, context: ReplyContext) -> WholeEncoder:
        """Makes the encoder of a reply that is sent whole."""

    def attach(self, posted: PostedBody, body: JsonObject) -> tuple[JsonObject, bytes | None]:
        """Returns the whole reply as it is sent, and the raw bytes after its JSON; None if there are no such bytes."""
        return body, None

    def refusal(self, error: RequestError) -> tuple[int, JsonObject]:
        """Returns the HTTP status and the body of an error before the first token."""
        return error.status, {"error": error.message}


class PromptCodec(Protocol):
    """A model's tokenizer and chat template. Every method may take seconds, and may raise InvalidInput."""

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """Returns the prompt's token ids. A conversation is rendered with the chat template first."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Returns the text of the ids, without special tokens if ``skip_special_tokens`` is true."""

    def token_strings(self, ids: Sequence[int]) -> Sequence[str]:
        """Returns the ids' entries in the tokenizer's vocabulary."""


class PromptSpelling(ABC):
    """A base class of spellings whose requests concern only a prompt, so that no token is generated."""

    @abstractmethod
    def answer(self, request: GenerationRequest, codec: PromptCodec, info: ModelInfo) -> JsonObject:
        """Returns the whole reply. Called in a thread. Raises RequestError."""


class UsageCounter:
    """The token counts and times of one request's sequences, taken from their last events."""

    def __init__(self, request: GenerationRequest) -> None:
        self._per_prompt = request.sampling.n
        self._usages: list[Usage | None] = [None] * (len(request.prompts) * request.sampling.n)
        self._open = set(range(len(self._usages)))

    @property
    def unfinished(self) -> Sequence[int]:
        """The indices of the sequences whose last event has not been noted yet."""
        return sorted(self._open)

    def note(self, event: TokenEvent) -> bool:
        """Notes an event. Returns True if the event is the last one of the whole request."""
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
        """The number of tokens of all prompts."""
        return sum(self.prompt_tokens_each)

    @property
    def completion_tokens(self) -> int:
        """The number of tokens of all sequences."""
        return sum(self.completion_tokens_each)

    @property
    def cached_tokens(self) -> int:
        """The number of tokens in all prompts that came from the prefix cache."""
        cached = [usage.num_cached_tokens if usage is not None else 0 for usage in self._usages]
        return sum(max(cached[start : start + self._per_prompt]) for start in range(0, len(cached), self._per_prompt))

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens in all sequences that belong to the reasoning before the answer."""
        return sum(usage.num_reasoning_tokens for usage in self._usages if usage is not None)

    @property
    def ttft_ms(self) -> int:
        """Milliseconds from the request's arrival to its first token, in any sequence."""
        return self._earliest([usage.ttft_s for usage in self._usages if usage is not None])

    @property
    def queue_ms(self) -> int:
        """Milliseconds from the request's arrival until its first sequence left the queue."""
        return self._earliest([usage.queue_s for usage in self._usages if usage is not None])

    @staticmethod
    def _earliest(seconds: list[float]) -> int:
        return round(min(seconds, default=0.0) * 1000)


class RunningUsage:
    """The usage of each sequence so far. With ``continuous_usage_stats`` each chunk shows its sequence's usage."""

    def __init__(self, request: GenerationRequest) -> None:
        self._completion_tokens = [0] * (len(request.prompts) * request.sampling.n)

    def before_and_after(self, event: TokenEvent) -> tuple[JsonObject, JsonObject]:
        """Counts the event's tokens. Returns OpenAI's usage of the event's sequence without and with this event."""
        before = self._completion_tokens[event.index]
        self._completion_tokens[event.index] = after = before + len(event.token_ids)
        return usage_counts(event.num_input_tokens, before), usage_counts(event.num_input_tokens, after)


def head(context: ReplyContext, request_id: str) -> JsonObject:
    """Returns the fields with which every response to one request begins."""
    version = {} if context.model_version is None else {"model_version": context.model_version}
    return {"model_name": context.model_name, **version, "id": request_id}


_MAX_ERROR_CHARACTERS = 512  # characters of an error in a stream, whose lines are bounded


def shown_values(reply: ReplyOptions) -> frozenset[str]:
    """Returns the names of the values in a reply. If the request names outputs, only those are included."""
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
    """Returns the values that a reply shows for one event, by name. Token ids and log-probabilities are lists; all
    other values are scalars.
    """
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
    """Returns tokens and their most likely alternatives as JSON objects; log-probabilities are natural logarithms."""
    return [
        {
            "token_id": entry.token_id,
            "logprob": finite(entry.logprob),
            "top": [[token_id, finite(logprob)] for token_id, logprob in entry.top],
        }
        for entry in entries
    ]


class StreamProgress:
    """Numbers the messages of one streamed request, and finds the last one."""

    def __init__(self, request: GenerationRequest, request_index: int | None) -> None:
        self.usage = UsageCounter(request)
        self.error = ""  # the message of the last sequence that failed
        self._request_index = request_index
        self._messages = 0

    def describe(self, event: TokenEvent, target: dict[str, Any]) -> bool:
        """Writes the position of the event's message in the stream into ``target``.

        Returns True if the message is the request's last.
        """
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
        """Returns a last event, with ``error``, for each sequence that has not ended."""
        return [TokenEvent(index, finish_reason=FinishReason.ERROR, error=error) for index in self.usage.unfinished]


def totals(usage: UsageCounter) -> dict[str, int]:
    """Returns the counts and times that only the last message has."""
    return {
        "usage_prompt_tokens": usage.prompt_tokens,
        "usage_completion_tokens": usage.completion_tokens,
        "ttft_ms": usage.ttft_ms,
        "queue_ms": usage.queue_ms,
    }


def shortened(message: str) -> str:
    """Returns an error's message, cut to the length that fits into an event."""
    return message if len(message) <= _MAX_ERROR_CHARACTERS else f"{message[: _MAX_ERROR_CHARACTERS - 1]}…"


class CollectedSequence:
    """The joined events of one sequence."""

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
        """The joined reasoning of the sequence; empty if there is none."""
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> tuple[ToolCallDelta, ...]:
        """The complete tool calls of the sequence."""
        return join_calls(self._calls)

    def add(self, event: TokenEvent) -> None:
        """Joins an event to the sequence."""
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
    """The events of each sequence of a request, joined."""

    def __init__(self, request: GenerationRequest) -> None:
        self.usage = UsageCounter(request)
        self._request = request
        self.sequences = [CollectedSequence() for _ in self.usage.unfinished]

    def add(self, event: TokenEvent) -> None:
        """Joins an event to its sequence."""
        self.usage.note(event)
        self.sequences[event.index].add(event)

    def values(self, shown: frozenset[str]) -> dict[str, list[Any]]:
        """Returns the values that the reply shows, by name, with one element for each sequence or prompt.

        The token ids of all sequences are one flat list.
        """
        assert not self.usage.unfinished, "the reply is not complete before its last event"
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
        """Returns the sequences as choices of OpenAI's objects."""
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
        """Returns each sequence's token ids, padded with -1 to the longest sequence."""
        longest = max(len(each.token_ids) for each in self.sequences)
        return [[*each.token_ids, *[-1] * (longest - len(each.token_ids))] for each in self.sequences]


class WholeReply(CollectedReply):
    """Collects a reply that is sent whole, and holds the names of the values that the reply shows."""

    def __init__(self, request: GenerationRequest, context: ReplyContext) -> None:
        super().__init__(request)
        self._context = context
