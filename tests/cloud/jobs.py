"""Jobs over a folder, and a model for them whose failures are defined beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.pipeline import PipelineLimits
from mlserver_torch_stream.cloud.rows import Failure, Outcome, Row, RunIdentity, StoreUnavailable
from mlserver_torch_stream.cloud.run import CloudRun, plan, write
from mlserver_torch_stream.cloud.run_metrics import RunMetrics

RUN = RunIdentity("run", 1_700_000_000)
QUICK = Retry(tries=3, first=0.001, longest=0.01)


class Model:
    """Reverses prompts, fails those that begin with ``fails``, dies after ``lasts`` rows, and records its prompts."""

    def __init__(self, lasts: int | None = None, fails: str = "fail") -> None:
        self.asked: list[str] = []
        self._lasts = lasts
        self._fails = fails

    async def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        await asyncio.sleep(0.001)
        if self._lasts is not None and len(self.asked) + len(rows) > self._lasts:
            raise StoreUnavailable("the model died")
        self.asked += [row.custom_id for row in rows]
        return [self._outcome(row) for row in rows]

    def _outcome(self, row: Row) -> Outcome:
        text = row.data.decode() if row.body is None else row.body["prompt"]
        if text.startswith(self._fails):
            return Outcome(failure=Failure("inference_failed", text))
        return Outcome({"text": text[::-1]})


def job(folder: Path, **changes: Any) -> CloudRun:
    settings = {
        "output": str(folder / "out"),
        "part_rows": 4,
        "retry": QUICK,
        "limits": PipelineLimits(batch_rows=3, window=9),
        "created": RUN.created,
    }
    return CloudRun(str(folder / "in"), **{**settings, **changes})


def run(
    job: CloudRun, model: Model, metrics: RunMetrics | None = None, report: Callable[[str], None] = lambda message: None
) -> int:
    """Runs the job, and returns the number of rows that failed."""

    async def act() -> int:
        return await write(await plan(job), model, metrics or RunMetrics(), report)

    return asyncio.run(act())


def joined(folder: Path, out: str = "out") -> bytes:
    return b"".join(path.read_bytes() for path in sorted((folder / out).glob("part-*.jsonl")))


def failed(folder: Path, out: str = "out") -> bytes:
    return b"".join(path.read_bytes() for path in sorted((folder / out).glob("errors-*.jsonl")))
