"""Token events become OpenAI's chunks; a sequence that fails ends the whole stream with an error."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from mlserver_torch_stream.errors import GenerationFailed, NotServing, TimedOut
from mlserver_torch_stream.protocol.openai_objects import ChatChoice, completion
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_CHAT, OPENAI_COMPLETIONS, OpenAISpelling
from mlserver_torch_stream.protocol.spelling import ReplyContext, UsageCounter
from mlserver_torch_stream.types import (
    MAX_PER_EVENT,
    FinishReason,
    TokenEvent,
    TokenLogprob,
    Usage,
    add_event,
)
from tests.protocol.asked import asked

_CONTEXT = ReplyContext("m", created=17)
_LAST = TokenEvent(0, "b", (8,), finish_reason=FinishReason.STOP, usage=Usage(4, 2, num_cached_tokens=3))
_BOTH = pytest.mark.parametrize("spelling", [OPENAI_CHAT, OPENAI_COMPLETIONS], ids=["chat", "completions"])


def test_a_chat_is_a_role_its_pieces_and_an_end() -> None:
    encoder = OPENAI_CHAT.stream(asked(usage_message=True), _CONTEXT)
    chunks = [*encoder.event(TokenEvent(0, "a", (7,))), *encoder.event(_LAST)]
    head = {"id": "chatcmpl-r", "object": "chat.completion.chunk", "created": 17, "model": "m", "usage": None}

    def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}

    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    assert chunks == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "a"}),
        chunk({"content": "b"}, "stop"),
        {**head, "choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 3}}},
    ]
    assert encoder.end() == b"[DONE]"


@_BOTH
def test_every_chunk_has_the_usage_of_its_sequence_so_far(spelling: OpenAISpelling) -> None:
    """As in vLLM, the first chunk of a chat, which has the role, counts no tokens, and the last chunk counts all."""
    encoder = spelling.stream(asked(usage_message=True, continuous_usage=True, sampling={"n": 2}), _CONTEXT)
    events = [
        TokenEvent(0, "a", (7,), num_input_tokens=4),
        TokenEvent(0, "", (7,), num_input_tokens=4),  # part of a character
        TokenEvent(1, "b", (8, 9), num_input_tokens=4),
        TokenEvent(0, "c", (8,), finish_reason=FinishReason.STOP, usage=Usage(4, 3), num_input_tokens=4),
        TokenEvent(1, "d", (8,), finish_reason=FinishReason.STOP, usage=Usage(4, 3), num_input_tokens=4),
    ]
    usages = [chunk["usage"] for event in events for chunk in encoder.event(event)]
    roles = [0] if spelling is OPENAI_CHAT else []
    assert [usage["completion_tokens"] for usage in usages] == [*roles, 1, *roles, 2, 3, 3, 6]
    assert {usage["prompt_tokens"] for usage in usages} == {4}
    assert all(usage["total_tokens"] == 4 + usage["completion_tokens"] for usage in usages)


@_BOTH
def test_an_event_that_shows_nothing_is_no_chunk_but_its_logprobs_are(spelling: OpenAISpelling) -> None:
    silent = TokenEvent(0, "", (7,), (TokenLogprob(7, -1.0, token=b"\xe2"),))
    assert spelling.stream(asked(), _CONTEXT).event(silent) == ()
    *_, chunk = spelling.stream(asked(sampling={"logprobs": True}), _CONTEXT).event(silent)
    assert "\\\\xe2" in orjson.dumps(chunk["choices"][0]["logprobs"]).decode()


@_BOTH
@pytest.mark.parametrize(
    ("reason", "error", "code"),
    [
        (FinishReason.TIMEOUT, TimedOut("late"), None),
        (FinishReason.ABORT, NotServing("the end"), None),
        (FinishReason.ERROR, GenerationFailed("broken"), None),
        (FinishReason.ABORT, None, None),
    ],
)
def test_a_sequence_that_fails_ends_all_of_them(
    spelling: OpenAISpelling, reason: FinishReason, error: Exception | None, code: str | None
) -> None:
    encoder = spelling.stream(asked(sampling={"n": 2}), _CONTEXT)
    encoder.event(TokenEvent(1, "a", (7,)))
    failed = TokenEvent(0, finish_reason=reason, error=error)
    with pytest.raises(type(error or GenerationFailed(""))) as raised:
        encoder.event(failed)
    [message] = encoder.fail(raised.value)
    described = {"message": str(raised.value), "type": "server_error", "param": None, "code": code}
    assert message == {"error": described}
    assert encoder.end() is None
    whole = spelling.whole(asked(sampling={"n": 2}), _CONTEXT)
    with pytest.raises(type(raised.value)):
        whole.add(failed)


@_BOTH
def test_a_failure_behind_the_end_is_none(spelling: OpenAISpelling) -> None:
    encoder = spelling.stream(asked(), _CONTEXT)
    encoder.event(_LAST)
    assert encoder.fail(RuntimeError("late")) == () and encoder.end() == b"[DONE]"


@pytest.mark.parametrize("chat", [True, False])
def test_an_answer_for_a_file_is_the_same_whatever_a_cache_had(chat: bool) -> None:
    usages = []
    for cached in (0, 3):
        counter = UsageCounter(asked())
        counter.note(TokenEvent(0, finish_reason=FinishReason.STOP, usage=Usage(4, 2, num_cached_tokens=cached)))
        usages.append(completion(chat, "m", [ChatChoice(0, "a", FinishReason.STOP)], counter)["usage"])
    assert usages[0] == usages[1] == {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}


@_BOTH
def test_a_long_error_is_shortened(spelling: OpenAISpelling) -> None:
    [message] = spelling.stream(asked(), _CONTEXT).fail(RuntimeError("0123456789" * 1000))
    assert len(message["error"]["message"]) == 512


@_BOTH
@pytest.mark.parametrize("token", [b"\x01" * 60, "🙂".encode()[:3], b"a"], ids=["control", "part", "letter"])
def test_merged_events_with_logprobs_stay_below_48_kib(spelling: OpenAISpelling, token: bytes) -> None:
    top = tuple((number, -1.2345678901234567e-05) for number in range(20))
    entry = TokenLogprob(399, -1.2345678901234567e-05, top, token, tuple(bytes([n]) + token for n in range(20)))
    merged: list[TokenEvent] = []
    for _ in range(200):
        add_event(merged, TokenEvent(0, "\x01", (399,), (entry,), -1.5))
    encoder = spelling.stream(asked(sampling={"logprobs": True}), _CONTEXT)
    chunks = [chunk for event in merged for chunk in encoder.event(event)]
    assert max(len(orjson.dumps(chunk)) for chunk in chunks) < 48 * 1024
    assert all(event.size <= MAX_PER_EVENT or len(event.logprobs) == 1 for event in merged)
