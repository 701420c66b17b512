"""Builds OpenAI's chat.completion and text_completion objects and their chunks.

A token whose bytes are not known is written as ``token_id:<id>``, as in vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any, ClassVar, Protocol

from mlserver_torch_stream.tool_calls import ToolCallDelta
from mlserver_torch_stream.types import FinishReason, TokenLogprob


class TokenCounts(Protocol):
    """The numbers of tokens that a request has used."""

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts."""

    @property
    def completion_tokens(self) -> int:
        """The number of tokens of all answers."""

    @property
    def cached_tokens(self) -> int | None:
        """The number of prompt tokens that were taken from a prefix cache; None if that is unknown."""

    @property
    def reasoning_tokens(self) -> int:
        """The number of completion tokens that belong to the reasoning before the answer."""


@dataclass(slots=True)  # a frozen one takes five times as long to create
class ChatChoice:
    """One sequence's answer, or a part of it. A finish reason is a str if it comes from another server."""

    index: int
    text: str
    finish_reason: FinishReason | str | None
    logprobs: Sequence[TokenLogprob] | None = None  # None: not requested
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()
    token_ids: Sequence[int] | None = None  # None: not requested
    prompt_ids: Sequence[int] | None = None  # None: not requested, or sent already


@dataclass(frozen=True, slots=True)
class CompletionBuilder:
    """Builds the JSON objects of one request. ``created`` is in seconds since the epoch."""

    request_id: str
    model: str
    created: int
    id_prefix: ClassVar[str]
    chunk_kind: ClassVar[str]

    def usage_chunk(self, usage: TokenCounts) -> dict[str, Any]:
        """Returns the chunk with the usage, which follows all choices of a stream."""
        return {**self._head(self.chunk_kind), "choices": [], "usage": usage_of(usage)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


class ChatCompletion(CompletionBuilder):
    """Builds the objects of ``/v1/chat/completions``: one whole answer, or the chunks of a stream."""

    id_prefix = "chatcmpl"
    chunk_kind = "chat.completion.chunk"

    def whole(self, choices: Sequence[ChatChoice], tally: TokenCounts) -> dict[str, Any]:
        """Returns the object of a whole answer."""
        return {
            **self._head("chat.completion"),
            "choices": [_choice(choice, "message", _message(choice)) for choice in choices],
            "usage": usage_of(tally),
            **_prompt_ids(choices[0]),
        }

    def chunk(self, choice: ChatChoice, *, first: bool, usage: TokenCounts | None) -> dict[str, Any]:
        """Returns a chunk. ``first`` is true for the first chunk of a choice. Only the last chunk of a request may have
        a ``usage``.
        """
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        delta.update(_reasoning(choice))
        if choice.text or (first and not choice.tool_calls):
            delta["content"] = choice.text
        if choice.tool_calls:
            delta["tool_calls"] = call_deltas(choice.tool_calls)
        head = {**self._head(self.chunk_kind), "choices": [_choice(choice, "delta", delta)], **_prompt_ids(choice)}
        return head if usage is None else {**head, "usage": usage_of(usage)}


def _message(choice: ChatChoice) -> dict[str, Any]:
    content = None if choice.tool_calls and not choice.text else choice.text
    message = {"role": "assistant", "content": content, **_reasoning(choice)}
    return {**message, "tool_calls": whole_calls(choice.tool_calls)} if choice.tool_calls else message


def _reasoning(choice: ChatChoice) -> dict[str, Any]:
    """Returns the reasoning under the two names that clients know; OpenAI's API has no field for it."""
    return {"reasoning": choice.reasoning, "reasoning_content": choice.reasoning} if choice.reasoning else {}


def whole_calls(calls: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """Returns the calls of a whole answer as JSON objects."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def call_deltas(calls: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """Returns the parts of calls in a chunk; the first part of each call has its id and its name."""
    deltas = []
    for call in calls:
        if call.id is None:
            deltas.append({"index": call.index, "function": {"arguments": call.arguments}})
        else:
            deltas.append({"index": call.index, **whole_calls([call])[0]})
    return deltas


def _choice(choice: ChatChoice, key: str, value: dict[str, Any]) -> dict[str, Any]:
    return {
        "index": choice.index,
        key: value,
        "logprobs": None if choice.logprobs is None else {"content": logprob_entries(choice.logprobs), "refusal": None},
        "finish_reason": reason_of(choice),
        **_token_ids(choice),
    }


def _token_ids(choice: ChatChoice) -> dict[str, Any]:
    """Returns the token ids in the field that vLLM uses for them."""
    return {} if choice.token_ids is None else {"token_ids": list(choice.token_ids)}


def _prompt_ids(choice: ChatChoice) -> dict[str, Any]:
    return {} if choice.prompt_ids is None else {"prompt_token_ids": list(choice.prompt_ids)}


def logprob_entries(entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Returns one entry of ``logprobs.content`` for each token."""
    return [_logprob(entry) for entry in entries]


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    top = [_named(*alternative) for alternative in alternatives(entry)]
    return {**_named(entry.token_id, entry.logprob, entry.token), "top_logprobs": top}


def reason_of(choice: ChatChoice) -> str | None:
    """Returns a choice's ``finish_reason`` as it is written in JSON."""
    reason = choice.finish_reason
    return reason.value if isinstance(reason, FinishReason) else reason


def alternatives(entry: TokenLogprob) -> Iterator[tuple[int, float, bytes | None]]:
    """Yields the most likely tokens at a position: id, log-probability and bytes."""
    for (token_id, logprob), token in zip_longest(entry.top, entry.top_tokens):
        yield token_id, logprob, token


def token_name(token_id: int, token: bytes | None) -> str:
    """Returns a token's text. Bytes of an incomplete character are escaped, so that no two tokens look the same."""
    return f"token_id:{token_id}" if token is None else token.decode("utf-8", "backslashreplace")


def _named(token_id: int, logprob: float | None, token: bytes | None) -> dict[str, Any]:
    shown = None if token is None else list(token)
    return {"token": token_name(token_id, token), "logprob": finite(logprob), "bytes": shown}


def finite(logprob: float | None) -> float | None:
    """Returns a log-probability that JSON can express.

    As in OpenAI's API, it is -9999.0 for an impossible token, and null for the first token of a prompt.
    """
    return logprob if logprob is None or math.isfinite(logprob) else -9999.0


def usage_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Returns the three counts that every ``usage`` has."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def usage_of(tally: TokenCounts) -> dict[str, Any]:
    """Returns an answer's ``usage``: its tokens, the prompt tokens from the prefix cache, and the tokens of its
    reasoning.
    """
    usage = usage_counts(tally.prompt_tokens, tally.completion_tokens)
    if tally.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": tally.cached_tokens}
    if tally.reasoning_tokens:
        usage["completion_tokens_details"] = {"reasoning_tokens": tally.reasoning_tokens}
    return usage


def completion(chat: bool, model: str, choices: Sequence[ChatChoice], counts: TokenCounts) -> dict[str, Any]:
    """Returns an answer's object with an empty id and the time 0, and without the number of cached tokens."""
    whole = (ChatCompletion if chat else TextCompletion)("", model, 0).whole(choices, counts)
    whole["usage"].pop("prompt_tokens_details", None)
    return whole


class TextCompletion(CompletionBuilder):
    """Builds the objects of ``/v1/completions``: one whole answer, or the chunks of a stream."""

    id_prefix = "cmpl"
    chunk_kind = "text_completion"  # the whole answer has the same kind

    def whole(self, choices: Sequence[ChatChoice], counts: TokenCounts) -> dict[str, Any]:
        """Returns the object of a whole answer."""
        answers = [_text_choice(choice, 0) for choice in choices]
        return {**self._head(self.chunk_kind), "choices": answers, "usage": usage_of(counts)}

    def chunk(self, choice: ChatChoice, offset: int) -> dict[str, Any]:
        """Returns a chunk. ``offset`` is the number of characters of the choice's tokens in earlier chunks."""
        return {**self._head(self.chunk_kind), "choices": [_text_choice(choice, offset)]}


def shown_length(entries: Sequence[TokenLogprob]) -> int:
    """Returns the number of characters of these tokens, as ``text_offset`` counts them."""
    return sum(len(_name(entry)) for entry in entries)


def _text_choice(choice: ChatChoice, offset: int) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": None if choice.logprobs is None else _logprobs(choice.logprobs, offset),
        "finish_reason": reason_of(choice),
        **_token_ids(choice),
        **_prompt_ids(choice),
    }


def _logprobs(entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    tokens = [_name(entry) for entry in entries]
    ends = accumulate(map(len, tokens), initial=offset)
    return {
        "tokens": tokens,
        "token_logprobs": [finite(entry.logprob) for entry in entries],
        "top_logprobs": [_top(entry) for entry in entries] if any(entry.top for entry in entries) else None,
        "text_offset": [start for start, _ in zip(ends, tokens, strict=False)],
    }


def _top(entry: TokenLogprob) -> dict[str, float | None] | None:
    """Returns the alternatives' log-probabilities by their text, or None for the first token of a prompt.

    As in OpenAI's API, the chosen token is added if it is not among the alternatives.
    """
    if entry.logprob is None:
        return None
    named = {token_name(token_id, token): finite(logprob) for token_id, logprob, token in alternatives(entry)}
    return {**named, _name(entry): finite(entry.logprob)}


def _name(entry: TokenLogprob) -> str:
    return token_name(entry.token_id, entry.token)
