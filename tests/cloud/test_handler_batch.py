"""One batch of ``cloud run --handler``: what becomes of its requests where the run ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

from mlserver_torch_stream.cli.infer_handler import HandlerInfer
from mlserver_torch_stream.cli.object_row import ObjectRequest
from mlserver_torch_stream.cloud.rows import Row
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from tests.cloud.handlers import write

_ENDLESS = """
import itertools, time
from ts.handler_utils.utils import send_intermediate_predict_response as send

def handle(data, context):
    for _ in itertools.count() if data else ():
        send(["x"] * len(data), context.request_ids, "ok", 200, context)
        time.sleep(0.01)
"""


def test_requests_of_a_batch_that_is_cancelled_are_closed(tmp_path: Path) -> None:
    """The end of the run would wait for a worker whose pieces nobody reads."""
    asyncio.run(_cancelled(str(write(tmp_path / "h", _ENDLESS))))


async def _cancelled(handler: str) -> None:
    infer = await HandlerInfer.load(handler, {"ts": "shim"}, 2, ObjectRequest(), RunMetrics())
    try:
        batch = asyncio.create_task(infer([Row(number, str(number), None, "") for number in range(3)]))
        for _ in range(1000):
            await asyncio.sleep(0.01)
            jobs = list(infer.built.engine.jobs.values())
            if any(job.stream.queued_s is not None for job in jobs):
                break
        batch.cancel()
        await asyncio.wait({batch})
        assert len(jobs) == 3 and all(job.stream.over for job in jobs)
    finally:
        await infer.aclose()
