"""Reads one object of an S3 endpoint in chunks to its end, and prints by how much this process grew."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import zlib
from collections.abc import Sequence

from mlserver_torch_stream.cloud.parse import Chunking
from mlserver_torch_stream.cloud.pipeline import PipelineLimits
from mlserver_torch_stream.cloud.prefetch import PrefetchedRange
from mlserver_torch_stream.cloud.rows import Kind, Outcome, Row
from mlserver_torch_stream.cloud.run import CloudRun, stream

MIB = 2**20


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def _run(job: CloudRun) -> dict[str, float]:
    before, crc, size = _peak(), 0, 0

    async def lengths(rows: Sequence[Row]) -> list[Outcome]:
        nonlocal crc, size
        for row in rows:
            crc, size = zlib.crc32(row.data, crc), size + len(row.data)
        return [Outcome({"predictions": [len(row.data)]}) for row in rows]

    count = 0
    async for result in stream(job, lengths):
        assert result.outcome.failure is None, result.outcome.failure
        count += 1
    return {"rows": count, "bytes": size, "crc": crc, "grown_mib": (_peak() - before) / MIB}


def main(url: str, chunk_mib: int, bound_mib: int) -> None:
    """``chunk_mib`` 0 reads the object as a whole."""
    chunking = Chunking(chunk_mib * MIB, joined=False) if chunk_mib else Chunking(whole_bytes=2**40)
    limits = PipelineLimits(window_bytes=bound_mib * MIB, batch_rows=2, batches=1)
    storage = {"endpoint": url, "skip_signature": "true", "region": "x"}
    ahead = PrefetchedRange(nbytes=bound_mib * MIB)
    job = CloudRun("s3://bucket", kind=Kind.BYTES, chunking=chunking, limits=limits, ahead=ahead, storage=storage)
    print(json.dumps(asyncio.run(asyncio.wait_for(_run(job), 600))))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
