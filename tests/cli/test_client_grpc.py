"""The client over gRPC with a scripted server: its messages, and every way in which a stream can break."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from mlserver.grpc import dataplane_pb2 as pb

from mlserver_torch_stream import client
from mlserver_torch_stream.client import grpc_transport
from mlserver_torch_stream.client.call import generation_call
from mlserver_torch_stream.client.grpc_transport import SilenceWatch, request_message, response_deltas
from tests.cli.grpc_script import grpc_script, response

Collect = Callable[..., list[client.Delta]]


def _blocking(url: str, **arguments: Any) -> list[client.Delta]:
    with client.Client(url, **arguments) as asked:
        return list(asked.stream("m", "Hello"))


def _in_asyncio(url: str, **arguments: Any) -> list[client.Delta]:
    async def collect() -> list[client.Delta]:
        async with client.AsyncClient(url, **arguments) as asked:
            return [delta async for delta in asked.stream("m", "Hello")]

    return asyncio.run(collect())


both = pytest.mark.parametrize("collect", [_blocking, _in_asyncio])


@both
def test_deltas_come_one_by_one_and_the_headers_go_along(collect: Collect) -> None:
    with grpc_script(response("Grü"), response("ße 🙂", final=True)) as server:
        deltas = collect(server.url, headers={"X-Client-Id": "me"})
    assert deltas == [client.Delta("Grü"), client.Delta("ße 🙂", final=True)]
    assert server.metadata[0]["x-client-id"] == "me"
    (asked,) = server.asked
    assert asked.model_name == "m" and asked.inputs[0].contents.bytes_contents == [b"Hello"]


@both
def test_a_refusal_has_the_status_that_rest_would_give(collect: Collect) -> None:
    with (
        grpc_script(code=grpc.StatusCode.INVALID_ARGUMENT, details="n: must be positive") as server,
        pytest.raises(client.RequestRefused, match="INVALID_ARGUMENT: n: must be positive") as refused,
    ):
        collect(server.url)
    assert refused.value.status == 422


@both
def test_a_stream_that_breaks_is_an_error_after_its_deltas(collect: Collect) -> None:
    with (
        grpc_script(response("a"), code=grpc.StatusCode.UNAVAILABLE, details="draining") as server,
        pytest.raises(client.StreamBroken, match="draining") as broken,
    ):
        collect(server.url)
    assert broken.value.status == 503


@both
def test_a_stream_without_a_final_response_is_an_error(collect: Collect) -> None:
    with grpc_script(response("a")) as server, pytest.raises(client.StreamBroken, match="before its final"):
        collect(server.url)


@both
def test_an_error_in_the_stream_is_raised_with_its_reason(collect: Collect) -> None:
    with (
        grpc_script(response("", final=True, error="it burned")) as server,
        pytest.raises(client.GenerationError, match="it burned"),
    ):
        collect(server.url)


@both
def test_an_answer_that_is_no_text_is_an_error_of_the_stream(collect: Collect) -> None:
    image = response("", final=True)
    image.outputs[0].contents.bytes_contents[0] = b"\xff\xd8"
    with grpc_script(image) as server, pytest.raises(client.StreamBroken, match="cannot be read"):
        collect(server.url)


@both
def test_no_server_is_a_clear_error(collect: Collect) -> None:
    with grpc_script() as server:
        url = server.url
    with pytest.raises(client.ConnectionFailed, match=f"no server at {url}"):
        collect(url)


@both
def test_a_host_without_an_address_is_no_server(collect: Collect) -> None:
    with pytest.raises(client.ConnectionFailed, match=r"no server at grpc://nowhere\.invalid:1"):
        collect("grpc://nowhere.invalid:1")


@both
def test_a_call_that_the_server_cancels_is_a_broken_stream(collect: Collect) -> None:
    with (
        grpc_script(response("a"), code=grpc.StatusCode.CANCELLED, details="gone") as server,
        pytest.raises(client.StreamBroken, match="CANCELLED: gone"),
    ):
        collect(server.url)


def test_a_stream_whose_client_is_closed_is_broken_and_its_task_not_cancelled() -> None:
    async def read_on(url: str) -> None:
        async with client.AsyncClient(url) as asked:
            deltas = asked.stream("m", "Hello")
            await anext(deltas)
            closing = asyncio.ensure_future(asked.close())
            with pytest.raises(client.StreamBroken, match="the client was closed"):
                async for _ in deltas:
                    pass
            await closing

    with grpc_script(response("a"), hold=True) as server:
        asyncio.run(asyncio.wait_for(read_on(server.url), 60))


class _Messages(list[str]):
    """A call whose messages have all arrived."""

    cancelled = False

    def __init__(self, *messages: str) -> None:
        super().__init__(messages)

    def __next__(self) -> str:
        return self.pop(0)

    def cancel(self) -> None:
        self.cancelled = True


def test_the_time_that_the_reader_takes_is_no_silence() -> None:
    messages = _Messages("a", "b")
    watch = SilenceWatch(messages, 0.5)
    assert watch.next() == "a"
    time.sleep(0.7)
    assert watch.next() == "b"
    watch.close()
    assert not watch.fired and not messages.cancelled


def test_parameters_are_booleans_integers_and_strings() -> None:
    given = {
        "ignore_eos": True,
        "seed": 7,
        "temperature": 0.5,
        "stop": ["a", "b"],
        "user": "x",
        "n": None,
        "big": 2**70,
    }
    message = request_message(generation_call("m", ["one", "two"], None, given))
    read = pb.ModelInferRequest.FromString(message.SerializeToString())
    parameters = {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in read.parameters.items()}
    assert parameters == {
        "ignore_eos": True,
        "seed": 7,
        "temperature": "0.5",
        "stop": '["a", "b"]',
        "user": "x",
        "big": str(2**70),
    }
    assert list(read.inputs[0].contents.bytes_contents) == [b"one", b"two"] and list(read.inputs[0].shape) == [2]


def test_every_kind_of_output_of_mlserver_is_read() -> None:
    said = pb.ModelInferResponse(model_name="m", id="1")
    said.parameters["index"].int64_param = 3
    said.parameters["triton_final_response"].bool_param = False
    said.outputs.add(name="text_output", shape=[1]).contents.bytes_contents.append("ü".encode())
    said.outputs.add(name="token_ids", shape=[2]).contents.int64_contents.extend([5, 0])
    said.outputs.add(name="num_output_tokens", shape=[1]).contents.uint_contents.append(2)
    said.outputs.add(name="cumulative_logprob", shape=[1]).contents.fp64_contents.append(-0.25)
    entry = {"token_id": 5, "logprob": -0.25, "top": [[5, -0.25], [6, -2.0]]}
    said.outputs.add(name="logprobs", shape=[1]).contents.bytes_contents.append(json.dumps([entry]).encode())
    top = (client.Logprob(-0.25, 5), client.Logprob(-2.0, 6))
    assert response_deltas(grpc_transport.ModelInferResponse.FromString(said.SerializeToString())) == [
        client.Delta(
            "ü",
            index=3,
            token_ids=(5, 0),
            logprobs=(client.Logprob(-0.25, 5, top=top),),
            cumulative_logprob=-0.25,
            num_output_tokens=2,
        )
    ]


@pytest.mark.long
def test_it_imports_neither_mlserver_nor_torch_also_where_mlserver_is_imported_later() -> None:
    """MLServer's messages have the same names, and protobuf refuses two messages of one name in one pool."""
    program = (
        "import sys\n"
        "from mlserver_torch_stream.client import Client\n"
        "Client('grpc://127.0.0.1:1').close(); Client('http://127.0.0.1:1').close()\n"
        "assert not {'mlserver', 'torch', 'transformers'} & set(sys.modules)\n"
        "from mlserver.grpc import dataplane_pb2\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
