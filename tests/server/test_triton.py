"""Triton's framing of streams: several requests at the same time, each with its own id, error and end."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import grpc
import pytest
from mlserver.grpc import dataplane_pb2 as pb

from tests.server import triton_wire, v2
from tests.server.conftest import TRITON_MESSAGE_BYTES
from tests.server.harness import Server
from tests.server.triton_wire import Streamed, by_id, infer, replies, streamed
from tests.waiting import wait_until

_LONG = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def channel(triton: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(triton.triton_target) as opened:
        yield opened


def _request(id: str, text: str = "Hello fox", model: str = "tiny", **parameters: object) -> pb.ModelInferRequest:
    return v2.grpc_request(model, text, id=id, raw=True, **{"max_tokens": 6, "ignore_eos": True, **parameters})


def _text(found: list[Streamed]) -> str:
    return v2.joined(each.reply for each in found)


# --- unary ---


@pytest.mark.parametrize("raw", [True, False])
def test_a_unary_reply_is_raw_whatever_the_request_is(channel: grpc.Channel, raw: bool) -> None:
    request = v2.grpc_request("tiny", "Hello fox", id="mine", raw=raw, max_tokens=6, ignore_eos=True)
    response = pb.ModelInferResponse.FromString(triton_wire.unary(channel, "ModelInfer", request))
    assert len(response.raw_output_contents) == len(response.outputs) > 1
    reply = v2.grpc_reply(response)
    assert (reply.id, reply.finish_reason) == ("mine", "length")
    assert reply.text == _text(replies(channel, request))


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_compressed_request_is_read(channel: grpc.Channel, compression: grpc.Compression) -> None:
    request = _request("", "Hello " * 100)
    assert infer(channel, request, compression=compression).text == infer(channel, request).text


# --- streams ---


@pytest.mark.long
def test_requests_on_one_stream_run_at_the_same_time_and_keep_their_ids(channel: grpc.Channel) -> None:
    requests = [_request(name, f"Hello {name}", max_tokens=20) for name in ("a", "b", "c")]
    found = replies(channel, *requests)
    order = [each.reply.id for each in found]
    assert order.index("c") < len(order) - 1 - order[::-1].index("a"), "the last begins before the first ends"
    for request in requests:
        own = by_id(found)[request.id]
        assert [each.final for each in own] == [False] * (len(own) - 1) + [True]
        assert not any(each.error for each in own)
        assert _text(own) == infer(channel, request).text


def test_a_request_without_an_id_gets_none(channel: grpc.Channel) -> None:
    found = replies(channel, _request(""))
    assert {each.reply.id for each in found} == {""}
    assert found[0].reply.parameters["request_id"]


def test_one_stream_serves_several_models(channel: grpc.Channel) -> None:
    found = by_id(replies(channel, _request("a"), _request("b", model="other")))
    assert found["a"][-1].final and found["b"][-1].final
    assert _text(found["a"]) == _text(found["b"])


def _refusals() -> dict[str, tuple[pb.ModelInferRequest, str]]:
    texts = _request("bad")
    texts.inputs[0].datatype = "FP32"
    shared = v2.grpc_request("tiny", id="bad")
    tensor = shared.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.parameters["shared_memory_region"].string_param = "mine"
    version = _request("bad")
    version.model_version = "v9"
    many = _request("bad")
    many.inputs.extend([pb.ModelInferRequest.InferInputTensor()] * 2000)
    return {
        "a parameter": (_request("bad", max_tokens=0), "max_tokens: "),
        "a type": (
            _request("bad", triton_enable_empty_final_response="perhaps"),
            "triton_enable_empty_final_response: ",
        ),
        "an unknown parameter": (_request("bad", max_tokns=3), "max_tokns: unknown parameter"),
        "a sequence": (_request("bad", sequence_id=3), "sequence_id: is not implemented"),
        "a datatype": (texts, "raw_input_contents: "),
        "shared memory": (shared, "shared_memory_region: is not implemented"),
        "many tensors": (many, "inputs: must have at most 1024 tensors"),
        "pieces": (_request("bad", stream_mode="prompt"), "stream_mode: prompt is allowed only in the first message"),
        "an unknown model": (_request("bad", model="nobody"), "Model nobody not found"),
        "an unknown version": (version, "v9 not found"),
        "another runtime": (_request("bad", model="foreign"), "model_name: foreign belongs to another runtime"),
    }


@pytest.mark.parametrize("what", _refusals())
def test_an_error_in_the_middle_is_its_requests_own(channel: grpc.Channel, what: str) -> None:
    bad, said = _refusals()[what]
    found = by_id(replies(channel, _request("a"), bad, _request("b")))
    (refused,) = found["bad"]
    assert refused.error.startswith("[request id: bad] ") and said in refused.error
    assert refused.final and not refused.reply.outputs
    for name in ("a", "b"):
        assert found[name][-1].reply.finish_reason == "length" and not any(each.error for each in found[name])


def test_an_only_request_that_is_wrong_does_not_fail_the_stream(channel: grpc.Channel) -> None:
    (refused,) = replies(channel, _request("bad", temperature="warm"))
    assert "temperature: " in refused.error


@pytest.mark.parametrize("garbage", [b"\xff\xff", b"\x0a\x02\xff\xfe"])
def test_bytes_that_are_no_message_fail_alone(channel: grpc.Channel, garbage: bytes) -> None:
    found = replies(channel, _request("a"), garbage, _request("b"))
    ends = {each.reply.parameters["request_index"]: each for each in found if each.final}
    assert ends[1].error.startswith("[request id: <id_unknown>] inputs: ")
    assert (ends[0].reply.finish_reason, ends[2].reply.finish_reason) == ("length", "length")


def test_a_request_whose_time_is_over_keeps_its_text(channel: grpc.Channel) -> None:
    """If the response were an error, Triton's clients would not show the text."""
    found = replies(channel, _request("a", **{**_LONG, "timeout": 1_000_000}))
    assert not any(each.error for each in found)
    assert found[-1].final and found[-1].reply.finish_reason == "timeout" and _text(found)


def test_the_first_error_ends_a_stream_whose_client_wants_a_status(triton: Server, channel: grpc.Channel) -> None:
    metadata = (("triton_grpc_error", "true"),)
    call = triton_wire.stream(channel, [_request("a", **_LONG), _request("bad", max_tokens=0)], metadata=metadata)
    with pytest.raises(grpc.RpcError):
        list(call)
    assert call.code() is grpc.StatusCode.INVALID_ARGUMENT and "[request id: bad] max_tokens: " in call.details()
    triton.wait_for("tiny", lambda now: now["running_sequences"] == 0)
    unknown = triton_wire.stream(channel, [_request("a", model="nobody")], metadata=metadata)
    with pytest.raises(grpc.RpcError):
        list(unknown)
    assert unknown.code() is grpc.StatusCode.NOT_FOUND
    assert list(map(streamed, triton_wire.stream(channel, [_request("a")], metadata=metadata)))[-1].final


def test_a_full_queue_refuses_one_request_of_a_stream(channel: grpc.Channel) -> None:
    found = by_id(replies(channel, *(_request(name, model="narrow") for name in "abcd")))
    errors = {name: own[-1].error for name, own in found.items()}
    assert any("are waiting already" in error for error in errors.values())
    assert "" in errors.values() and errors.keys() == set("abcd")


@pytest.mark.parametrize("wanted", [True, False])
def test_there_is_one_final_response_whether_or_not_an_empty_one_is_wanted(channel: grpc.Channel, wanted: bool) -> None:
    found = replies(channel, _request("a", triton_enable_empty_final_response=wanted))
    assert [each.final for each in found] == [False] * (len(found) - 1) + [True]
    assert found[-1].reply.finish_reason == "length"


def test_a_stream_without_a_request_ends_well(channel: grpc.Channel) -> None:
    assert replies(channel) == []


def test_a_client_may_send_when_it_likes(channel: grpc.Channel) -> None:
    """Like ``start_stream``, the test keeps the stream open between requests."""
    waiting: queue.Queue[pb.ModelInferRequest | None] = queue.Queue()
    call = triton_wire.stream(channel, iter(waiting.get, None))
    for name in ("a", "b"):
        waiting.put(_request(name))
        while not (reply := streamed(next(call))).final:
            assert reply.reply.id == name
    waiting.put(None)
    assert list(call) == [] and call.code() is grpc.StatusCode.OK


# --- the client leaves ---


def test_a_cancelled_stream_frees_the_rows_of_all_its_requests(triton: Server, channel: grpc.Channel) -> None:
    before = triton.counters("tiny")
    waiting: queue.Queue[pb.ModelInferRequest | None] = queue.Queue()
    call = triton_wire.stream(channel, iter(waiting.get, None))
    for name in "abc":
        waiting.put(_request(name, **_LONG))
    triton.wait_for("tiny", lambda now: now["running_sequences"] == 3)
    call.cancel()
    waiting.put(None)
    after = triton.wait_for("tiny", lambda now: now["cancelled_sequences"] - before["cancelled_sequences"] == 3)
    assert after["running_sequences"] == 0
    assert call.code() is grpc.StatusCode.CANCELLED


def test_a_cancelled_unary_call_frees_its_row(triton: Server, channel: grpc.Channel) -> None:
    before = triton.counters("other")
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer").future(
        _request("a", model="other", **_LONG).SerializeToString(), timeout=v2.TIMEOUT_S
    )
    triton.wait_for("other", lambda now: now["running_sequences"] == 1)
    call.cancel()
    after = triton.wait_for("other", lambda now: now["cancelled_sequences"] - before["cancelled_sequences"] == 1)
    assert after["running_sequences"] == 0


def test_a_refused_request_is_one_line_at_info(triton: Server, channel: grpc.Channel) -> None:
    begun = len(triton.log)
    replies(channel, _request("unknown", model="nobody\nforged"), _request("wrong", max_tokens=0), b"\xff\xff")

    def lines() -> list[str]:
        """Returns the log lines without those about clients of other tests that have left."""
        return [line for line in triton.log[begun:].splitlines() if "client=disconnected" not in line]

    wait_until(lambda: len(lines()) >= 3, "the lines")
    assert len(lines()) == 3 and all(" INFO " in line for line in lines()), lines()


def test_nothing_of_all_this_is_a_traceback(triton: Server, channel: grpc.Channel) -> None:
    for _ in range(5):
        call = triton_wire.stream(channel, [_request("a", **_LONG), b"\xff\xff", _request("b", model="nobody")])
        next(call)
        call.cancel()
    triton.wait_for("tiny", lambda now: now["running_sequences"] == 0)
    assert "Traceback" not in triton.log and "never retrieved" not in triton.log


# --- sizes ---


def test_messages_are_as_large_as_on_mlservers_port(channel: grpc.Channel) -> None:
    huge = _request("a", "x" * TRITON_MESSAGE_BYTES)
    for call in (lambda: infer(channel, huge), lambda: replies(channel, huge)):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
