"""Reads one JSONL object of a given size in MiB in a folder to its end, and prints by how much this process grew."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mlserver_torch_stream.cloud.pipeline import PipelineLimits
from mlserver_torch_stream.cloud.prefetch import PrefetchedRange
from mlserver_torch_stream.cloud.rows import Outcome, Row
from mlserver_torch_stream.cloud.run import CloudRun, stream
from mlserver_torch_stream.cloud.run_metrics import RunMetrics

MIB = 2**20


def _grown(before: int) -> float:
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


async def _run(folder: str, mib: int, job: CloudRun) -> dict[str, float]:
    """The rows have about one MiB each, so that they do not end at the ends of blocks."""
    prompt = "x" * (MIB - 100)
    with Path(folder, "large.jsonl").open("w") as out:
        for _ in range(mib):
            out.write(json.dumps({"prompt": prompt}) + "\n")
    metrics, count = RunMetrics(), 0

    async def lengths(rows: Sequence[Row]) -> list[Outcome]:
        while rows[0].index == 0 and metrics.peak_undelivered_bytes + MIB < min(
            job.limits.window_bytes, mib * MIB // 2
        ):
            await asyncio.sleep(0.001)  # the head is slow until the window is full
        return [Outcome({"length": len((row.body or {})["prompt"])}) for row in rows]

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async for result in stream(job, lengths, metrics):
        assert result.outcome.response == {"length": len(prompt)} and result.row.index == count
        count += 1
    return {"rows": count, "grown_mib": _grown(before), "undelivered_bytes": metrics.peak_undelivered_bytes}


def main(mib: int, window_mib: int, ahead_mib: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        limits, ahead = (
            PipelineLimits(window_bytes=window_mib * MIB, batch_rows=4),
            PrefetchedRange(nbytes=ahead_mib * MIB),
        )
        job = CloudRun(folder, limits=limits, ahead=ahead)
        found = asyncio.run(asyncio.wait_for(_run(folder, mib, job), 300))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
