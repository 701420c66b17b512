"""Parts, manifests and resuming: one output row for each input row, in order, even after a worker has died."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.cloud.pipeline import PipelineLimits
from mlserver_torch_stream.cloud.rows import (
    AccessDenied,
    CloudError,
    ObjectExists,
    Outcome,
    Result,
    Row,
    RunRefused,
    StorageFull,
    TooManyFailures,
)
from mlserver_torch_stream.cloud.run import plan
from mlserver_torch_stream.cloud.sink import PartSink, create
from mlserver_torch_stream.cloud.store import Store
from tests.cloud.jobs import QUICK, RUN, Model, failed, job, joined, run


def test_one_output_row_for_each_input_row_in_order_and_the_failed_ones_apart(folder: Path) -> None:
    model = Model()
    assert run(job(folder), model) == 3
    records = [json.loads(line) for line in joined(folder).splitlines()]
    assert [record["index"] for record in records] == list(range(37))
    assert [record["custom_id"] for record in records[:3]] == ["r0", "r1", "r2"]
    assert records[9]["error"]["code"] == "invalid_row" and records[9]["custom_id"] == "a.jsonl:10"
    assert records[36]["response"]["body"] == {"text": "6 txet"} and records[36]["line"] is None
    assert [json.loads(line)["index"] for line in failed(folder).splitlines()] == [5, 9, 20]
    assert json.loads((folder / "out" / "done.json").read_bytes())["failed"] == 3
    assert len(model.asked) == 36


@pytest.mark.parametrize("lasts", [0, 3, 8, 13, 22, 35])
def test_a_run_that_died_goes_on_where_its_parts_end_and_the_output_is_the_same(folder: Path, lasts: int) -> None:
    run(job(folder, output=str(folder / "whole")), Model())
    with pytest.raises(CloudError, match="died"):
        run(job(folder), Model(lasts))
    delivered = [json.loads(line)["custom_id"] for line in joined(folder).splitlines()]
    assert len(delivered) % 4 == 0
    second = Model()
    assert run(job(folder), second) == 3
    assert joined(folder) == joined(folder, "whole") and failed(folder) == failed(folder, "whole")
    assert not set(second.asked) & set(delivered)


def test_a_run_that_is_done_infers_nothing_and_still_says_how_many_failed(folder: Path) -> None:
    run(job(folder), Model())
    again = Model()
    assert run(job(folder), again) == 3 and again.asked == []


def test_a_run_that_died_between_a_part_and_its_errors_mends_them(folder: Path) -> None:
    with pytest.raises(CloudError):
        run(job(folder, limits=PipelineLimits(batch_rows=3, window=9, batches=1)), Model(9))
    assert sorted(path.name for path in (folder / "out").glob("errors-*")) == ["errors-000001.jsonl"]
    (folder / "out" / "errors-000001.jsonl").unlink()
    assert run(job(folder), Model()) == 3
    assert [json.loads(line)["index"] for line in failed(folder).splitlines()] == [5, 9, 20]


def test_new_objects_do_not_shift_a_run_that_goes_on(folder: Path) -> None:
    run(job(folder, output=str(folder / "whole")), Model())
    with pytest.raises(CloudError):
        run(job(folder), Model(20))
    (folder / "in" / "0.txt").write_text("new")
    run(job(folder), Model())
    assert joined(folder) == joined(folder, "whole")


def test_objects_that_changed_or_went_since_are_error_rows_and_no_row_is_lost_or_doubled(folder: Path) -> None:
    with pytest.raises(CloudError):
        run(job(folder), Model(20))
    kept = joined(folder)
    (folder / "in" / "deep" / "b.jsonl").write_text('{"prompt": "another"}\n')
    (folder / "in" / "z3.txt").unlink()
    run(job(folder), Model())
    assert joined(folder).startswith(kept)
    records = [json.loads(line) for line in joined(folder).splitlines()]
    assert [record["index"] for record in records] == list(range(len(records)))
    ends = {record["key"]: record["error"] and record["error"]["code"] for record in records}
    assert ends["deep/b.jsonl"] == "changed" and ends["z3.txt"] == "missing" and ends["z6.txt"] is None
    assert sum(record["key"].startswith("z") for record in records) == 7


def test_workers_share_the_parts_and_never_a_row(folder: Path) -> None:
    run(job(folder, output=str(folder / "whole")), Model())
    models = [Model(), Model(), Model()]
    for lane, model in enumerate(models, start=1):
        run(job(folder, lane=lane, lanes=3), model)
    assert joined(folder) == joined(folder, "whole")
    asked = [custom_id for model in models for custom_id in model.asked]
    assert len(asked) == len(set(asked)) == 36 and all(model.asked for model in models)


def test_one_worker_finishes_what_several_left_behind(folder: Path) -> None:
    run(job(folder, output=str(folder / "whole")), Model())
    first = Model()
    run(job(folder, lane=2, lanes=3), first)
    second = Model()
    run(job(folder), second)
    assert joined(folder) == joined(folder, "whole") and not set(first.asked) & set(second.asked)


def test_with_several_workers_a_lost_jsonl_object_ends_the_run_since_the_others_count_on_its_rows(folder: Path) -> None:
    run(job(folder, lane=1, lanes=2), Model())
    (folder / "in" / "deep" / "b.jsonl").unlink()
    with pytest.raises(CloudError, match=r"b\.jsonl"):
        run(job(folder, lane=2, lanes=2), Model())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"max_tokens": 9}}, "model.max_tokens was not given and is 9 now"),
        ({"part_rows": 5}, "--part-rows was 4 and is 5 now"),
        ({"glob": "*.txt"}, "--glob was not given and is *.txt now"),
    ],
)
def test_an_output_of_another_run_is_refused_and_what_differs_is_named(
    folder: Path, changes: dict[str, Any], named: str
) -> None:
    run(job(folder), Model())
    with pytest.raises(RunRefused, match="belongs to another run") as caught:
        run(job(folder, **changes), Model())
    assert named in str(caught.value)


def test_parts_that_nobody_claims_are_not_touched(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "part-000000.jsonl").write_text("mine\n")
    with pytest.raises(RunRefused, match="has parts but no manifest"):
        run(job(folder), Model())
    assert (folder / "out" / "part-000000.jsonl").read_text() == "mine\n"


def test_a_part_that_was_tampered_with_is_named(folder: Path) -> None:
    with pytest.raises(CloudError):
        run(job(folder), Model(20))
    last = sorted((folder / "out").glob("part-*"))[-1]
    last.write_bytes(last.read_bytes()[:-9])
    with pytest.raises(RunRefused, match=last.name):
        run(job(folder), Model())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"part_rows": 0}, "--part-rows"),
        ({"lane": 3, "lanes": 2}, "--worker"),
        ({"output": None, "lanes": 2}, "--worker"),
        ({"glob": "*", "manifest": "m"}, "--glob"),
        ({"output": "https://host/out"}, "--output"),
    ],
)
def test_options_that_contradict_each_other_are_named(folder: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RunRefused, match=named):
        job(folder, **changes)


def test_an_output_within_the_input_is_refused(folder: Path) -> None:
    with pytest.raises(RunRefused, match="is inside --input"):
        job(folder, output=str(folder / "in" / "out"))


def test_a_glob_and_a_manifest_choose_and_a_manifests_order_is_kept(folder: Path) -> None:
    run(job(folder, glob="z*.txt"), Model())
    assert [json.loads(line)["key"] for line in joined(folder).splitlines()] == [f"z{i}.txt" for i in range(7)]
    (folder / "list").write_text('z4.txt\n{"key": "z1.txt"}\ngone.txt\n')
    run(job(folder, manifest=str(folder / "list"), output=str(folder / "listed")), Model())
    records = [json.loads(line) for line in joined(folder, "listed").splitlines()]
    assert [record["key"] for record in records] == ["z4.txt", "z1.txt", "gone.txt"]
    assert records[2]["error"]["code"] == "missing"


@pytest.mark.parametrize(
    ("manifest", "named"),
    [("a\na\n", "line 2 repeats a, which is already on line 1"), ("{}\n", "line 1 is neither"), ("", "nothing found")],
)
def test_manifests_that_mean_nothing_are_refused(folder: Path, manifest: str, named: str) -> None:
    (folder / "list").write_text(manifest)
    with pytest.raises(RunRefused, match=named):
        run(job(folder, manifest=str(folder / "list")), Model())


def test_too_many_failures_end_a_run_behind_whole_parts(folder: Path) -> None:
    with pytest.raises(TooManyFailures, match=r"2 rows failed, more than the 1 allowed; the last: a\.jsonl:10"):
        run(job(folder, max_failures=1), Model())
    assert len(joined(folder).splitlines()) == 8
    assert run(job(folder), Model()) == 3


def test_planning_alone_leaves_no_trace(folder: Path) -> None:
    planned = asyncio.run(plan(job(folder)))
    assert len(planned.objects) == 9 and not (folder / "out").exists()


def test_a_conditional_create_whose_answer_was_lost_is_not_mistaken_for_anothers() -> None:
    async def act() -> None:
        store = Store.memory()
        await create(store, "part", b"same", QUICK)
        await create(store, "part", b"same", QUICK)
        with pytest.raises(ObjectExists, match="left unchanged"):
            await create(store, "part", b"other", QUICK)
        assert await store.get("part") == b"same"

    asyncio.run(act())


def test_a_place_that_cannot_be_written_is_a_clear_error(folder: Path) -> None:
    class FullStore(Store):
        async def create(self, key: str, data: bytes) -> None:
            raise StorageFull(f"{key}: no space left to write")

    async def act() -> None:
        sink = PartSink(FullStore(Store.memory()._backend, "memory://"), 1, RUN, QUICK)
        await sink.write(Result(Row(0, "k", None, "k"), Outcome({})))

    with pytest.raises(StorageFull, match="part-000000"):
        asyncio.run(act())
    assert not StorageFull("x").retriable and not AccessDenied("x").retriable
