"""Endpoints of a running server: server-sent events over a raw socket, for two APIs, and gRPC.

Requests are written by hand. No reply is parsed before the run is over: messages stay raw bytes, with grpc.aio too.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import grpc.aio
import httptools

from benchmarks.answers import Answer, Ask, Recording

HOST = "127.0.0.1"
_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_LAST_CHUNK = b"0\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_EVENT_END = re.compile(rb"\r?\n\r?\n")


class Spelling(Protocol):
    """How a server's streaming API is called, and what its events mean."""

    @property
    def path(self) -> str: ...

    def body(self, ask: Ask) -> Mapping[str, Any]: ...

    def text(self, event: Mapping[str, Any]) -> str:
        """Returns the text that the event adds to the answer."""

    def usage(self, event: Mapping[str, Any]) -> tuple[int, int] | None:
        """Returns the numbers of prompt tokens and new tokens if the event has them."""


class BadAnswer(Exception):
    """Raised if an answer is not a stream, or if its stream broke off."""


def _sampling(ask: Ask) -> Mapping[str, Any]:
    drawn = {"temperature": ask.temperature, "seed": 1} if ask.temperature else {"temperature": 0}
    return {**drawn, "structured_outputs": {"json": ask.schema}} if ask.schema else drawn


@dataclass(frozen=True)
class V2Spelling:
    """MLServer's V2 ``generate_stream``, as implemented here and by handwritten runtimes."""

    model: str

    @property
    def path(self) -> str:
        return f"/v2/models/{self.model}/generate_stream"

    def body(self, ask: Ask) -> Mapping[str, Any]:
        tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [ask.prompt]}
        fixed = {"max_tokens": ask.new_tokens, "ignore_eos": True, **_sampling(ask)}
        return {"inputs": [tensor], "parameters": fixed}

    def text(self, event: Mapping[str, Any]) -> str:
        return "".join(str(output["data"][0]) for output in event["outputs"] if output["name"] == "text_output")

    def usage(self, event: Mapping[str, Any]) -> tuple[int, int] | None:
        counts = {output["name"]: output["data"][0] for output in event["outputs"]}
        if "num_output_tokens" not in counts:
            return None
        return int(counts["num_input_tokens"]), int(counts["num_output_tokens"])


@dataclass(frozen=True)
class OpenAISpelling:
    """``/v1/completions``. ``extra`` has the fields with which a server ignores the end of text and caches nothing."""

    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    path: str = "/v1/completions"

    def body(self, ask: Ask) -> Mapping[str, Any]:
        return {
            "model": self.model,
            "prompt": ask.prompt,
            "max_tokens": ask.new_tokens,
            **_sampling(ask),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }

    def text(self, event: Mapping[str, Any]) -> str:
        return "".join(choice.get("text") or "" for choice in event.get("choices") or ())

    def usage(self, event: Mapping[str, Any]) -> tuple[int, int] | None:
        usage = event.get("usage")
        return (int(usage["prompt_tokens"]), int(usage["completion_tokens"])) if usage else None


@dataclass(frozen=True)
class HttpEndpoint:
    """The streaming path of one server."""

    port: int
    spelling: Spelling

    def request(self, ask: Ask) -> bytes:
        body = json.dumps(self.spelling.body(ask)).encode()
        head = (
            f"POST {self.spelling.path} HTTP/1.1\r\nHost: {HOST}:{self.port}\r\nConnection: close\r\n"
            f"Accept: text/event-stream\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def send(self, request: bytes, recording: Recording) -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        recording.started = time.perf_counter()
        transport, _ = await loop.create_connection(lambda: _Stream(request, recording, done), HOST, self.port)
        try:
            await done
        finally:
            transport.close()

    def read(self, recording: Recording) -> Answer:
        arrivals: list[float] = []
        texts: list[str] = []
        usage = None
        for at, data in events(recording.chunks):
            if data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise BadAnswer(f"the server reports {data[:500]}")
            if text := self.spelling.text(event):
                arrivals.append(at)
                texts.append(text)
            usage = self.spelling.usage(event) or usage
        if usage is None:
            raise BadAnswer("the stream ended without the server's token counts")
        return Answer(recording.started, recording.ended, tuple(arrivals), *usage, "".join(texts))

    async def close(self) -> None:
        """Does nothing, since no connection stays open between requests."""


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes, recording: Recording, done: asyncio.Future[None]) -> None:
        self._request = request
        self._recording = recording
        self._done = done
        self._left: float | None = None  # bytes of the response that are missing; infinite if its head does not say

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        at = time.perf_counter()
        self._recording.add(at, data)
        if self._left is None:
            head, end, _ = data.partition(b"\r\n\r\n")
            length = _LENGTH.search(head)
            self._left = math.inf if length is None else len(head) + len(end) + int(length[1])
        self._left -= len(data)
        if self._left <= 0 or data.endswith(_LAST_CHUNK):
            self._finish(at)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(time.perf_counter())

    def _finish(self, at: float) -> None:
        if not self._done.done():
            self._recording.end(at)
            self._done.set_result(None)


class _Response:
    """The callbacks of httptools: collects the pieces of a body, and whether it is complete."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.chunked = self.whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.chunked |= name.lower() == b"transfer-encoding" and b"chunked" in value.lower()

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.whole = True


def events(chunks: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """Yields when each event's last byte arrived, and its data. Raises BadAnswer if a stream breaks off or fails."""
    response, rest = _Response(), b""
    parser = httptools.HttpResponseParser(response)
    for at, chunk in chunks:
        try:
            parser.feed_data(chunk)
        except httptools.HttpParserError as error:
            raise BadAnswer(f"the server answered {chunk[:500]!r}") from error
        *whole, rest = _EVENT_END.split(rest + b"".join(response.pieces))
        response.pieces.clear()
        for event in whole if parser.get_status_code() == 200 else ():
            lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
            if lines:
                yield at, b"\n".join(lines).decode()
    if not chunks or parser.get_status_code() != 200:
        raise BadAnswer(f"the server answered {b''.join(chunk for _, chunk in chunks)[:500]!r}")
    if rest.strip() or (response.chunked and not response.whole):
        raise BadAnswer(f"the stream broke off before its end: {rest[:200]!r}")


class GrpcEndpoint:
    """Uses one channel for all streams, as a client would."""

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
            raise BadAnswer("the gRPC stream ended without the server's token counts")
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
