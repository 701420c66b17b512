"""The events that an engine's reader receives for an answer with reasoning and tool calls."""

from __future__ import annotations

import asyncio
import json
import math
from functools import partial
from itertools import pairwise

import pytest
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.text.answer_format import (
    AnswerFormat,
    Part,
    Reasoning,
    ReasoningParser,
    joined,
    short,
)
from mlserver_torch_stream.engine.text.tool_parsers import HermesCalls
from mlserver_torch_stream.tool_calls import ToolCallDelta, join_calls
from mlserver_torch_stream.types import MAX_PER_EVENT, FinishReason, SamplingParameters, TokenEvent, add_event
from tests.engine.tiny import dictated, greedy, in_step_with, prompt_of, run, running, spelled, watched

_ARGUMENTS = json.dumps({"at": "home"})
_CALL = '<tool_call>\n{"name": "look", "arguments": ARGS}\n</tool_call>'
_THOUGHT = "Hm. " * 110
_SAID = f"<think>\n{_THOUGHT}\n</think>\n\nI look."


def _format(*, parallel: bool = True) -> AnswerFormat:
    return AnswerFormat(partial(ReasoningParser, begun=False), partial(HermesCalls, {"look"}, parallel=parallel))


def _events(
    model: PreTrainedModel,
    said: str,
    answer: AnswerFormat | None,
    params: SamplingParameters | None = None,
    stream_interval: int = 1,
) -> list[TokenEvent]:
    ids = spelled(said)
    asked = EngineRequest(prompt_of(5), params or greedy(len(ids)), answer=answer)

    with (
        running(model, context=8192, event_interval=(stream_interval, math.inf)) as engine,
        dictated(model, ids, prompt=5),
        watched(model) as watch,
    ):

        async def scenario() -> list[TokenEvent]:
            watch.fail = in_step_with(asyncio.get_running_loop())
            return [event async for event in engine.submit([asked])]

        return run(scenario())


def _whole(events: list[TokenEvent]) -> TokenEvent:
    whole = events[0]
    for event in events[1:]:
        whole = whole.merge(event)
    return whole


@pytest.fixture(scope="module")
def events(model: PreTrainedModel) -> list[TokenEvent]:
    said = f"{_SAID}\n{_CALL}\n{_CALL}".replace("ARGS", _ARGUMENTS)
    return _events(model, said, _format(), greedy(len(spelled(said)), logprobs=True))


@pytest.mark.long
def test_the_events_have_reasoning_text_and_calls_in_their_order(events: list[TokenEvent]) -> None:
    whole = _whole(events)
    assert whole.reasoning == _THOUGHT.strip()
    assert whole.text == "I look."
    assert [(call.index, call.name, call.arguments) for call in whole.tool_calls] == [
        (0, "look", _ARGUMENTS),
        (1, "look", _ARGUMENTS),
    ]
    assert len({call.id for call in whole.tool_calls}) == 2
    assert all(earlier.goes_before(later) for earlier, later in pairwise(events))
    assert len(events) > 100  # a piece a step, not all at the end


def test_no_token_and_no_log_probability_is_lost(events: list[TokenEvent]) -> None:
    whole = _whole(events)
    assert whole.usage is not None
    assert len(whole.token_ids) == len(whole.logprobs) == whole.usage.num_output_tokens
    reasoning = len(spelled(f"<think>\n{_THOUGHT}\n</think>"))
    assert abs(whole.usage.num_reasoning_tokens - reasoning) <= len(spelled("<think>"))


def test_fewer_events_keep_the_order_of_reasoning_text_and_calls(model: PreTrainedModel) -> None:
    said = f"<think>\nHm.\n</think>\n\nI look.\n{_CALL}".replace("ARGS", _ARGUMENTS)
    events = _events(model, said, _format(), stream_interval=20)
    assert len(events) < 20 and all(earlier.goes_before(later) for earlier, later in pairwise(events))
    whole = _whole(events)
    assert (whole.reasoning, whole.text, whole.tool_calls[0].arguments) == ("Hm.", "I look.", _ARGUMENTS)
    assert list(whole.token_ids) == spelled(said)


def test_a_late_reader_gets_events_within_the_bound(events: list[TokenEvent]) -> None:
    merged: list[TokenEvent] = []
    for event in events:
        add_event(merged, event)
    assert len(merged) < len(events)
    assert max(event.size for event in merged) <= MAX_PER_EVENT
    assert _whole(merged) == _whole(events)


@pytest.mark.long
def test_an_answer_that_ends_with_whole_calls_says_so(model: PreTrainedModel) -> None:
    call = _CALL.replace("ARGS", "{}")
    stop = SamplingParameters(max_tokens=200, ignore_eos=True, stop=("STOP",))
    for said, reason in (
        (f"Well.\n{call}STOP", FinishReason.TOOL_CALLS),
        ("Well.STOP", FinishReason.STOP),
        ('Well.\n<tool_call>{"name": "look", "arguments": {STOP', FinishReason.STOP),
    ):
        whole = _whole(_events(model, said, _format(), stop))
        assert whole.finish_reason is reason, said
        assert whole.text == "Well."
    cut = _whole(_events(model, call[:-15], _format()))
    assert cut.finish_reason is FinishReason.LENGTH


def test_without_parallel_calls_the_sequence_ends_with_its_first(model: PreTrainedModel) -> None:
    call = _CALL.replace("ARGS", "{}")
    whole = _whole(_events(model, f"{call}\n{call} and more", _format(parallel=False)))
    assert whole.finish_reason is FinishReason.TOOL_CALLS
    assert [call.index for call in whole.tool_calls] == [0] and whole.text == ""
    assert whole.usage is not None and whole.usage.num_output_tokens < len(spelled(call))


def test_a_call_that_breaks_is_not_lost(model: PreTrainedModel) -> None:
    broken = '<tool_call>{"name": "look", "arguments": [1]}</tool_call>'
    whole = _whole(_events(model, broken, _format()))
    assert (whole.text, whole.tool_calls) == (broken, ())


def test_without_a_format_the_answer_is_its_text(model: PreTrainedModel) -> None:
    said = f"<think>x</think>{_CALL}"
    whole = _whole(_events(model, said, None))
    assert (whole.text, whole.reasoning, whole.tool_calls) == (said, "", ())


@pytest.mark.parametrize("whole", ["x" * 2000, Reasoning("x" * 2000), ToolCallDelta(0, "c", "look", "x" * 2000)])
def test_a_long_piece_is_more_than_one_event(whole: Part) -> None:
    """When a call's arguments come before its name, all pieces of them are sent as soon as the name is known."""
    most = MAX_PER_EVENT // 2
    pieces = list(short(whole, most))
    if isinstance(whole, ToolCallDelta):
        calls = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
        assert join_calls(calls) == (whole,) and all(call.size <= most + 100 for call in calls)
    else:
        assert joined(pieces) == [whole]
    assert len(pieces) > 2
