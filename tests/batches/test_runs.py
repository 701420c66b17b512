"""Batches over a folder and a trivial model: what a killed run leaves, expiry, and models that unload and load."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mlserver_torch_stream.cloud.batches.batch_files import MAX_ITEMS
from mlserver_torch_stream.cloud.batches.batch_record import WINDOW_S, BatchRecord, IdMaker
from mlserver_torch_stream.cloud.batches.batch_run import PART_ITEMS
from mlserver_torch_stream.cloud.batches.batch_runner import MAX_UNFINISHED
from mlserver_torch_stream.cloud.batches.batch_store import content_key, translating_store_errors
from mlserver_torch_stream.errors import GenerationFailed, NotServing, QueueFull
from tests.batches.api import row
from tests.batches.bench import CHAT, Bench, Echo


def test_what_a_run_delivered_before_it_ended_is_not_answered_again(tmp_path: Path) -> None:
    total, hold = 5 * PART_ITEMS + 3, 3 * PART_ITEMS + 5

    async def run() -> None:
        models = Echo("tiny")
        held = asyncio.Event()

        async def stick(said: str) -> None:
            if said == f"row {hold}":
                await held.wait()

        models.before = stick
        async with Bench(tmp_path, models) as first:
            batch_id = await first.create([row(n) for n in range(total)])
            half = await first.until(batch_id, lambda record: record.completed == 3 * PART_ITEMS)
            assert half.status == "in_progress" and half.total == total
        again = Echo("tiny")
        async with Bench(tmp_path, again) as second:
            ended = await second.ended(batch_id)
            lines = await second.lines(ended.output_file_id)
            await second.cleaned()
        assert ended.status == "completed" and (ended.completed, ended.failed) == (total, 0)
        assert [line["custom_id"] for line in lines] == [f"row-{n}" for n in range(total)]
        assert again.answered == Counter(f"row {n}" for n in range(3 * PART_ITEMS, total))

    asyncio.run(run())


def test_a_run_that_ended_while_it_wrote_its_files_writes_the_same_files_again(tmp_path: Path) -> None:
    async def run() -> None:
        models = Echo("tiny")
        async with Bench(tmp_path, models) as first:
            batch_id = await first.create([row(0), row(1, model="absent"), row(2)])
            ended = await first.ended(batch_id)
            whole = await first.lines(ended.output_file_id)
            await first.cleaned()
        parts = tmp_path / "runs" / batch_id
        parts.mkdir(exist_ok=True)
        ours = [json.dumps({**line, "index": n}) for n, line in enumerate(whole)]
        (parts / "part-000000.jsonl").write_text("\n".join(ours) + "\n")
        files = tmp_path / "contents" / content_key(str(ended.output_file_id))
        files.write_text("half of it")
        await first.places.batches.change(batch_id, lambda batch: replace(batch, status="finalizing"))
        async with Bench(tmp_path, models) as second:
            again = await second.ended(batch_id)
            assert again.output_file_id == ended.output_file_id
            assert await second.lines(again.output_file_id) == whole

    asyncio.run(run())


def test_rows_that_the_completion_window_leaves_are_in_the_error_file_as_expired(tmp_path: Path) -> None:
    async def run() -> None:
        models = Echo("tiny")

        async def stick(said: str) -> None:
            if said != "row 0":
                await asyncio.Event().wait()

        models.before = stick
        async with Bench(tmp_path, models) as first:
            batch_id = await first.create([row(n) for n in range(3)])
            await first.until(batch_id, lambda record: models.answered["row 0"] == 1)
        past = int(time.time()) - WINDOW_S - 1
        await first.places.batches.change(batch_id, lambda batch: replace(batch, created_at=past))
        async with Bench(tmp_path, models) as second:
            ended = await second.ended(batch_id)
            failed = await second.lines(ended.error_file_id)
        assert ended.status == "expired" and ended.failed == 3
        assert {line["error"]["code"] for line in failed} == {"batch_expired"}

    asyncio.run(run())


def test_a_row_waits_for_a_model_that_was_there_and_is_loaded_again(tmp_path: Path) -> None:
    async def run() -> None:
        models = Echo("tiny", "late")
        gone = asyncio.Event()

        async def leave(said: str) -> None:
            if not gone.is_set():
                models.names.discard("late")
                gone.set()

        models.before = leave
        async with Bench(tmp_path, models) as bench:
            batch_id = await bench.create([row(0), row(1, model="late"), row(2, model="never there")])
            await asyncio.wait_for(gone.wait(), 30)
            await asyncio.sleep(0.3)
            assert not (await bench.places.batches.get(batch_id)).ended
            models.names.add("late")
            ended = await bench.ended(batch_id)
            (lost,) = await bench.lines(ended.error_file_id)
        assert (ended.completed, ended.failed) == (2, 1)
        assert lost["response"]["body"]["error"]["code"] == "model_not_found"

    asyncio.run(run())


def test_a_batch_is_validated_when_the_models_of_a_starting_server_are_there(tmp_path: Path) -> None:
    async def run() -> None:
        models = Echo("tiny")
        models.loaded.clear()
        async with Bench(tmp_path, models) as bench:
            batch_id = await bench.create([row(0, model="late"), row(1)])
            await asyncio.sleep(0.2)
            assert (await bench.places.batches.get(batch_id)).status == "validating"
            models.names.add("late")
            models.loaded.set()
            ended = await bench.ended(batch_id)
        assert (ended.completed, ended.failed) == (2, 0)

    asyncio.run(run())


@pytest.mark.parametrize("error", [NotServing("it drains"), QueueFull("too many")])
def test_a_row_that_a_model_cannot_take_now_is_tried_again(tmp_path: Path, error: Exception) -> None:
    async def run() -> None:
        models = Echo("tiny")
        failures = [error, error]

        async def fail(said: str) -> None:
            if failures:
                raise failures.pop()

        models.before = fail
        async with Bench(tmp_path, models) as bench:
            ended = await bench.ended(await bench.create([row(0)]))
        assert (ended.completed, ended.failed) == (1, 0)

    asyncio.run(run())


def test_a_row_at_which_the_model_breaks_fails_alone_with_its_status(tmp_path: Path) -> None:
    async def run() -> None:
        models = Echo("tiny")

        async def fail(said: str) -> None:
            if said == "row 1":
                raise GenerationFailed("nan")
            if said == "row 2":
                raise ZeroDivisionError("a defect")

        models.before = fail
        async with Bench(tmp_path, models) as bench:
            ended = await bench.ended(await bench.create([row(n) for n in range(4)]))
            failed = await bench.lines(ended.error_file_id)
        assert (ended.completed, ended.failed) == (2, 2)
        assert failed[0]["response"]["status_code"] == 500
        assert failed[1]["error"]["code"] == "inference_failed"

    asyncio.run(run())


def test_a_store_that_fails_is_503_and_one_that_is_not_there_any_more_too(tmp_path: Path) -> None:
    async def run() -> None:
        async with Bench(tmp_path / "store", Echo("tiny")) as bench:
            shutil.rmtree(tmp_path / "store" / "contents")
            (tmp_path / "store" / "contents").write_text("no folder")
            upload = bench.places.files.begin()
            with pytest.raises(NotServing, match="does not answer"), translating_store_errors():
                await upload.write(b"{}\n")
                await upload.end("rows.jsonl")

    asyncio.run(run())


def test_of_two_processes_on_one_store_one_runs_the_batch(tmp_path: Path) -> None:
    async def run() -> None:
        models, others = Echo("tiny"), Echo("tiny")
        held = asyncio.Event()

        async def stick(said: str) -> None:
            if said == "row 5":
                await held.wait()

        models.before = stick
        async with Bench(tmp_path, models) as first:
            batch_id = await first.create([row(n) for n in range(20)])
            await first.until(batch_id, lambda record: models.answered["row 4"] == 1)
            async with Bench(tmp_path, others) as second:
                await asyncio.sleep(0.3)
                held.set()
                ended = await second.ended(batch_id)
                assert (await first.places.batches.get(batch_id)) == ended
        assert ended.completed == 20 and models.answered.total() == 20 and not others.answered

    asyncio.run(run())


def test_a_cancellation_in_another_process_reaches_the_run_at_its_next_part(tmp_path: Path) -> None:
    async def run() -> None:
        models = Echo("tiny")
        slots = asyncio.Semaphore(2)

        async def in_turn(said: str) -> None:
            async with slots:
                await asyncio.sleep(0.01)

        models.before = in_turn
        async with Bench(tmp_path, models) as first:
            batch_id = await first.create([row(n) for n in range(4000)])
            await first.until(batch_id, lambda record: record.completed >= PART_ITEMS)
            async with Bench(tmp_path, Echo("tiny")) as second:
                assert (await second.runner.cancel(batch_id)).status == "cancelling"
                ended = await second.ended(batch_id)
        assert ended.status == "cancelled" and PART_ITEMS <= ended.completed < 4000

    asyncio.run(run())


def test_a_batch_that_was_cancelled_while_no_process_ran_it_ends_cancelled(tmp_path: Path) -> None:
    async def run() -> None:
        async with Bench(tmp_path, Echo("tiny")) as first:
            other = await first.ended(await first.create([row(0)]))
        record = BatchRecord(IdMaker().make("batch_"), other.input_file_id, CHAT, int(time.time()))
        await first.places.batches.put(record.id, record.moved("cancelling").dumps())
        async with Bench(tmp_path, Echo("tiny")) as second:
            ended = await second.ended(record.id)
            lines = await second.lines(ended.error_file_id)
        assert ended.status == "cancelled" and ended.output_file_id is None
        assert [line["error"]["code"] for line in lines] == ["batch_cancelled"]

    asyncio.run(run())


@pytest.mark.parametrize("rows", [3, 1000])
def test_a_batch_that_is_cancelled_while_it_waits_for_its_turn_ends_with_an_error_for_each_row(
    tmp_path: Path, rows: int
) -> None:
    """Four other batches are running, and go on."""

    async def run() -> None:
        models = Echo("tiny")
        models.before = lambda said: asyncio.Event().wait()  # type: ignore[assignment,return-value]
        async with Bench(tmp_path, models) as bench:
            others = [await bench.create([row(0)]) for _ in range(4)]
            for other in others:
                await bench.until(other, lambda record: record.total > 0)
            batch_id = await bench.create([row(n) for n in range(rows)])
            assert (await bench.runner.cancel(batch_id)).status == "cancelling"
            ended = await bench.ended(batch_id)
            lines = await bench.lines(ended.error_file_id)
            assert not any([(await bench.places.batches.get(other)).ended for other in others])
        assert (ended.status, ended.output_file_id, ended.total, ended.failed) == (
            "cancelled",
            None,
            rows,
            rows,
        )
        assert [line["custom_id"] for line in lines] == [f"row-{n}" for n in range(rows)]
        assert {line["error"]["code"] for line in lines} == {"batch_cancelled"}

    asyncio.run(run())


def test_the_rows_of_a_stopped_batch_take_no_part_each(tmp_path: Path) -> None:
    """Flushing a part to the disk for every 16 failed rows would take most of a minute."""

    async def run() -> None:
        models = Echo("tiny")
        held = asyncio.Event()

        async def before(said: str) -> None:
            if said not in {f"row {n}" for n in range(20)}:
                await held.wait()

        models.before = before
        async with Bench(tmp_path, models) as bench:
            batch_id = await bench.create([row(n) for n in range(3000)])
            await bench.until(batch_id, lambda record: record.completed == PART_ITEMS)
            parts = bench.places.open_run(batch_id)
            counts: list[int] = []
            await bench.runner.cancel(batch_id)
            while not (ended := await bench.places.batches.get(batch_id)).ended:
                counts.append(len([info async for info in parts.list() if info.key.startswith("part-")]))
            answered, failed = await bench.lines(ended.output_file_id), await bench.lines(ended.error_file_id)
        assert [line["custom_id"] for line in answered] == [f"row-{n}" for n in range(20)], "what was answered stays"
        assert [line["custom_id"] for line in failed] == [f"row-{n}" for n in range(20, 3000)]
        assert max(counts, default=0) < 30, "of the rows that had been read"
        assert (ended.completed, ended.failed) == (20, 2980)

    asyncio.run(run())


def test_too_many_unfinished_batches_are_refused(tmp_path: Path) -> None:
    async def run() -> None:
        models = Echo("tiny")
        models.before = lambda said: asyncio.Event().wait()  # type: ignore[assignment,return-value]
        async with Bench(tmp_path, models) as bench:
            made = [await bench.create([row(0)]) for _ in range(MAX_UNFINISHED)]
            with pytest.raises(QueueFull, match="100"):
                await bench.create([row(0)])
            await bench.runner.cancel(made[0])
            await bench.ended(made[0])
            input_file = (await bench.places.batches.get(made[0])).input_file_id
            assert await bench.runner.reader(input_file) is None

    asyncio.run(run())


def test_a_file_of_more_rows_than_openai_allows_fails(tmp_path: Path) -> None:
    async def run() -> None:
        rows = [f'{{"custom_id": "{n}", "body": {{"prompt": ""}}}}' for n in range(MAX_ITEMS + 1)]
        async with Bench(tmp_path, Echo("tiny")) as bench:
            ended = await bench.ended(await bench.create(rows))
        assert ended.status == "failed" and ended.problems[0].code == "too_many_rows"

    asyncio.run(run())


def test_a_record_that_cannot_be_read_keeps_no_other_batch_from_going_on(tmp_path: Path) -> None:
    async def run() -> None:
        models = Echo("tiny")
        async with Bench(tmp_path, models) as first:
            broken, whole = await first.create([row(0)]), await first.create([row(1)])
            await first.ended(broken)
            await first.ended(whole)
        (tmp_path / "batches" / f"{broken}.json").write_text("{}")
        await first.places.batches.change(whole, lambda batch: replace(batch, status="validating"))
        async with Bench(tmp_path, models) as second:
            assert (await second.ended(whole)).completed == 1

    asyncio.run(run())


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b"nonsense", b"\xff"])
def test_a_damaged_record_hides_no_other_file_or_batch(tmp_path: Path, damage: bytes) -> None:
    """A file system may lose a record's content when its machine fails."""

    async def run() -> None:
        async with Bench(tmp_path, Echo("tiny")) as bench:
            damaged, whole = await bench.create([row(1)]), await bench.create([row(2)])
            file_id = (await bench.ended(damaged)).input_file_id
            kept = (await bench.ended(whole)).input_file_id
            (tmp_path / "batches" / f"{damaged}.json").write_bytes(damage)
            (tmp_path / "files" / f"{file_id}.json").write_bytes(damage)
            files, batches = bench.places.files, bench.places.batches
            page = await files.page(100, purpose="batch")
            assert [each["id"] for each in page["data"]] == [kept]
            assert [each["id"] for each in (await batches.page(100))["data"]] == [whole]
            for read in (files.get(file_id), batches.get(damaged)):
                with pytest.raises(NotServing), translating_store_errors():
                    await read

    asyncio.run(run())


def test_a_batch_outlives_a_store_that_cannot_take_its_run_for_a_while(tmp_path: Path) -> None:
    """The disk may be full or unmounted for a while, without any fault of the batch."""

    async def run() -> None:
        models = Echo("tiny")
        async with Bench(tmp_path, models) as bench:
            (tmp_path / "runs").write_text("in the way of the folder")
            batch_id = await bench.create([row(1)])
            await bench.until(batch_id, lambda record: record.total > 0)
            await asyncio.sleep(0.3)
            assert not (await bench.places.batches.get(batch_id)).ended
            (tmp_path / "runs").unlink()
            assert (await bench.ended(batch_id)).completed == 1

    asyncio.run(run())
