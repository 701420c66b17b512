"""gRPC with a real server: unary, the three kinds of streams, statuses, raw contents."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub as Stub

from tests import plain_http
from tests.server import v2
from tests.server.harness import Server

_PROMPT = "Hello fox 🙂"
_ENOUGH = 15  # tokens of a server whose steps take so long that the reader gets more than two responses


@pytest.fixture(scope="module")
def paced(triton: Server) -> Iterator[Stub]:
    """The stub of a server whose decode steps are slowed down."""
    with grpc.insecure_channel(triton.grpc_target) as channel:
        yield Stub(channel)


def _stream(stub: Stub, *requests: pb.ModelInferRequest) -> list[v2.Reply]:
    return [v2.grpc_reply(each) for each in stub.ModelStreamInfer(iter(requests), timeout=v2.TIMEOUT_S)]


def _unary(stub: Stub, request: pb.ModelInferRequest) -> v2.Reply:
    return v2.grpc_reply(stub.ModelInfer(request, timeout=v2.TIMEOUT_S))


def _of(replies: list[v2.Reply], index: int) -> list[v2.Reply]:
    return [reply for reply in replies if reply.parameters["request_index"] == index]


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(("model", "version"), [("tiny", ""), ("tiny", "v1"), ("other", "")])
def test_one_message_many_responses_join_to_the_unary_text(
    stub: Stub, paced: Stub, model: str, version: str, raw: bool
) -> None:
    request = v2.grpc_request(model, _PROMPT, version=version, raw=raw, max_tokens=_ENOUGH)
    replies, unary = _stream(paced, request), _unary(stub, request)
    assert len(replies) > 2
    assert v2.joined(replies) == unary.text
    assert replies[-1].outputs["num_output_tokens"] == unary.outputs["num_output_tokens"] == [_ENOUGH]
    assert [reply.final for reply in replies] == [False] * (len(replies) - 1) + [True]


def test_grpc_and_rest_give_the_same_text(server: Server, stub: Stub) -> None:
    rest = v2.rest_unary(server.url, "/v2/models/tiny/infer", v2.rest_body(_PROMPT, max_tokens=40))
    assert _unary(stub, v2.grpc_request("tiny", _PROMPT, max_tokens=40)).text == rest.text


def test_many_messages_are_generations_of_their_own(stub: Stub) -> None:
    prompts = ["Hello", "The quick brown", _PROMPT, "5 €", "日本"]
    requests = [v2.grpc_request("tiny", prompt, id="same", max_tokens=20 + i) for i, prompt in enumerate(prompts)]
    replies = _stream(stub, *requests)
    for index, request in enumerate(requests):
        own = _of(replies, index)
        assert v2.joined(own) == _unary(stub, request).text
        assert [reply.final for reply in own] == [False] * (len(own) - 1) + [True]
    assert len({reply.parameters["request_id"] for reply in replies}) == len(prompts)


def test_many_messages_run_at_the_same_time(paced: Stub) -> None:
    requests = [v2.grpc_request("tiny", _PROMPT, max_tokens=_ENOUGH, ignore_eos=True) for _ in range(4)]
    replies = _stream(paced, *requests)
    order = [reply.parameters["request_index"] for reply in replies]
    first_end = next(i for i, reply in enumerate(replies) if reply.final)
    assert set(order[:first_end]) == {0, 1, 2, 3}


def test_more_messages_than_rows_are_all_answered(stub: Stub) -> None:
    replies = _stream(stub, *(v2.grpc_request("tiny", _PROMPT, max_tokens=3) for _ in range(50)))
    assert sorted(reply.parameters["request_index"] for reply in replies if reply.final) == list(range(50))


def test_a_bad_message_ends_alone(stub: Stub) -> None:
    good = v2.grpc_request("tiny", _PROMPT, max_tokens=30)
    replies = _stream(stub, good, v2.grpc_request("tiny", _PROMPT, max_tokens=0), good)
    (refused,) = _of(replies, 1)
    assert refused.final and refused.finish_reason == "error"
    assert "max_tokens" in refused.parameters["error"]
    assert v2.joined(_of(replies, 0)) == v2.joined(_of(replies, 2)) == _unary(stub, good).text


def test_a_message_that_cannot_be_converted_ends_alone(stub: Stub) -> None:
    good = v2.grpc_request("tiny", _PROMPT, max_tokens=30)
    cut = v2.grpc_request("tiny", _PROMPT, raw=True)
    cut.raw_input_contents[0] = b"\xff\0\0\0x"
    replies = _stream(stub, good, cut, good)
    (refused,) = _of(replies, 1)
    assert refused.final and refused.finish_reason == "error"
    assert v2.joined(_of(replies, 0)) == v2.joined(_of(replies, 2)) == _unary(stub, good).text


@pytest.mark.parametrize("request_id", ["line\nbreak \x00", "日本語 🙂", "x" * 256, "🙂" * 256])
def test_any_id_comes_back_as_it_was(server: Server, stub: Stub, request_id: str) -> None:
    request = v2.grpc_request("tiny", _PROMPT, id=request_id, max_tokens=2)
    assert _unary(stub, request).id == _stream(stub, request)[-1].id == request_id
    body = {**v2.rest_body(_PROMPT, max_tokens=2), "id": request_id}
    unary = v2.rest_unary(server.url, "/v2/models/tiny/infer", body)
    streamed = v2.rest_stream(server.url, "/v2/models/tiny/infer_stream", body)
    assert unary.id == streamed[-1].id == request_id


def test_an_id_that_would_make_every_line_long_is_refused_by_name(server: Server, stub: Stub) -> None:
    for call in (_unary, _stream):
        with pytest.raises(grpc.RpcError) as caught:
            call(stub, v2.grpc_request("tiny", _PROMPT, id="x" * 257, max_tokens=2))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "id: " in caught.value.details()
    for endpoint in ("infer", "infer_stream", "generate_stream"):
        body = (
            {"id": "x" * 257, "text_input": _PROMPT}
            if endpoint == "generate_stream"
            else {**v2.rest_body(_PROMPT), "id": "x" * 257}
        )
        refused = plain_http.post(f"{server.url}/v2/models/tiny/{endpoint}", json=body)
        assert refused.status_code == 422 and refused.json()["error"].startswith("id: ")


def test_an_id_that_metadata_cannot_carry_is_percent_encoded_in_it(server: Server, stub: Stub) -> None:
    _, call = stub.ModelInfer.with_call(v2.grpc_request("tiny", _PROMPT, id="é\n", max_tokens=2))
    assert dict(call.trailing_metadata())["ce-id"] == "%C3%A9%0A"
    body = {**v2.rest_body(_PROMPT, max_tokens=2), "id": "é\n"}
    assert plain_http.post(f"{server.url}/v2/models/tiny/infer", json=body).headers["ce-id"] == "%C3%A9%0A"


def _pieces(stream: bool | None = None) -> list[pb.ModelInferRequest]:
    how: dict[str, Any] = {} if stream is None else {"stream": stream}
    first = v2.grpc_request("tiny", "The quick ", **how, stream_mode="prompt", max_tokens=_ENOUGH)
    rest = [v2.grpc_request("tiny", piece) for piece in ("brown fox ", "jumps over ", "the la", "zy dog 🙂")]
    return [first, *rest]


def test_pieces_of_a_prompt_are_answered_as_the_whole(stub: Stub, paced: Stub) -> None:
    text = "The quick brown fox jumps over the lazy dog 🙂"
    whole = _unary(stub, v2.grpc_request("tiny", text, max_tokens=_ENOUGH))
    streamed = _stream(paced, *_pieces(stream=True))
    (at_once,) = _stream(stub, *_pieces(stream=False))
    assert v2.joined(streamed) == at_once.text == whole.text
    assert len(streamed) > 2 and [reply.final for reply in streamed].count(True) == 1
    assert at_once.final and at_once.outputs["num_input_tokens"] == whole.outputs["num_input_tokens"]


def test_a_prompt_in_pieces_that_grows_too_long_is_refused_before_its_last_piece(stub: Stub) -> None:
    refused = threading.Event()

    def pieces() -> Iterator[pb.ModelInferRequest]:
        yield v2.grpc_request("tiny", "The quick brown fox ", stream_mode="prompt", max_tokens=4)
        yield v2.grpc_request("tiny", "jumps over the lazy dog " * 20_000)
        refused.wait(v2.TIMEOUT_S)

    with pytest.raises(grpc.RpcError) as caught:
        next(stub.ModelStreamInfer(pieces(), timeout=v2.TIMEOUT_S))
    refused.set()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "text_input" in caught.value.details()


def test_a_bad_piece_is_invalid_argument(stub: Stub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        _stream(stub, _pieces()[0], v2.grpc_request("tiny", "x", max_tokens=3))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "max_tokens" in caught.value.details()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("text", "bad", "field"),
    [
        (_PROMPT, {"max_tokens": 0}, "max_tokens"),
        (_PROMPT, {"temperature": "warm"}, "temperature"),
        (_PROMPT, {"temprature": 1}, "temprature"),
        ("fox " * 2000, {}, "text_input"),
    ],
)
def test_bad_input_is_invalid_argument_and_names_the_field(
    stub: Stub, streaming: bool, text: str, bad: dict[str, Any], field: str
) -> None:
    request = v2.grpc_request("tiny", text, **bad)
    with pytest.raises(grpc.RpcError) as caught:
        _stream(stub, request) if streaming else _unary(stub, request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in caught.value.details()


def test_numbers_come_as_strings_where_grpc_has_no_float(stub: Stub) -> None:
    request = v2.grpc_request("tiny", _PROMPT, temperature="0.7", top_p="0.9", seed=5, max_tokens=12)
    assert _unary(stub, request).text == v2.joined(_stream(stub, request))


def test_a_client_that_keeps_its_side_open_gets_its_answer(stub: Stub) -> None:
    def one_message() -> Iterator[pb.ModelInferRequest]:
        yield v2.grpc_request("tiny", _PROMPT, max_tokens=5)
        end = time.monotonic() + v2.TIMEOUT_S
        while not answered and time.monotonic() < end:
            time.sleep(0.01)

    answered: list[v2.Reply] = []
    for response in stub.ModelStreamInfer(one_message(), timeout=v2.TIMEOUT_S):
        reply = v2.grpc_reply(response)
        if reply.final:
            answered.append(reply)
    assert answered[0].outputs["num_output_tokens"] == [5]


def test_an_unknown_model_is_not_found(stub: Stub) -> None:
    for call in (_unary, _stream):
        with pytest.raises(grpc.RpcError) as caught:
            call(stub, v2.grpc_request("nobody", _PROMPT))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_metadata_is_rests(server: Server, stub: Stub) -> None:
    grpc_side = stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny"), timeout=v2.TIMEOUT_S)
    rest_side = plain_http.get(f"{server.url}/v2/models/tiny").json()
    for side in ("inputs", "outputs"):
        described = [(each.name, each.datatype, list(each.shape)) for each in getattr(grpc_side, side)]
        assert described == [(each["name"], each["datatype"], each["shape"]) for each in rest_side[side]]
    assert grpc_side.parameters["attention"].string_param == rest_side["parameters"]["attention"] != ""
