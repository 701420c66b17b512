"""A small client: yields the deltas of one streamed generation, synchronously or asynchronously.

Knows the V2 protocol over server-sent events. Knows nothing of the engine, and imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from mlserver_torch_stream.v2_reader import read_reply

DEFAULT_TIMEOUT_S = 300.0
_CONNECT_TIMEOUT_S = 5.0
# A lone \r at the end of a chunk may be half of \r\n: it is kept for the next chunk.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


class ClientError(Exception):
    """The generation failed. The message has the reason that the server or the network gave."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Delta:
    """The text that one event adds to sequence ``index``. A sequence's last delta has its finish reason and counts."""

    text: str = ""
    index: int = 0
    finish_reason: str | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    final: bool = False  # the whole request is answered

    def __str__(self) -> str:
        return self.text


class EventParser:
    """Parses a ``text/event-stream`` body, in chunks of any size, into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        events = []
        for line in lines:
            if line:
                self._field(line.decode("utf-8"))
            elif self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))


def stream(
    url: str,
    model: str,
    prompt: str | None = None,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    **parameters: Any,
) -> Generator[Delta, None, None]:
    """Streams the answer to a raw ``prompt`` or to chat ``messages``. Closing the generator cancels the generation.

    ``timeout`` bounds the seconds between two events. Raises ClientError.
    """
    body = _body(prompt, messages, parameters)
    reader = _EventReader()
    try:
        with (
            httpx.Client(timeout=_timeouts(timeout)) as client,
            client.stream("POST", _path(url, model), json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise _refusal(response.status_code, response.read())
            for chunk in response.iter_bytes():
                yield from reader.feed(chunk)
    except httpx.HTTPError as error:
        raise reader.broken(url, error) from error
    reader.close()


async def astream(
    url: str,
    model: str,
    prompt: str | None = None,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    **parameters: Any,
) -> AsyncGenerator[Delta, None]:
    """The same as ``stream``, for asyncio."""
    body = _body(prompt, messages, parameters)
    reader = _EventReader()
    try:
        async with (
            httpx.AsyncClient(timeout=_timeouts(timeout)) as client,
            client.stream("POST", _path(url, model), json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise _refusal(response.status_code, await response.aread())
            async for chunk in response.aiter_bytes():
                for delta in reader.feed(chunk):
                    yield delta
    except httpx.HTTPError as error:
        raise reader.broken(url, error) from error
    reader.close()


def model_names(url: str, timeout: float = _CONNECT_TIMEOUT_S) -> list[str]:
    """The names of the models that the server has ready. Raises ClientError."""
    try:
        response = httpx.post(f"{url.rstrip('/')}/v2/repository/index", json={"ready": True}, timeout=timeout)
    except httpx.HTTPError as error:
        raise ClientError(f"no answer from {url}: {error or type(error).__name__}") from error
    if response.status_code != httpx.codes.OK:
        raise _refusal(response.status_code, response.content)
    return sorted({item["name"] for item in response.json()})


class _EventReader:
    """Turns chunks into deltas, and remembers whether the final event arrived."""

    def __init__(self) -> None:
        self._parser = EventParser()
        self._started = False
        self._final = False

    def feed(self, chunk: bytes) -> Iterator[Delta]:
        for event in self._parser.feed(chunk):
            delta = _delta(json.loads(event))
            self._started = True
            self._final = self._final or delta.final
            yield delta

    def close(self) -> None:
        if not self._final:
            raise ClientError(self._cut("the stream ended before its final event"))

    def broken(self, url: str, error: httpx.HTTPError) -> ClientError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ClientError(f"no server at {url}: {error or type(error).__name__}")
        return ClientError(self._cut(f"the stream broke: {error or type(error).__name__}"))

    def _cut(self, message: str) -> str:
        return message if self._started else f"{message} (before its first event: the server's log says why)"


def _body(
    prompt: str | None, messages: Sequence[Mapping[str, Any]] | None, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    if (prompt is None) == (messages is None):
        raise ValueError("give exactly one of prompt and messages")
    if prompt is not None:
        name, text = "text_input", prompt
    else:
        name, text = "messages", json.dumps(messages, ensure_ascii=False)
    tensor = {"name": name, "shape": [1], "datatype": "BYTES", "data": [text]}
    return {"inputs": [tensor], "parameters": dict(parameters)}


def _path(url: str, model: str) -> str:
    return f"{url.rstrip('/')}/v2/models/{quote(model, safe='')}/generate_stream"


def _timeouts(read: float) -> httpx.Timeout:
    return httpx.Timeout(read, connect=_CONNECT_TIMEOUT_S)


def _refusal(status: int, body: bytes) -> ClientError:
    try:
        reason = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        reason = body.decode("utf-8", "replace").strip()
    return ClientError(f"the server answered {status}: {reason}", status)


def _delta(event: Mapping[str, Any]) -> Delta:
    reply = read_reply(event)
    if reply.error is not None:
        raise ClientError(f"the generation failed: {reply.error}")
    sequence = reply.sequences[0]
    return Delta(
        text=sequence.text or "",
        index=sequence.index,
        finish_reason=sequence.finish_reason,
        num_input_tokens=sequence.num_input_tokens,
        num_output_tokens=sequence.num_output_tokens,
        final=reply.final,
    )
