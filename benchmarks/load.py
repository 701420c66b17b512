"""Streams over raw sockets, at the least cost to the machine that also runs the server; parsed after the run.

Knows nothing of what is measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlserver_torch_stream.client import EventParser

_READ = 1 << 16
_STREAM_S = 600.0


@dataclass
class Recording:
    """The raw answer to one request and when its parts came."""

    started: float
    chunks: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def ended(self) -> float:
        return self.chunks[-1][0]

    @property
    def time_to_first_token(self) -> float:
        return next(at for at, chunk in self.chunks if b"text_output" in chunk) - self.started

    def events(self) -> list[dict[str, Any]]:
        head, _, body = b"".join(chunk for _, chunk in self.chunks).partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answered {head.splitlines()[0]!r}: {body[:500]!r}")
        return [json.loads(event) for event in EventParser().feed(_dechunk(body))]

    def tokens(self) -> int:
        tensors = [tensor for event in self.events() for tensor in event["outputs"]]
        counts = [tensor["data"][0] for tensor in tensors if tensor["name"] == "num_output_tokens"]
        if not counts:
            raise RuntimeError("a stream ended without a final event")
        return int(counts[-1])


def _dechunk(body: bytes) -> bytes:
    """A body in chunked transfer encoding, as plain bytes."""
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        parts.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(parts)


def request_bytes(port: int, model: str, prompt: str, **parameters: Any) -> bytes:
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [prompt]}
    body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def record(port: int, request: bytes) -> Recording:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        recording = Recording(time.perf_counter())
        writer.write(request)
        while chunk := await asyncio.wait_for(reader.read(_READ), _STREAM_S):
            recording.chunks.append((time.perf_counter(), chunk))
        return recording
    finally:
        writer.close()


async def record_together(port: int, requests: Sequence[bytes]) -> list[Recording]:
    return list(await asyncio.gather(*(record(port, request) for request in requests)))


async def record_in_turn(port: int, requests: Sequence[bytes]) -> list[Recording]:
    return [await record(port, request) for request in requests]


async def probe_health(port: int, until: asyncio.Future[Any], every_s: float = 0.01) -> list[float]:
    """Latencies of ``GET /v2/health/live`` on one kept connection, until ``until`` is done."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    latencies = []
    try:
        while not until.done():
            started = time.perf_counter()
            writer.write(f"GET /v2/health/live HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(length)
            latencies.append(time.perf_counter() - started)
            await asyncio.wait([until], timeout=every_s)
    finally:
        writer.close()
    return latencies
