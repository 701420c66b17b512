"""The fault switch causes the fault it names, at the call it names, and does nothing unless it is set."""

from __future__ import annotations

import pytest

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.fault_injection import VARIABLE, read_faults
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.types import FinishReason, TokenEvent
from tests.engine.tiny import collect, greedy, reference, run, running, tiny_model

PROMPT = (3, 4, 5)


def answer_under(faults: str) -> tuple[TokenEvent, list[int]]:
    model = tiny_model()
    with running(model, prefill_tokens=16, faults=read_faults({VARIABLE: faults})) as engine:
        return run(collect(engine, [EngineRequest(PROMPT, greedy(10))]))[0], reference(model, PROMPT, 10)


@pytest.mark.parametrize(
    ("faults", "tokens"),
    [("prefill:1:raise", 0), ("prefill:1:oom", 0), ("decode:5:raise", 5), ("decode:3:oom", 3), ("decode:9:nan", 9)],
)
def test_a_fault_happens_at_the_call_it_names(faults: str, tokens: int) -> None:
    event, expected = answer_under(faults)
    assert event.finish_reason is FinishReason.ERROR and event.error is not None
    assert list(event.token_ids) == expected[:tokens]


def test_the_sequence_that_fails_in_each_half_ends_alone() -> None:
    """The step of all eight sequences raises, and so do the retries of its first four, first two, and first one."""
    model = tiny_model()
    requests = [EngineRequest((*PROMPT, 7 + index), greedy(10), index) for index in range(8)]
    faults = read_faults({VARIABLE: ",".join(f"decode:{call}:raise" for call in range(5, 9))})
    with running(model, prefill_tokens=100, faults=faults) as engine:
        events = run(collect(engine, requests))
    failed = [index for index, event in events.items() if event.finish_reason is FinishReason.ERROR]
    assert failed == [0]
    for index in range(1, 8):
        assert list(events[index].token_ids) == reference(model, requests[index].prompt_ids, 10)


def test_a_death_ends_the_stream_with_an_error() -> None:
    event, _ = answer_under("decode:4:death")
    assert event.finish_reason is FinishReason.ERROR and "died" in str(event.error)


def test_slowness_changes_no_token() -> None:
    event, expected = answer_under("decode:1:slow=0.001")
    assert list(event.token_ids) == expected and event.error is None


def test_there_are_no_faults_unless_asked_for() -> None:
    assert read_faults({}) == ()


@pytest.mark.parametrize(
    "text", ["decode:raise", "sample:1:raise", "decode:1:explode", "decode:x:raise", "decode:1:slow"]
)
def test_what_is_no_fault_is_named(text: str) -> None:
    with pytest.raises(LoadFailed, match=VARIABLE):
        read_faults({VARIABLE: text})
