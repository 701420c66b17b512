"""A file of 10 GB for ``/v1/files``: how soon it is refused, and what the server's memory grows by meanwhile.

Knows our server's form and its bound on files; the bytes are made while they are sent.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from benchmarks.breaking import Broken
from benchmarks.flood import HOST
from benchmarks.process import rss_mib

_BYTES = 10 * 10**9
_PIECE = b"x" * 65536
_CHUNK = b"%x\r\n%b\r\n" % (len(_PIECE), _PIECE)
_PARTS = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="large.jsonl"\r\n\r\n'
)
_SAMPLES = 64  # one look at the memory for so many pieces


async def oversized_file(server: Broken) -> dict[str, Any]:
    """Once with its size in the head, once in chunks without one, which ends where the server stops reading."""
    return {
        "announced": await _refused(server, b"Content-Length: %d\r\n\r\n%b" % (_BYTES, _PARTS), _PIECE),
        "unannounced": await _refused(
            server, b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(_PARTS), _PARTS), _CHUNK
        ),
    }


async def _refused(server: Broken, rest_of_head: bytes, piece: bytes) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection(HOST, server.port)
    before = peak = rss_mib([server.pid])
    began = time.perf_counter()
    answer = asyncio.ensure_future(reader.readline())
    sent = count = 0
    try:
        writer.write(b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n")
        writer.write(rest_of_head)
        while not answer.done() and sent < _BYTES:
            writer.write(piece)
            await writer.drain()
            sent, count = sent + len(_PIECE), count + 1
            if count % _SAMPLES == 0:
                peak = max(peak, rss_mib([server.pid]))
    except ConnectionError:
        pass  # the server has closed its side: its answer is there
    status = int((await answer).split()[1])
    seconds = time.perf_counter() - began
    writer.transport.abort()
    grown = max(peak, rss_mib([server.pid])) - before
    return {"status": status, "seconds": seconds, "sent_mib": sent / 2**20, "rss_grown_mib": grown}
