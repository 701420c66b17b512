"""Parts, manifests and resuming: one output row for each input row, in order, whoever died in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.cloud.faults import CloudError, Denied, Exists, Full, Refused, TooManyFailures, Unavailable
from mlserver_torch_stream.cloud.job import Job, plan, write
from mlserver_torch_stream.cloud.meter import Meter
from mlserver_torch_stream.cloud.pipeline import Limits
from mlserver_torch_stream.cloud.retry import Retry
from mlserver_torch_stream.cloud.rows import Failure, Outcome, Result, Row
from mlserver_torch_stream.cloud.sink import PartSink, create
from mlserver_torch_stream.cloud.store import Store

_QUICK = Retry(tries=3, first=0.001, longest=0.01)


class Model:
    """Reverses prompts, fails those that say so, and dies after ``lasts`` rows; keeps what it was asked."""

    def __init__(self, lasts: int | None = None) -> None:
        self.asked: list[str] = []
        self._lasts = lasts

    async def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        await asyncio.sleep(0.001)
        if self._lasts is not None and len(self.asked) + len(rows) > self._lasts:
            raise Unavailable("the model died")
        self.asked += [row.custom_id for row in rows]
        return [self._outcome(row) for row in rows]

    def _outcome(self, row: Row) -> Outcome:
        text = row.data.decode() if row.body is None else row.body["prompt"]
        if text.startswith("fail"):
            return Outcome(failure=Failure("inference_failed", text))
        return Outcome({"text": text[::-1]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """37 rows in JSONL objects and whole texts; rows 5 and 20 fail, row 9 is malformed."""
    (tmp_path / "in" / "deep").mkdir(parents=True)
    lines = [
        json.dumps({"custom_id": f"r{i}", "prompt": f"{'fail' if i in (5, 20) else 'row'} {i}"}) for i in range(30)
    ]
    lines[9] = "{broken"
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines[:13]) + "\n\n")
    (tmp_path / "in" / "deep" / "b.jsonl").write_text("\n".join(lines[13:]))
    for i in range(7):
        (tmp_path / "in" / f"z{i}.txt").write_text(f"text {i}")
    return tmp_path


def _job(folder: Path, **changes: Any) -> Job:
    settings = {
        "output": str(folder / "out"),
        "part_rows": 4,
        "retry": _QUICK,
        "limits": Limits(batch_rows=3, window=9),
    }
    return Job(str(folder / "in"), **{**settings, **changes})


def _run(job: Job, model: Model) -> int:
    async def run() -> int:
        return await write(await plan(job), model, Meter())

    return asyncio.run(run())


def _joined(folder: Path, out: str = "out") -> bytes:
    return b"".join(path.read_bytes() for path in sorted((folder / out).glob("part-*.jsonl")))


def _failed(folder: Path, out: str = "out") -> bytes:
    return b"".join(path.read_bytes() for path in sorted((folder / out).glob("errors-*.jsonl")))


def test_one_output_row_for_each_input_row_in_order_and_the_failed_ones_apart(folder: Path) -> None:
    model = Model()
    assert _run(_job(folder), model) == 3
    records = [json.loads(line) for line in _joined(folder).splitlines()]
    assert [record["index"] for record in records] == list(range(37))
    assert [record["custom_id"] for record in records[:3]] == ["r0", "r1", "r2"]
    assert records[9]["error"]["code"] == "invalid_row" and records[9]["custom_id"] == "a.jsonl:10"
    assert records[36]["response"] == {"text": "6 txet"} and records[36]["line"] is None
    failed = [json.loads(line) for line in _failed(folder).splitlines()]
    assert [record["index"] for record in failed] == [5, 9, 20]
    assert json.loads((folder / "out" / "done.json").read_bytes())["failed"] == 3
    assert len(model.asked) == 36


@pytest.mark.parametrize("lasts", [0, 3, 8, 13, 22, 35])
def test_a_run_that_died_goes_on_where_its_parts_end_and_the_output_is_the_same(folder: Path, lasts: int) -> None:
    _run(_job(folder, output=str(folder / "whole")), Model())
    with pytest.raises(CloudError, match="died"):
        _run(_job(folder), Model(lasts))
    delivered = [json.loads(line)["custom_id"] for line in _joined(folder).splitlines()]
    assert len(delivered) % 4 == 0
    second = Model()
    assert _run(_job(folder), second) == 3
    assert _joined(folder) == _joined(folder, "whole") and _failed(folder) == _failed(folder, "whole")
    assert not set(second.asked) & set(delivered)


def test_a_run_that_is_done_infers_nothing_and_still_says_how_many_failed(folder: Path) -> None:
    _run(_job(folder), Model())
    again = Model()
    assert _run(_job(folder), again) == 3 and again.asked == []


def test_a_run_that_died_between_a_part_and_its_errors_mends_them(folder: Path) -> None:
    with pytest.raises(CloudError):
        _run(_job(folder, limits=Limits(batch_rows=3, window=9, batches=1)), Model(9))
    assert sorted(path.name for path in (folder / "out").glob("errors-*")) == ["errors-000001.jsonl"]
    (folder / "out" / "errors-000001.jsonl").unlink()
    assert _run(_job(folder), Model()) == 3
    assert [json.loads(line)["index"] for line in _failed(folder).splitlines()] == [5, 9, 20]


def test_new_objects_do_not_shift_a_run_that_goes_on(folder: Path) -> None:
    _run(_job(folder, output=str(folder / "whole")), Model())
    with pytest.raises(CloudError):
        _run(_job(folder), Model(20))
    (folder / "in" / "0.txt").write_text("new")
    _run(_job(folder), Model())
    assert _joined(folder) == _joined(folder, "whole")


def test_objects_that_changed_or_went_since_are_error_rows_and_no_row_is_lost_or_doubled(folder: Path) -> None:
    with pytest.raises(CloudError):
        _run(_job(folder), Model(20))
    kept = _joined(folder)
    (folder / "in" / "deep" / "b.jsonl").write_text('{"prompt": "another"}\n')
    (folder / "in" / "z3.txt").unlink()
    _run(_job(folder), Model())
    assert _joined(folder).startswith(kept)
    records = [json.loads(line) for line in _joined(folder).splitlines()]
    assert [record["index"] for record in records] == list(range(len(records)))
    ends = {record["key"]: record["error"] and record["error"]["code"] for record in records}
    assert ends["deep/b.jsonl"] == "changed" and ends["z3.txt"] == "missing" and ends["z6.txt"] is None
    assert sum(record["key"].startswith("z") for record in records) == 7


def test_workers_share_the_parts_and_never_a_row(folder: Path) -> None:
    _run(_job(folder, output=str(folder / "whole")), Model())
    models = [Model(), Model(), Model()]
    for lane, model in enumerate(models, start=1):
        _run(_job(folder, lane=lane, lanes=3), model)
    assert _joined(folder) == _joined(folder, "whole")
    asked = [custom_id for model in models for custom_id in model.asked]
    assert len(asked) == len(set(asked)) == 36 and all(model.asked for model in models)


def test_one_worker_finishes_what_several_left_behind(folder: Path) -> None:
    _run(_job(folder, output=str(folder / "whole")), Model())
    first = Model()
    _run(_job(folder, lane=2, lanes=3), first)
    second = Model()
    _run(_job(folder), second)
    assert _joined(folder) == _joined(folder, "whole") and not set(first.asked) & set(second.asked)


def test_with_several_workers_a_lost_jsonl_object_ends_the_run_since_the_others_count_on_its_rows(folder: Path) -> None:
    _run(_job(folder, lane=1, lanes=2), Model())
    (folder / "in" / "deep" / "b.jsonl").unlink()
    with pytest.raises(CloudError, match=r"b\.jsonl"):
        _run(_job(folder, lane=2, lanes=2), Model())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"max_tokens": 9}}, "model was {}, is {'max_tokens': 9}"),
        ({"part_rows": 5}, "part_rows was 4, is 5"),
        ({"glob": "*.txt"}, "glob was None, is '*.txt'"),
    ],
)
def test_an_output_of_another_run_is_refused_and_what_differs_is_named(
    folder: Path, changes: dict[str, Any], named: str
) -> None:
    _run(_job(folder), Model())
    with pytest.raises(Refused, match="belongs to another run") as caught:
        _run(_job(folder, **changes), Model())
    assert named in str(caught.value)


def test_parts_that_nobody_claims_are_not_touched(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "part-000000.jsonl").write_text("mine\n")
    with pytest.raises(Refused, match="without a manifest"):
        _run(_job(folder), Model())
    assert (folder / "out" / "part-000000.jsonl").read_text() == "mine\n"


def test_a_part_that_was_tampered_with_is_named(folder: Path) -> None:
    with pytest.raises(CloudError):
        _run(_job(folder), Model(20))
    last = sorted((folder / "out").glob("part-*"))[-1]
    last.write_bytes(last.read_bytes()[:-9])
    with pytest.raises(Refused, match=last.name):
        _run(_job(folder), Model())


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
    with pytest.raises(Refused, match=named):
        _job(folder, **changes)


def test_an_output_within_the_input_is_refused(folder: Path) -> None:
    with pytest.raises(Refused, match="lies within --input"):
        _job(folder, output=str(folder / "in" / "out"))


def test_a_glob_and_a_manifest_choose_and_a_manifests_order_is_kept(folder: Path) -> None:
    _run(_job(folder, glob="z*.txt"), Model())
    assert [json.loads(line)["key"] for line in _joined(folder).splitlines()] == [f"z{i}.txt" for i in range(7)]
    (folder / "list").write_text('z4.txt\n{"key": "z1.txt"}\ngone.txt\n')
    _run(_job(folder, manifest=str(folder / "list"), output=str(folder / "listed")), Model())
    records = [json.loads(line) for line in _joined(folder, "listed").splitlines()]
    assert [record["key"] for record in records] == ["z4.txt", "z1.txt", "gone.txt"]
    assert records[2]["error"]["code"] == "missing"


@pytest.mark.parametrize(
    ("manifest", "named"), [("a\na\n", "line 2 names a again"), ("{}\n", "line 1 is neither"), ("", "nothing found")]
)
def test_manifests_that_mean_nothing_are_refused(folder: Path, manifest: str, named: str) -> None:
    (folder / "list").write_text(manifest)
    with pytest.raises(Refused, match=named):
        _run(_job(folder, manifest=str(folder / "list")), Model())


def test_too_many_failures_end_a_run_behind_whole_parts(folder: Path) -> None:
    with pytest.raises(TooManyFailures, match=r"2 rows failed, more than 1; the last: a\.jsonl:10"):
        _run(_job(folder, max_failures=1), Model())
    assert len(_joined(folder).splitlines()) == 8
    assert _run(_job(folder), Model()) == 3


def test_planning_alone_leaves_no_trace(folder: Path) -> None:
    planned = asyncio.run(plan(_job(folder), write=False))
    assert len(planned.objects) == 9 and not (folder / "out").exists()


def test_a_conditional_create_whose_answer_was_lost_is_not_mistaken_for_anothers() -> None:
    async def run() -> None:
        store = Store.memory()
        await create(store, "part", b"same", _QUICK)
        await create(store, "part", b"same", _QUICK)
        with pytest.raises(Exists, match="left as it is"):
            await create(store, "part", b"other", _QUICK)
        assert await store.get("part") == b"same"

    asyncio.run(run())


def test_a_place_that_cannot_be_written_is_a_clear_error(folder: Path) -> None:
    class FullStore(Store):
        async def create(self, key: str, data: bytes) -> None:
            raise Full(f"{key}: no room left to write")

    async def run() -> None:
        sink = PartSink(FullStore(Store.memory()._backend, "memory://"), 1, _QUICK)
        await sink.write(Result(Row(0, "k", None, "k"), Outcome({})))

    with pytest.raises(Full, match="part-000000"):
        asyncio.run(run())
    assert not Full("x").retriable and not Denied("x").retriable
