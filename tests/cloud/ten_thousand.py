"""Ten thousand objects behind a slow first one: prints the most undelivered results and the memory's growth."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import psutil

from mlserver_torch_stream.cloud.listing import Listed
from mlserver_torch_stream.cloud.pipeline import PipelineLimits, infer_rows
from mlserver_torch_stream.cloud.rows import Outcome, Row
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.source import Source
from mlserver_torch_stream.cloud.store import Store

WINDOW = 64
_OBJECTS = 10_000


async def _run() -> dict[str, float]:
    inferred = 0
    behind_the_head: list[int] = []

    async def slow_head(rows: Sequence[Row]) -> list[Outcome]:
        nonlocal inferred
        if rows[0].index == 0:
            while inferred < WINDOW - 8:  # all that may be let in is done, and the head is not
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.05)
            behind_the_head.append(inferred)
        await asyncio.sleep(0.002)
        inferred += len(rows)
        return [Outcome({"text": row.data.decode()}) for row in rows]

    store = Store.memory()
    keys = [f"{number:05}.txt" for number in range(_OBJECTS)]
    for key in keys:
        await store.put(key, key.encode() * 20)
    objects = sorted([Listed(info) async for info in store.list()], key=lambda listed: listed.info.key)
    metrics, count, rss = RunMetrics(), 0, {}
    async for result in infer_rows(
        Source(store, objects).rows(), slow_head, PipelineLimits(window=WINDOW, batch_rows=8), metrics
    ):
        assert result.row.key == keys[count] and result.outcome.response == {"text": keys[count] * 20}
        count += 1
        if count in (1_000, _OBJECTS):
            rss[count] = psutil.Process().memory_info().rss
    assert count == _OBJECTS
    return {
        "behind_the_head": behind_the_head[0],
        "peak_undelivered": metrics.peak_undelivered,
        "growth_mib": (rss[_OBJECTS] - rss[1_000]) / 2**20,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(asyncio.wait_for(_run(), 120))))
