"""The stages between rows and results: order, limits, waiting, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from mlserver_torch_stream.cloud.pipeline import PipelineLimits, infer_rows
from mlserver_torch_stream.cloud.rows import (
    CloudError,
    Failure,
    Infer,
    ObjectMissing,
    Outcome,
    Result,
    Row,
    RunRefused,
    StoreUnavailable,
)
from mlserver_torch_stream.cloud.run import CloudRun, stream
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from tests.cloud.ten_thousand import WINDOW
from tests.markdown import ROOT


async def _rows(count: int, *, fails: int | None = None, error: Exception | None = None) -> AsyncGenerator[Row, None]:
    for index in range(count):
        failure = Failure("invalid_row", "bad") if index == fails else None
        yield Row(index, "k", index + 1, f"k:{index}", body={"prompt": str(index)}, size=10, failure=failure)
    if error is not None:
        raise error


async def _echo(rows: Sequence[Row]) -> list[Outcome]:
    await asyncio.sleep(0)
    return [Outcome({"text": row.custom_id}, completion_tokens=2) for row in rows]


async def _collect(results: AsyncGenerator[Result, None]) -> list[Result]:
    return [result async for result in results]


def _run(rows: AsyncGenerator[Row, None], infer: Infer, **limits: Any) -> list[Result]:
    return asyncio.run(_collect(infer_rows(rows, infer, PipelineLimits(**limits))))


def test_results_keep_the_order_of_the_rows_whatever_the_batches_take() -> None:
    async def uneven(rows: Sequence[Row]) -> list[Outcome]:
        await asyncio.sleep(0.02 if rows[0].index % 3 == 0 else 0)
        return await _echo(rows)

    found = _run(_rows(50, fails=7), uneven, batch_rows=3, batches=5)
    assert [result.row.index for result in found] == list(range(50))
    assert found[7].outcome.failure == Failure("invalid_row", "bad")
    assert all(result.outcome.response == {"text": f"k:{i}"} for i, result in enumerate(found) if i != 7)


def test_rows_of_a_batch_that_failed_are_inferred_once_more_by_themselves_while_nothing_else_is() -> None:
    inside, asked = 0, Counter[int]()

    async def poisoned(rows: Sequence[Row]) -> list[Outcome]:
        nonlocal inside
        inside += 1
        asked.update(row.index for row in rows)
        again = asked[rows[0].index] == 2
        assert not again or (len(rows) == 1 and inside == 1)
        await asyncio.sleep(0.001)
        inside -= 1
        if any(row.index in (5, 12) for row in rows):
            raise ValueError("poison")
        return await _echo(rows)

    metrics = RunMetrics()
    limits = PipelineLimits(batch_rows=4, batches=3, window=10)
    found = asyncio.run(_collect(infer_rows(_rows(30), poisoned, limits, metrics)))
    assert [result.row.index for result in found] == list(range(30))
    assert [result.row.index for result in found if result.outcome.failure is not None] == [5, 12]
    assert found[5].outcome.failure == Failure("inference_failed", "ValueError: poison")
    assert max(asked.values()) == 2 and 2 <= sum(count == 2 for count in asked.values()) <= 8
    assert (metrics.num_inferences, metrics.failed_batches_counter) == (28, 4)


@pytest.mark.slow
def test_ten_thousand_objects_behind_a_slow_head_stay_within_the_window_and_the_memory() -> None:
    """Runs in a separate process, whose memory nothing else has used; the process asserts the order."""
    script = [sys.executable, "-m", "tests.cloud.ten_thousand"]
    told = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert WINDOW - 8 <= found["behind_the_head"] <= WINDOW
    assert found["peak_undelivered"] <= WINDOW
    assert found["growth_mib"] <= 10


def test_rows_that_are_large_are_bounded_by_their_bytes_and_one_that_is_larger_passes_alone() -> None:
    sizes = [10, 10, 10, 500, 10, 30, 30, 10]
    inside: set[int] = set()
    most = 0

    async def rows() -> AsyncGenerator[Row, None]:
        for index, size in enumerate(sizes):
            yield Row(index, "k", index + 1, "k", body={"prompt": "x"}, size=size)

    async def watch(rows: Sequence[Row]) -> list[Outcome]:
        nonlocal most
        inside.update(row.index for row in rows)
        most = max(most, sum(sizes[index] for index in inside))
        assert 3 not in inside or inside == {3}
        await asyncio.sleep(0.002)
        inside.difference_update(row.index for row in rows)
        return await _echo(rows)

    metrics = RunMetrics()
    limits = PipelineLimits(window=8, window_bytes=60, batch_rows=1, batches=8)
    found = asyncio.run(_collect(infer_rows(rows(), watch, limits, metrics)))
    assert [result.row.index for result in found] == list(range(8))
    assert metrics.peak_undelivered_bytes == 500 == most
    small = RunMetrics()
    asyncio.run(_collect(infer_rows(_rows(40), _echo, limits, small)))
    assert (small.peak_undelivered, small.peak_undelivered_bytes) == (6, 60)


@pytest.mark.parametrize("limits", [{"window": 2}, {"window_bytes": 25}])
def test_a_batch_that_the_window_lets_grow_no_more_does_not_wait_for_more(limits: dict[str, int]) -> None:
    async def run() -> list[Result]:
        return await _collect(infer_rows(_rows(7), _echo, PipelineLimits(batch_rows=4, max_wait=3600, **limits)))

    assert len(asyncio.run(asyncio.wait_for(run(), 20))) == 7


def test_a_lone_row_does_not_wait_for_others_longer_than_it_may() -> None:
    more = asyncio.Event()

    async def rows() -> AsyncGenerator[Row, None]:
        yield Row(0, "k", 1, "k", body={"prompt": "x"})
        await more.wait()
        yield Row(1, "k", 2, "k", body={"prompt": "x"})

    async def run() -> list[int]:
        found = []
        async for result in infer_rows(rows(), _echo, PipelineLimits(batch_rows=100, max_wait=0.01)):
            found.append(result.row.index)
            more.set()  # the source goes on only once the first result is here
        return found

    assert asyncio.run(asyncio.wait_for(run(), 20)) == [0, 1]


def test_batches_side_by_side_are_bounded() -> None:
    """The first batches end only when three are running."""
    running, most, met = 0, 0, asyncio.Event()

    async def watch(rows: Sequence[Row]) -> list[Outcome]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            met.set()
        await asyncio.wait_for(met.wait(), 20)
        await asyncio.sleep(0.002)
        running -= 1
        return await _echo(rows)

    _run(_rows(60), watch, batch_rows=2, batches=3, window=60)
    assert most == 3


def test_an_exception_fails_its_batch_alone_and_a_wrong_number_of_outcomes_too() -> None:
    async def breaks(rows: Sequence[Row]) -> list[Outcome]:
        if rows[0].index in (2, 3):
            raise ValueError("it burned")
        return (await _echo(rows))[: 0 if rows[0].index in (4, 5) else None]

    found = _run(_rows(8), breaks, batch_rows=2)
    failures = {r.row.index: r.outcome.failure for r in found if r.outcome.failure is not None}
    assert sorted(failures) == [2, 3, 4, 5]
    assert failures[2] == Failure("inference_failed", "ValueError: it burned")
    assert "the model returned 0 outcomes for 1 rows" in failures[4].message


def test_nothing_runs_beside_a_row_that_runs_alone() -> None:
    """The rows of the batch that fails are inferred one by one, the last of them before the batches that wait, too."""
    running: set[int] = set()
    beside: dict[int, set[int]] = {}

    async def breaks(rows: Sequence[Row]) -> list[Outcome]:
        index = rows[0].index
        if len(rows) == 1:
            beside[index] = set(running)
        for each in running & beside.keys():
            beside[each].add(index)
        running.add(index)
        await asyncio.sleep(0.001)
        running.remove(index)
        if len(rows) == 2 and index == 2:
            raise ValueError("it burned")
        return await _echo(rows)

    _run(_rows(24), breaks, batch_rows=2, batches=3, window=24)
    assert beside == {2: set(), 3: set()}


@pytest.mark.parametrize("where", ["source", "infer"])
def test_what_ends_a_run_is_raised_behind_the_results_before_it(where: str) -> None:
    async def infer(rows: Sequence[Row]) -> list[Outcome]:
        if where == "infer" and rows[0].index >= 6:
            raise StoreUnavailable("the server is gone")
        return await _echo(rows)

    async def run() -> list[int]:
        found = []
        rows = _rows(6 if where == "source" else 40, error=ObjectMissing("the source is gone"))
        with pytest.raises(CloudError, match="is gone"):
            async for result in infer_rows(rows, infer, PipelineLimits(batch_rows=2, batches=1)):
                found.append(result.row.index)
        return found

    assert asyncio.run(run()) == list(range(6))


def test_leaving_early_ends_every_task() -> None:
    begun, cancelled = [], []

    async def hang(rows: Sequence[Row]) -> list[Outcome]:
        if rows[0].index == 0:
            return await _echo(rows)
        begun.append(rows[0].index)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(rows[0].index)
            raise
        return []

    async def run() -> None:
        results = infer_rows(_rows(9), hang, PipelineLimits(batch_rows=1, batches=3))
        async with contextlib.aclosing(results):
            await anext(results)
            for _ in range(1000):
                if len(begun) == 3:
                    break
                await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    assert sorted(cancelled) == [1, 2, 3]


def test_figures_are_named_as_in_beam() -> None:
    metrics = RunMetrics()
    asyncio.run(_collect(infer_rows(_rows(10, fails=0), _echo, PipelineLimits(batch_rows=3), metrics)))
    figures = metrics.as_dict()
    assert (figures["rows"], figures["failed"], figures["num_inferences"]) == (10, 1, 9)
    assert figures["inference_request_batch_size"] == {"count": 3, "sum": 9, "min": 3, "max": 3, "mean": 3}
    assert figures["inference_request_batch_byte_size"]["sum"] == 90
    assert figures["inference_batch_latency_micro_secs"]["count"] == 3
    assert figures["failed_batches_counter"] == 0 and figures["completion_tokens"] == 18
    assert 0 <= figures["busy_share"] <= 1


def test_the_api_streams_results_of_any_place_without_an_output(tmp_path: Any) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    (tmp_path / "b.txt").write_text("z")
    found = asyncio.run(_collect(stream(CloudRun(str(tmp_path)), _echo)))
    assert [result.row.custom_id for result in found] == ["a.jsonl:1", "a.jsonl:2", "b.txt"]
    with pytest.raises(RunRefused, match="--output"):
        asyncio.run(_collect(stream(CloudRun(str(tmp_path), output="/tmp/x"), _echo)))
