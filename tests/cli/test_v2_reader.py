"""One reader understands unary replies, events of a stream and errors."""

from __future__ import annotations

from typing import Any

import pytest

from mlserver_torch_stream.tool_calls import ToolCallDelta
from mlserver_torch_stream.types import TokenLogprob
from mlserver_torch_stream.v2_reader import SequenceReply, read_reply


def _outputs(**columns: list[Any]) -> list[dict[str, Any]]:
    return [{"name": name, "datatype": "", "shape": [len(data)], "data": data} for name, data in columns.items()]


def test_a_unary_reply_has_all_sequences_with_what_each_got() -> None:
    outputs = _outputs(text_output=["a", "b"], finish_reason=["stop", "length"], num_output_tokens=[3, 4], extra=[1])
    reply = read_reply({"outputs": outputs})
    assert reply.sequences == (
        SequenceReply(0, "a", "stop", num_output_tokens=3),
        SequenceReply(1, "b", "length", num_output_tokens=4),
    )
    assert not reply.final and reply.error is None


def test_an_event_says_its_sequence_also_without_text() -> None:
    parameters = {"index": 2, "triton_final_response": True}
    reply = read_reply({"outputs": _outputs(token_ids=[7]), "parameters": parameters})
    assert reply.sequences == (SequenceReply(2, token_ids=(7,)),) and reply.final


def test_the_ids_and_log_probabilities_of_several_sequences_are_told_apart() -> None:
    entries = ['[{"token_id": 5, "logprob": -0.5, "top": [[5, -0.5], [6, -1.5]]}]', "[]"]
    ids = {"name": "token_ids", "datatype": "INT64", "shape": [2, 3], "data": [5, 6, 7, 8, -1, -1]}
    first, second = read_reply({"outputs": [*_outputs(logprobs=entries), ids]}).sequences
    assert (first.token_ids, second.token_ids) == ((5, 6, 7), (8,))
    assert (first.logprobs, second.logprobs) == ((TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.5))),), ())


def test_the_counts_of_the_whole_request_are_read() -> None:
    parameters = {"usage_prompt_tokens": 5, "usage_completion_tokens": 2, "triton_final_response": True}
    reply = read_reply({"outputs": _outputs(text_output=["a"]), "parameters": parameters})
    assert (reply.prompt_tokens, reply.completion_tokens) == (5, 2)


@pytest.mark.parametrize("body", [{"error": "broken"}, {"parameters": {"error": "broken"}, "outputs": []}])
def test_an_error_is_found_beside_the_outputs_and_in_the_parameters(body: dict[str, Any]) -> None:
    assert read_reply(body).error == "broken"


@pytest.mark.parametrize("body", [[], "text", {"outputs": [{"data": []}]}, {"outputs": 3}])
def test_what_is_no_reply_raises(body: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        read_reply(body)


def test_reasoning_and_calls_are_read_whole_and_in_parts() -> None:
    whole = '[{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}, {"id": "d", "function": '
    whole += '{"name": "g", "arguments": "1"}}]'
    outputs = _outputs(text_output=["", "x"], reasoning=["Hm.", ""], tool_calls=[whole, "[]"])
    first, second = read_reply({"outputs": outputs}).sequences
    assert first.reasoning == "Hm." and second.tool_calls == ()
    assert first.tool_calls == (ToolCallDelta(0, "c", "f", "{}"), ToolCallDelta(1, "d", "g", "1"))
    part = '[{"index": 1, "function": {"arguments": "23"}}]'
    (only,) = read_reply({"outputs": _outputs(tool_calls=[part])}).sequences
    assert only.tool_calls == (ToolCallDelta(1, None, None, "23"),)
