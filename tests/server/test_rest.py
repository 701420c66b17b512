"""REST with a real server: every path, the parts of a stream, and the replies to bad input."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlserver_torch_stream import client
from tests import plain_http
from tests.server import raw, v2
from tests.server.harness import Server

_PROMPT = "Hello fox 🙂"
_ENOUGH = 15  # tokens of a server whose steps take so long that the reader gets more than two responses
_TINY = ("/v2/models/tiny", "/v2/models/tiny/versions/v1", "/v2/models/other")


@pytest.mark.parametrize("model", _TINY)
@pytest.mark.parametrize("endpoint", ["infer", "generate"])
def test_unary_paths_answer_at_once(server: Server, model: str, endpoint: str) -> None:
    reply = v2.rest_unary(server.url, f"{model}/{endpoint}", v2.rest_body(_PROMPT, max_tokens=24))
    assert reply.text
    assert reply.finish_reason == "length"
    assert reply.outputs["num_output_tokens"] == [24]
    assert reply.final


@pytest.mark.parametrize("model", _TINY)
@pytest.mark.parametrize("endpoint", ["infer_stream", "generate_stream"])
def test_stream_paths_answer_in_deltas_that_join_to_the_unary_text(
    server: Server, triton: Server, model: str, endpoint: str
) -> None:
    body = v2.rest_body(_PROMPT, max_tokens=_ENOUGH)
    replies = v2.rest_stream(triton.url, f"{model}/{endpoint}", body)
    unary = v2.rest_unary(server.url, f"{model}/infer", body)
    assert len(replies) > 2
    assert v2.joined(replies) == unary.text
    assert replies[-1].outputs["num_output_tokens"] == unary.outputs["num_output_tokens"] == [_ENOUGH]


def test_a_stream_ends_with_exactly_one_final_response(server: Server) -> None:
    replies = v2.rest_stream(server.url, "/v2/models/tiny/infer_stream", v2.rest_body(_PROMPT, max_tokens=12))
    assert [reply.final for reply in replies] == [False] * (len(replies) - 1) + [True]
    assert [reply.finish_reason for reply in replies if reply.finish_reason] == ["length"]
    assert [reply.parameters["chunk_index"] for reply in replies] == list(range(len(replies)))
    assert replies[-1].parameters["usage_completion_tokens"] == 12


def test_several_sequences_share_one_final_response(server: Server) -> None:
    body = v2.rest_body(
        inputs=[v2.bytes_tensor("text_input", "Hello", "fox")], max_tokens=8, n=2, temperature=1, seed=3
    )
    replies = v2.rest_stream(server.url, "/v2/models/tiny/infer_stream", body)
    unary = v2.rest_unary(server.url, "/v2/models/tiny/infer", body)
    texts = [v2.joined(reply for reply in replies if reply.parameters["index"] == index) for index in range(4)]
    assert texts == unary.outputs["text_output"]
    assert [reply.final for reply in replies].count(True) == 1 and replies[-1].final
    assert [reply.finish_reason for reply in replies if reply.finish_reason] == ["length"] * 4


def test_stream_false_on_a_stream_path_is_one_response(server: Server) -> None:
    body = v2.rest_body(_PROMPT, max_tokens=12, stream=False)
    replies = v2.rest_stream(server.url, "/v2/models/tiny/infer_stream", body)
    assert len(replies) == 1 and replies[0].final
    assert (
        replies[0].text == v2.rest_unary(server.url, "/v2/models/tiny/infer", v2.rest_body(_PROMPT, max_tokens=12)).text
    )


def test_the_clients_own_id_comes_back(server: Server) -> None:
    body = {**v2.rest_body(_PROMPT, max_tokens=2), "id": "mine"}
    for reply in v2.rest_stream(server.url, "/v2/models/tiny/infer_stream", body):
        assert (reply.id, reply.parameters["request_id"]) == ("mine", "mine")


def test_chat_messages_go_through_the_template(server: Server) -> None:
    messages = [{"role": "user", "content": "Grüße 日本"}]
    chat = v2.bytes_tensor("messages", json.dumps(messages))
    rendered = v2.rest_body("<|user|>Grüße 日本\n<|assistant|>", max_tokens=12)
    as_chat = v2.rest_unary(server.url, "/v2/models/tiny/infer", v2.rest_body(inputs=[chat], max_tokens=12))
    assert as_chat.text == v2.rest_unary(server.url, "/v2/models/tiny/infer", rendered).text


def test_our_client_streams_the_same_text(server: Server) -> None:
    deltas = list(client.stream(server.url, "tiny", _PROMPT, max_tokens=24))
    unary = v2.rest_unary(server.url, "/v2/models/tiny/infer", v2.rest_body(_PROMPT, max_tokens=24))
    assert "".join(map(str, deltas)) == unary.text
    assert (deltas[-1].final, deltas[-1].finish_reason, deltas[-1].num_output_tokens) == (True, "length", 24)


_BAD: list[tuple[dict[str, Any], str]] = [
    (v2.rest_body(_PROMPT, max_tokens=0), "max_tokens"),
    (v2.rest_body(_PROMPT, max_tokens="many"), "max_tokens"),
    (v2.rest_body(_PROMPT, temperature=-1), "temperature"),
    (v2.rest_body(_PROMPT, temprature=1), "temprature"),
    (v2.rest_body(""), "text_input"),
    (v2.rest_body("fox " * 2000), "text_input"),
    (v2.rest_body(_PROMPT, inputs=[v2.bytes_tensor("messages", "[]")]), "text_input"),
    (v2.rest_body(inputs=[{"name": "input_ids", "datatype": "INT64", "shape": [1], "data": [400]}]), "input_ids"),
    (v2.rest_body(_PROMPT, stream=True), "stream"),
]


@pytest.mark.parametrize(("body", "field"), _BAD, ids=[f"{field}-{i}" for i, (_, field) in enumerate(_BAD)])
def test_bad_input_is_422_and_names_the_field(server: Server, body: dict[str, Any], field: str) -> None:
    response = plain_http.post(f"{server.url}/v2/models/tiny/infer", json=body, timeout=v2.TIMEOUT_S)
    assert response.status_code == 422
    assert field in response.json()["error"]


def test_bad_input_disturbs_no_other_stream(server: Server) -> None:
    alone = v2.rest_unary(server.url, "/v2/models/tiny/infer", v2.rest_body(_PROMPT, max_tokens=300, ignore_eos=True))
    running = client.stream(server.url, "tiny", _PROMPT, max_tokens=300, ignore_eos=True)
    texts = [next(running).text]
    for body, _ in _BAD:
        assert plain_http.post(f"{server.url}/v2/models/tiny/infer", json=body, timeout=v2.TIMEOUT_S).status_code == 422
    texts += [delta.text for delta in running]
    assert "".join(texts) == alone.text


def test_metadata_tells_the_inputs_and_outputs_that_are_served(server: Server) -> None:
    metadata = plain_http.get(f"{server.url}/v2/models/tiny").json()
    inputs = {tensor["name"]: tensor["datatype"] for tensor in metadata["inputs"]}
    outputs = {tensor["name"]: tensor["datatype"] for tensor in metadata["outputs"]}
    assert inputs["text_input"] == inputs["messages"] == "BYTES" and inputs["input_ids"] == "INT64"
    reply = plain_http.post(f"{server.url}/v2/models/tiny/infer", json=v2.rest_body(_PROMPT, max_tokens=2)).json()
    assert {tensor["name"]: tensor["datatype"] for tensor in reply["outputs"]}.items() <= outputs.items()


_MUCH = {"max_tokens": 500, "ignore_eos": True, "top_logprobs": 20, "return_logprobs": True, "return_token_ids": True}
_SELDON = [v2.bytes_tensor(name, value) for name, value in (("role", "user"), ("content", "Hi"), ("type", "text"))]
_SPELLINGS = {
    "v2": ("infer_stream", v2.rest_body("Hello", **_MUCH)),
    "flat": ("generate_stream", {"text_input": "Hello", **_MUCH}),
    "seldon": ("infer_stream", v2.rest_body(inputs=_SELDON, **_MUCH)),
}


@pytest.mark.long
@pytest.mark.parametrize("spelling", _SPELLINGS)
def test_a_slow_reader_gets_no_line_longer_than_48_kib(server: Server, spelling: str) -> None:
    """Proxies read lines of 64 KiB at most; with all options, a token takes two kilobytes or more."""
    endpoint, body = _SPELLINGS[spelling]
    events = raw.read_late(server, f"/v2/models/tiny/{endpoint}", body, 500)
    assert sum(map(len, events)) > 200_000 > 48 * 1024 >= max(len(f"data: {event}".encode()) for event in events)
    replies = list(map(json.loads, events))
    finals = [(reply if spelling == "flat" else reply["parameters"])["triton_final_response"] for reply in replies]
    assert finals == [*[False] * (len(finals) - 1), True]
    if spelling == "flat":
        tokens = [reply["token_ids"] for reply in replies]
        entries = [[entry["token_id"] for entry in reply["logprobs"]] for reply in replies]
    else:
        outputs = [{output["name"]: output["data"] for output in reply["outputs"]} for reply in replies]
        tokens = [each["token_ids"] for each in outputs]
        entries = [[entry["token_id"] for entry in json.loads(each["logprobs"][0])] for each in outputs]
    assert sum(map(len, tokens)) == 500 and entries == tokens
