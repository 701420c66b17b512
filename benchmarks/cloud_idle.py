"""How busy the engine is while objects are fetched: the embedded model over 200 objects, each fetch 5 ms late.

    .venv/bin/python -m benchmarks.cloud_idle

Prints the figures and writes them to ``benchmarks/results/cloud.json``; exits with 1 where the engine
idles more than 5 %.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from mlserver_torch_stream.cli.child_server import NAME, child_server
from mlserver_torch_stream.cli.cloud_run import EMBEDDED
from mlserver_torch_stream.cloud.backend import opened
from mlserver_torch_stream.cloud.endpoint import ServerEndpoint
from mlserver_torch_stream.cloud.pipeline import PipelineLimits, infer_rows
from mlserver_torch_stream.cloud.prefetch import PrefetchedRange
from mlserver_torch_stream.cloud.requests import RowRequest
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.source import Listed, Source
from mlserver_torch_stream.cloud.store import ObjectInfo, Store

_OBJECTS = 200
_LATE_S = 0.005
_TOKENS = 16
_MAX_IDLE = 0.05
_RESULTS = Path(__file__).parent / "results" / "cloud.json"


class LateStore(Store):
    """Every read comes late, as from a bucket elsewhere."""

    async def read(self, info: ObjectInfo, start: int, end: int) -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(_LATE_S)
        async for chunk in super().read(info, start, end):
            yield chunk


async def measure(ahead: PrefetchedRange) -> dict[str, Any]:
    metrics = RunMetrics()
    store = LateStore.memory()
    for number in range(_OBJECTS):
        await store.put(f"{number:03}.txt", f"Story number {number} begins in a small town where".encode())
    objects = sorted([Listed(info) async for info in store.list()], key=lambda listed: listed.info.key)
    async with child_server("TorchStreamRuntime", EMBEDDED, {}, metrics) as child:
        rows_as = RowRequest({"max_tokens": _TOKENS})
        async with opened(ServerEndpoint(child.url, NAME, rows=rows_as, batches=True, key=child.key)) as infer:
            began = time.monotonic()
            rows = Source(store, objects, ahead=ahead).rows()
            async for result in infer_rows(rows, infer, PipelineLimits(batch_rows=8, batches=8), metrics):
                assert result.outcome.failure is None, result.outcome.failure
            took = time.monotonic() - began
    share = metrics.busy.share()
    assert metrics.rows == _OBJECTS and share is not None
    return {
        "seconds": round(took, 2),
        "rows_per_s": round(_OBJECTS / took, 1),
        "tokens_per_s": round(metrics.completion_tokens / took, 1),
        "idle_share": round(1 - share, 4),
    }


def main() -> int:
    ahead = asyncio.run(measure(PrefetchedRange()))
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "objects": _OBJECTS,
        "late_ms": _LATE_S * 1e3,
        "max_tokens": _TOKENS,
        "ahead": ahead,
        "one_at_a_time": asyncio.run(measure(PrefetchedRange(pieces=1))),
    }
    text = json.dumps(found, indent=2)
    print(text)
    _RESULTS.write_text(text + "\n", encoding="utf-8")
    return int(ahead["idle_share"] > _MAX_IDLE)


if __name__ == "__main__":
    sys.exit(main())
