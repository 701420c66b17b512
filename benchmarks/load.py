"""Sends requests all at once, one by one, at given times, a constant number at a time, or while streams run.

They go through an endpoint, and the recordings are returned; this does not depend on servers or figures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from benchmarks.answers import Answer, Ask, Recording, check_all

STREAM_S = 1800.0  # a server that computes one request at a time takes minutes to reach the last of 32
# After this many chunks of each stream, prefill is over and decoding steady; then a long prompt may join them.
_SETTLED = 16


class Endpoint(Protocol):
    """An endpoint of one running server; ``port`` is its HTTP port."""

    @property
    def port(self) -> int: ...

    def request(self, ask: Ask) -> bytes: ...

    async def send(self, request: bytes, recording: Recording) -> None: ...

    def read(self, recording: Recording) -> Answer: ...

    async def close(self) -> None: ...


async def together(endpoint: Endpoint, asks: Sequence[Ask]) -> list[Recording]:
    """Sends all requests at once."""
    return await at_times(endpoint, asks, [0.0] * len(asks))


async def in_turn(endpoint: Endpoint, asks: Sequence[Ask]) -> list[Recording]:
    """Sends each request when the one before it has ended."""
    return [recording for ask in asks for recording in await together(endpoint, [ask])]


async def at_times(endpoint: Endpoint, asks: Sequence[Ask], offsets: Sequence[float]) -> list[Recording]:
    """Sends each request at its own time (in seconds from now), even if earlier ones have not been answered."""
    requests = [endpoint.request(ask) for ask in asks]
    recordings = [Recording() for _ in asks]
    await asyncio.gather(*(_send(endpoint, *each) for each in zip(requests, recordings, offsets, strict=True)))
    return recordings


async def always(endpoint: Endpoint, asks: Sequence[Ask], streams: int) -> list[Recording]:
    """Keeps ``streams`` requests in flight: sends the next one when one of them has ended."""
    requests = iter([endpoint.request(ask) for ask in asks])
    recordings: list[Recording] = []

    async def one_after_another() -> None:
        for request in requests:
            recordings.append(recording := Recording())
            await _send(endpoint, request, recording)

    await asyncio.gather(*(one_after_another() for _ in range(streams)))
    return recordings


async def intrusion(
    endpoint: Endpoint, asks: Sequence[Ask], late: Sequence[Ask]
) -> tuple[list[Recording], list[Recording]]:
    """Sends ``asks`` at once, and when all of them are streaming, sends the ``late`` ones together."""
    recordings = [Recording() for _ in asks]
    settled = _when_all_stream(recordings, _SETTLED)
    first = asyncio.gather(
        *(_send(endpoint, endpoint.request(ask), each) for ask, each in zip(asks, recordings, strict=True))
    )
    intruders = [Recording() for _ in late]
    try:
        either: list[asyncio.Future[Any]] = [settled, first]
        await asyncio.wait(either, timeout=STREAM_S, return_when=asyncio.FIRST_COMPLETED)
        requests = [endpoint.request(ask) for ask in late]
        await asyncio.gather(*(_send(endpoint, *each) for each in zip(requests, intruders, strict=True)))
    finally:
        await first
    return recordings, intruders


def _when_all_stream(recordings: Sequence[Recording], chunks: int) -> asyncio.Future[None]:
    """Returns a future that is done when every recording has this many chunks or has ended."""
    reached = asyncio.get_running_loop().create_future()
    waiting = set(range(len(recordings)))

    def watch(index: int) -> Callable[[], None]:
        def look() -> None:
            if recordings[index].ended or len(recordings[index].chunks) >= chunks:
                recordings[index].on_change = None
                waiting.discard(index)
                if not waiting and not reached.done():
                    reached.set_result(None)

        return look

    for index, recording in enumerate(recordings):
        recording.on_change = watch(index)
    return reached


async def _send(endpoint: Endpoint, request: bytes, recording: Recording, offset: float = 0.0) -> None:
    if offset:
        await asyncio.sleep(offset)
    await asyncio.wait_for(endpoint.send(request, recording), STREAM_S)


def read(endpoint: Endpoint, asks: Sequence[Ask], recordings: Sequence[Recording]) -> list[Answer]:
    """Returns the answers. Raises WrongCount or BadAnswer if one of them has wrong counts or is not whole."""
    answers = [endpoint.read(recording) for recording in recordings]
    check_all(asks, answers)
    return answers


async def probe_health(port: int, until: asyncio.Future[Any], every_s: float = 0.01) -> list[float]:
    """Returns latencies of ``GET /v2/health/live`` over one kept connection, measured until ``until`` is done."""
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
