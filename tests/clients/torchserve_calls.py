"""Calls a server as TorchServe's own gRPC client does, with stubs made by protoc. Prints ``done``.

Runs in its own environment, beside ``inference_pb2`` and ``inference_pb2_grpc``. The argument is the server's address.
Models: ``hello`` streams, ``stateful`` adds up the numbers of a sequence.
"""

from __future__ import annotations

import queue
import sys
import threading

import grpc
import inference_pb2
import inference_pb2_grpc
from google.protobuf import empty_pb2
from google.rpc import error_details_pb2

_TIMEOUT_S = 60.0
_METADATA = (("protocol", "gRPC"), ("session_id", "12345"))


def _ask(model: str, data: bytes, **more: object) -> inference_pb2.PredictionsRequest:
    return inference_pb2.PredictionsRequest(model_name=model, input={"data": data}, **more)


def _unary_and_streamed(stub: inference_pb2_grpc.InferenceAPIsServiceStub) -> None:
    response = stub.Predictions(_ask("hello", b"x"), metadata=_METADATA, timeout=_TIMEOUT_S)
    assert response.prediction.decode() == "hellohellohellohello world "
    responses = stub.StreamPredictions(_ask("hello", b"x"), metadata=_METADATA, timeout=_TIMEOUT_S)
    assert [each.prediction.decode() for each in responses] == ["hello"] * 3 + ["hello world "]


def _sequence(stub: inference_pb2_grpc.InferenceAPIsServiceStub) -> None:
    """A thread reads answers while requests are sent.

    The sequence is named after the address, since its state persists.
    """
    requests: queue.Queue[object] = queue.Queue()
    answers: queue.Queue[bytes] = queue.Queue()
    responses = stub.StreamPredictions2(iter(requests.get, None), metadata=_METADATA, timeout=_TIMEOUT_S)

    def read() -> None:
        for response in responses:
            assert not response.HasField("status"), response.status
            answers.put(response.prediction)

    reader = threading.Thread(target=read)
    reader.start()
    for number in (b"1", b"2", b"3"):
        requests.put(_ask("stateful", number, sequence_id=sys.argv[1]))
    assert [answers.get(timeout=_TIMEOUT_S) for _ in range(3)] == [b"1", b"3", b"6"]
    requests.put(None)
    reader.join(_TIMEOUT_S)
    assert responses.code() is grpc.StatusCode.OK


def _refused(stub: inference_pb2_grpc.InferenceAPIsServiceStub) -> None:
    (response,) = stub.StreamPredictions2(iter([_ask("nobody", b"", sequence_id="s")]), timeout=_TIMEOUT_S)
    assert (response.status.code, response.status.message) == (5, "Model not found: nobody")
    info = error_details_pb2.ErrorInfo()
    assert response.status.details[0].Unpack(info)
    assert info.reason == "org.pytorch.serve.archive.model.ModelNotFoundException"


with grpc.insecure_channel(sys.argv[1]) as channel:
    made = inference_pb2_grpc.InferenceAPIsServiceStub(channel)
    assert made.Ping(empty_pb2.Empty(), timeout=_TIMEOUT_S).health == '{\n  "status": "Healthy"\n}'
    _unary_and_streamed(made)
    _sequence(made)
    _refused(made)
print("done")
