"""Merged events have reasoning, text and calls in the order in which the sequence produced them, and lose nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlserver_torch_stream.tool_calls import ToolCallDelta, join_calls
from mlserver_torch_stream.types import MAX_PER_EVENT, FinishReason, TokenEvent, Usage, add_event

_WORDS = st.text("ab{\x01", min_size=1, max_size=200)


@st.composite
def _said(draw: st.DrawFn) -> list[TokenEvent]:
    """The events of a sequence: pieces of reasoning, of text and of calls in any order, or nothing yet."""
    events, calls = [], -1
    for number in range(draw(st.integers(1, 40))):
        kind = draw(st.sampled_from(["nothing", "reasoning", "text", "begin", "arguments"]))
        event = TokenEvent(0, token_ids=(number,))
        if kind == "reasoning":
            event = TokenEvent(0, token_ids=(number,), reasoning=draw(_WORDS))
        elif kind == "text":
            event = TokenEvent(0, draw(_WORDS), (number,))
        elif kind == "begin":
            calls += 1
            event = TokenEvent(0, tool_calls=(ToolCallDelta(calls, f"call_{calls}", "look"),))
        elif kind == "arguments" and calls >= 0:
            event = TokenEvent(0, token_ids=(number,), tool_calls=(ToolCallDelta(calls, arguments=draw(_WORDS)),))
        events.append(event)
    return events


def _in_order(events: list[TokenEvent]) -> list[tuple[object, ...]]:
    """Returns what a reader gets: neighbouring pieces of the same kind are joined."""
    parts: list[tuple[object, ...]] = []
    for event in events:
        for kind, said in (("reasoning", event.reasoning), ("text", event.text)):
            if said and parts and parts[-1][0] == kind:
                parts[-1] = (kind, f"{parts[-1][1]}{said}")
            elif said:
                parts.append((kind, said))
        for call in event.tool_calls:
            if parts and parts[-1][0] == call.index:
                joined = join_calls([ToolCallDelta(*parts[-1]), call])  # type: ignore[arg-type]
                parts[-1] = (call.index, joined[0].id, joined[0].name, joined[0].arguments)
            else:
                parts.append((call.index, call.id, call.name, call.arguments))
    return parts


@given(_said())
def test_merging_keeps_the_order_and_the_bound(said: list[TokenEvent]) -> None:
    merged: list[TokenEvent] = []
    for event in said:
        add_event(merged, event)
    assert _in_order(merged) == _in_order(said)
    assert [token for event in merged for token in event.token_ids] == [t for event in said for t in event.token_ids]
    assert all(event.size <= MAX_PER_EVENT for event in merged)
    assert any(event.has_output for event in merged) == any(event.has_output for event in said)


def test_events_of_one_kind_behind_another_become_one() -> None:
    events: list[TokenEvent] = []
    call = ToolCallDelta(0, "call_1", "look")
    for event in (
        TokenEvent(0, reasoning="I think"),
        TokenEvent(0, reasoning=" so"),
        TokenEvent(0, "Yes"),
        TokenEvent(0, tool_calls=(call,)),
        TokenEvent(0, tool_calls=(ToolCallDelta(0, arguments="{"),)),
        TokenEvent(0, tool_calls=(ToolCallDelta(0, arguments="}"), ToolCallDelta(1, "call_2", "go"))),
    ):
        add_event(events, event)
    calls = (ToolCallDelta(0, "call_1", "look", "{}"), ToolCallDelta(1, "call_2", "go"))
    assert events == [TokenEvent(0, "Yes", reasoning="I think so", tool_calls=calls)]


def test_reasoning_and_calls_are_not_lost_to_the_failure_behind_them() -> None:
    for said in (
        TokenEvent(0, reasoning="I think"),
        TokenEvent(0, tool_calls=(ToolCallDelta(0, "call_1", "look"),)),
    ):
        failed = said.merge(TokenEvent(0, finish_reason=FinishReason.ERROR, usage=Usage(1, 1), error=ValueError("x")))
        first, end = failed.split_failure()
        assert first == said
        assert end.error is failed.error and not end.has_output
