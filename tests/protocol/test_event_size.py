"""No line of a stream exceeds 48 KiB, over any API, whatever was merged: proxies read lines of up to 64 KiB."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.generate import FLAT
from mlserver_torch_stream.protocol.seldon_spelling import SELDON
from mlserver_torch_stream.protocol.spelling import ReplyContext, Spelling
from mlserver_torch_stream.protocol.v2_reply import V2
from mlserver_torch_stream.protocol.v2_request import decode_request
from mlserver_torch_stream.tool_calls import ToolCallDelta, join_calls
from mlserver_torch_stream.types import (
    FinishReason,
    GenerationRequest,
    ModelInfo,
    TokenEvent,
    TokenLogprob,
    Usage,
    add_event,
)
from tests.protocol.asked import asked
from tests.protocol.wire import over_rest, text

_BOUND = 48 * 1024
_HEADERS = 4 * 1024  # the first response of a stream over REST carries CloudEvents headers, at most 1 KiB each
_LONG_ID = "\x01" * 256
_NAME = "m" * 100
_CHARACTERS = st.sampled_from(["\x01", '"', "\\", "\n", "a", "é", "日", "🙂"])
_LOGPROB = -1.2345678901234567e-05


# As tokenizers have them: words, parts of characters, control characters, long runs of spaces.
_TOKENS = st.sampled_from([b" the", b"\xf0", b"\x01" * 8, b" " * 128])


def _entry(token_id: int, alternatives: int, token: bytes) -> TokenLogprob:
    return TokenLogprob(token_id, _LOGPROB, ((token_id, _LOGPROB),) * alternatives, token, (token,) * alternatives)


@st.composite
def _steps(draw: st.DrawFn) -> list[TokenEvent]:
    """The events of one sequence, the last of which is a long error."""
    alternatives = draw(st.sampled_from([None, 0, 5, 20]))
    kind = draw(st.sampled_from(["text", "reasoning", "calls"]))
    character, token = draw(_CHARACTERS), draw(_TOKENS)
    steps = []
    for number in range(draw(st.integers(1, 400))):
        token_id = 1_000_000 + number
        logprobs = () if alternatives is None else (_entry(token_id, alternatives, token),)
        said = character * draw(st.integers(0, 12))
        step = TokenEvent(0, "", (token_id,), logprobs, None if alternatives is None else -1.5)
        if kind == "calls":  # each of one function, or of several
            begins = ("call_" + "0" * 24, "n" * 64) if number % 3 == 0 else (None, None)
            steps.append(replace(step, tool_calls=(ToolCallDelta(number // 3, *begins, said),)))
        else:
            steps.append(replace(step, **{kind: said}))
    return [
        *steps,
        TokenEvent(0, finish_reason=FinishReason.ERROR, usage=Usage(3, 400), error=ValueError("\x01" * 9999)),
    ]


def _request(steps: list[TokenEvent]) -> GenerationRequest:
    logprobs = bool(steps[0].logprobs)
    shown = dict.fromkeys(("cumulative_logprob", "logprobs", "usage_message", "continuous_usage", "details"), logprobs)
    return asked(request_id=_LONG_ID, sampling={"logprobs": logprobs}, token_ids=True, **shown)


@pytest.mark.parametrize("spelling", [V2, FLAT, SELDON], ids=["v2", "flat", "seldon"])
@settings(max_examples=25, deadline=None)
@given(steps=_steps())
def test_merged_events_stay_below_48_kib_and_lose_nothing(steps: list[TokenEvent], spelling: Spelling) -> None:
    merged: list[TokenEvent] = []
    for step in steps:
        add_event(merged, step)
    reply = spelling.stream(_request(steps), ReplyContext(_NAME, "1" * 20, created=10**9, request_index=0))
    bodies = [body for event in merged for body in reply.event(event)]
    assert max(len(b"data: %b\n\n" % orjson.dumps(body)) for body in bodies) <= _BOUND - _HEADERS
    finals = [body.get("parameters", body)["triton_final_response"] for body in bodies]
    assert finals == [*[False] * (len(bodies) - 1), True]
    assert "".join(event.text for event in merged) == "".join(step.text for step in steps)
    assert "".join(event.reasoning for event in merged) == "".join(step.reasoning for step in steps)
    calls = [join_calls(call for event in events for call in event.tool_calls) for events in (steps, merged)]
    assert calls[0] == calls[1]
    if steps[0].logprobs:
        for event in merged:
            assert [entry.token_id for entry in event.logprobs] == list(event.token_ids)


def test_events_of_plain_text_are_merged_to_hundreds_of_tokens() -> None:
    merged: list[TokenEvent] = []
    for number in range(1000):
        add_event(merged, TokenEvent(0, " you", (number,)))
    assert len(merged) <= 4


def test_a_long_error_is_shortened_in_a_stream() -> None:
    (body,) = V2.stream(asked(), ReplyContext("m")).fail(RuntimeError("0123456789" * 1000))
    assert body["error"] == body["parameters"]["error"]
    assert body["error"].startswith("0123456789") and body["error"].endswith("…") and len(body["error"]) == 512


def test_an_id_that_is_too_long_to_repeat_is_refused(info: ModelInfo) -> None:
    payload = over_rest(text("Hello"))
    for length, accepted in ((256, True), (257, False)):
        payload.id = "x" * length
        if accepted:
            decode_request(payload, info, streaming=True, request_id=payload.id)
        else:
            with pytest.raises(InvalidInput, match="256") as caught:
                decode_request(payload, info, streaming=True, request_id=payload.id)
            assert caught.value.field == "id"
