"""The longest gap between two pieces of a stream, and the longest answer of liveness, while something else happens.

Knows nothing of what happens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from benchmarks.breaking import Broken
from benchmarks.flood import HOST
from benchmarks.load import probe_health
from benchmarks.process import family, rss_mib

_TOKENS = 1500
_START_S = 60.0
_SAMPLE_S = 0.01
_SETTLE_S = 2.0
_T = TypeVar("_T")


class _Beside:
    """One stream after another, each read as it comes."""

    def __init__(self, server: Broken) -> None:
        self._server = server
        self._latest = 0.0
        self.longest = 0.0
        self.streaming = asyncio.Event()

    def begin(self) -> None:
        """Gaps count from now on."""
        self._latest, self.longest = time.perf_counter(), 0.0

    def note(self) -> None:
        now = time.perf_counter()
        self.longest, self._latest = max(self.longest, now - self._latest), now

    async def run(self) -> None:
        while True:
            reader, writer = await asyncio.open_connection(HOST, self._server.port)
            try:
                writer.write(self._server.request(_TOKENS))
                await reader.readuntil(b"data: ")
                self._latest = time.perf_counter()
                while await reader.read(65536):
                    self.note()
                    self.streaming.set()
            finally:
                writer.close()


async def beside_a_stream(server: Broken, happening: Coroutine[Any, Any, _T]) -> tuple[_T, dict[str, float]]:
    """What happened, and beside it ``longest_gap_ms`` of a stream, ``longest_live_ms`` of ``GET /v2/health/live``, and
    of the server ``rss_grown_mib`` at the most and, with its children and once it is over, ``rss_kept_mib``."""
    beside = _Beside(server)
    reading = asyncio.ensure_future(beside.run())
    await asyncio.wait_for(beside.streaming.wait(), _START_S)
    all_before = rss_mib(family(server.pid))
    event = asyncio.ensure_future(happening)
    probing = asyncio.ensure_future(probe_health(server.port, event))
    before = peak = rss_mib([server.pid])
    beside.begin()
    while not event.done():
        await asyncio.wait([event, reading], timeout=_SAMPLE_S, return_when=asyncio.FIRST_COMPLETED)
        peak = max(peak, rss_mib([server.pid]))
        if reading.done():
            reading.result()
    beside.note()  # the gap that is still open
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading
    live = max(await probing)
    await asyncio.sleep(_SETTLE_S)
    return await event, {
        "longest_gap_ms": 1000 * beside.longest,
        "longest_live_ms": 1000 * live,
        "rss_grown_mib": peak - before,
        "rss_kept_mib": rss_mib(family(server.pid)) - all_before,
        "rss_before_mib": all_before,
    }
