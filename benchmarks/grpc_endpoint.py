"""``ModelStreamInfer`` over grpc.aio with identity deserialisers: messages stay raw bytes until the run is over.

Knows our V2 tensors only; no peer speaks them over gRPC.
"""

from __future__ import annotations

import json
import time
from typing import Any

import grpc.aio

from benchmarks.answers import Answer, Ask
from benchmarks.http_endpoint import HOST, BadAnswer
from benchmarks.recording import Recording

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


class GrpcEndpoint:
    """One channel for all streams, as a client would have it."""

    def __init__(self, port: int, model: str, http_port: int = 0) -> None:
        self.port = http_port
        self._target = f"{HOST}:{port}"
        self._model = model
        self._channel: Any = None

    def request(self, ask: Ask) -> bytes:
        from mlserver.grpc.dataplane_pb2 import ModelInferRequest

        message = ModelInferRequest(model_name=self._model)
        message.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
            ask.prompt.encode()
        )
        message.parameters["max_tokens"].int64_param = ask.new_tokens
        message.parameters["temperature"].string_param = str(ask.temperature)  # V2 has no fractional parameters
        message.parameters["seed"].int64_param = 1
        if ask.schema:
            message.parameters["structured_outputs"].string_param = json.dumps({"json": ask.schema})
        message.parameters["ignore_eos"].bool_param = True
        return bytes(message.SerializeToString())

    async def send(self, request: bytes, recording: Recording) -> None:
        call = self._open().stream_stream(_METHOD)
        recording.started = time.perf_counter()
        try:
            async for message in call(iter([request])):
                recording.add(time.perf_counter(), message)
        finally:
            recording.end(time.perf_counter())

    def read(self, recording: Recording) -> Answer:
        from mlserver.grpc.dataplane_pb2 import ModelInferResponse

        arrivals, counts = [], {}
        for at, raw in recording.chunks:
            for output in ModelInferResponse.FromString(raw).outputs:
                if output.name == "text_output" and output.contents.bytes_contents[0]:
                    arrivals.append(at)
                elif output.name in ("num_input_tokens", "num_output_tokens"):
                    counts[output.name] = int(output.contents.uint_contents[0])
        if len(counts) != 2:
            raise BadAnswer("a gRPC stream ended without the server's token counts")
        prompt_tokens, new_tokens = counts["num_input_tokens"], counts["num_output_tokens"]
        return Answer(recording.started, recording.ended, tuple(arrivals), prompt_tokens, new_tokens)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def _open(self) -> Any:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._target)
        return self._channel
