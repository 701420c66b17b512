"""Sends more requests than a server can handle, at a steady rate whatever it answers, and records each answer.

Knows nothing of the requests but their bytes.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

HOST = "127.0.0.1"
_ANSWER_S = 120.0


@dataclass(slots=True)
class Answered:
    """The answer to one request. ``status`` is 0 if the connection broke before there was one."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    head_s: float = 0.0  # from before the connection to the last byte of the head
    whole: bool = False


async def flood(port: int, request: bytes, per_second: float, seconds: float) -> list[Answered]:
    """Opens a connection for each request at its own time, and waits until the last request is answered."""
    begun = time.perf_counter()
    running = []
    for number in range(int(per_second * seconds)):
        delay = begun + number / per_second - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        running.append(asyncio.create_task(ask(port, request)))
    return list(await asyncio.gather(*running))


async def ask(port: int, request: bytes) -> Answered:
    """``request`` must have the header ``Connection: close``."""
    answered = Answered()
    with suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
        await asyncio.wait_for(_ask(port, request, answered), _ANSWER_S)
    return answered


async def _ask(port: int, request: bytes, answered: Answered) -> None:
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        answered.head_s = time.perf_counter() - began
        status_line, *lines = head.rstrip().split("\r\n")
        answered.status = int(status_line.split()[1])
        answered.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        answered.body = await reader.read()
        chunked = answered.headers.get("transfer-encoding") == "chunked"
        length = answered.headers.get("content-length")
        answered.whole = answered.body.endswith(b"0\r\n\r\n") if chunked else len(answered.body) == int(length or -1)
    finally:
        writer.close()
