"""What a terminal shows of an answer: the reasoning and the calls dimmed, the text plain."""

from __future__ import annotations

import io

from mlserver_torch_stream.cli.chat import AnswerView
from mlserver_torch_stream.client import Delta, ToolCallDelta

_DELTAS = [
    Delta(reasoning="Hm"),
    Delta(reasoning=".\x1b[31m"),
    Delta("Wait"),
    Delta("."),
    Delta(tool_calls=(ToolCallDelta(0, "a", "look"), ToolCallDelta(0, arguments='{"at": '))),
    Delta(tool_calls=(ToolCallDelta(0, arguments='"x"}'), ToolCallDelta(1, "b", "go", "{}"))),
]


def _shown(deltas: list[Delta], *, styled: bool) -> str:
    sink = io.StringIO()
    view = AnswerView(sink, styled=styled)
    for delta in deltas:
        view.add(delta)
    view.end()
    return sink.getvalue()


def test_reasoning_and_calls_are_dimmed_and_the_text_is_not() -> None:
    assert _shown(_DELTAS, styled=True) == (
        "\x1b[2mHm.[31m\x1b[0m\nWait.\n" + '\x1b[2mlook({"at": "x"})\x1b[0m\n\x1b[2mgo({})\x1b[0m'
    )


def test_an_answer_that_is_stopped_leaves_no_style() -> None:
    for count in range(len(_DELTAS)):
        shown = _shown(_DELTAS[: count + 1], styled=True)
        assert shown.count("\x1b[2m") == shown.count("\x1b[0m")


def test_where_there_is_no_terminal_the_text_is_alone() -> None:
    assert _shown(_DELTAS, styled=False) == "Wait."
