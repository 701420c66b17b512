"""A scripted gRPC server: it answers each stream with given messages and ends it with a given code.

It needs none of our protocols, and simulates faults that a client must survive.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from mlserver_torch_stream.client.grpc_transport import ModelInferRequest, ModelInferResponse


@dataclass
class GrpcScript(grpc.GenericRpcHandler):  # type: ignore[misc]
    """With ``code`` None, the stream ends normally. With ``hold``, it stays open until its client has left."""

    messages: Sequence[Any]
    code: grpc.StatusCode | None = None
    details: str = ""
    hold: bool = False
    asked: list[Any] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def service(self, call_details: Any) -> Any:
        assert call_details.method == "/inference.GRPCInferenceService/ModelStreamInfer"
        return grpc.stream_stream_rpc_method_handler(
            self._answer, ModelInferRequest.FromString, ModelInferResponse.SerializeToString
        )

    def _answer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        self.asked += list(requests)
        self.metadata.append(dict(context.invocation_metadata()))
        yield from self.messages
        if self.hold:
            left = threading.Event()
            context.add_callback(left.set)
            left.wait(60)
        if self.code is not None:
            context.abort(self.code, self.details)


@contextmanager
def grpc_script(
    *messages: Any, code: grpc.StatusCode | None = None, details: str = "", hold: bool = False
) -> Iterator[GrpcScript]:
    script = GrpcScript(messages, code, details, hold)
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((script,))
    script.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield script
    finally:
        server.stop(None).wait()


def response(text: str, *, final: bool = False, error: str | None = None) -> Any:
    message = ModelInferResponse(model_name="m")
    message.outputs.add(name="text_output", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    message.parameters.add(key="triton_final_response").value.bool_param = final
    if error is not None:
        message.parameters.add(key="error").value.string_param = error
    return message
