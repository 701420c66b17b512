"""Failed rows that are retried: each is replaced once, in its place, even if a worker dies or two work at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.cloud.prefetch import PrefetchedRange
from mlserver_torch_stream.cloud.retry_failed import FailedRow, FailedRowRetry
from mlserver_torch_stream.cloud.rows import (
    CloudError,
    Failure,
    ObjectChanged,
    Outcome,
    Result,
    Row,
    RunRefused,
    TooManyFailures,
)
from mlserver_torch_stream.cloud.source import Listed, Source
from mlserver_torch_stream.cloud.store import Store, settle
from tests import plain_http
from tests.cloud.command import cloud
from tests.cloud.faulty import FaultyServer, faulty_server
from tests.cloud.jobs import QUICK, RUN, Model, failed, job, joined, run
from tests.cloud.models import ModelServer


def _mended(lasts: int | None = None) -> Model:
    return Model(lasts, fails="never")


def _records(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.splitlines()]


def test_rows_that_failed_get_their_answers_in_their_places_and_no_other_is_inferred(folder: Path) -> None:
    assert run(job(folder, output=str(folder / "whole")), _mended()) == 1
    assert run(job(folder), Model()) == 3
    again = _mended()
    assert run(job(folder, retry_failed=True), again) == 1
    assert joined(folder) == joined(folder, "whole") and failed(folder) == failed(folder, "whole")
    assert again.asked == ["r5", "r20"]  # the malformed one is read again, and is what it was
    assert json.loads((folder / "out" / "done.json").read_bytes())["failed"] == 1
    nobody = Model()
    assert run(job(folder), nobody) == 1 and nobody.asked == []


def test_rows_that_failed_only_with_others_of_their_batch_are_answered(folder: Path) -> None:
    class Poisoned(Model):
        async def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
            if any((row.body or {}).get("prompt") == "fail 20" for row in rows):
                raise ValueError("poison")
            return [Outcome({"text": row.custom_id}) for row in rows]

    run(job(folder), Model(fails=""))
    assert len(_records(failed(folder))) == 37
    assert run(job(folder, retry_failed=True), Poisoned()) == 2
    assert [record["index"] for record in _records(failed(folder))] == [9, 20]


def test_a_row_that_fails_again_says_why_it_did_this_time(folder: Path) -> None:
    run(job(folder), Model())

    class Worse(Model):
        def _outcome(self, row: Any) -> Outcome:
            return Outcome(failure=super()._outcome(row).failure) if row.index == 20 else Outcome({"text": "now"})

    assert run(job(folder, retry_failed=True), Worse()) == 2
    assert [record["index"] for record in _records(failed(folder))] == [9, 20]
    assert _records(joined(folder))[5]["response"]["body"] == {"text": "now"}


@pytest.mark.parametrize("lasts", [0, 1, 2, 3, 5, 6, 8])
def test_a_retry_that_died_leaves_whole_parts_and_the_next_asks_for_what_is_missing_only(
    folder: Path, lasts: int
) -> None:
    run(job(folder), Model(fails="text"))  # the last seven, in two parts, beside the malformed one
    assert len(_records(failed(folder))) == 8
    first = _mended(lasts)
    if lasts < 7:
        with pytest.raises(CloudError, match="died"):
            run(job(folder, retry_failed=True), first)
    else:
        run(job(folder, retry_failed=True), first)
    there = _records(joined(folder))
    assert [record["index"] for record in there] == list(range(37))
    answered = {record["custom_id"] for record in there if record["error"] is None}
    second = _mended()
    assert run(job(folder, retry_failed=True), second) == 1
    assert not set(second.asked) & answered and len(answered) + len(second.asked) == 36
    assert [record["index"] for record in _records(joined(folder)) if record["error"]] == [9]


def test_a_retry_that_died_between_a_part_and_its_errors_is_counted_right_afterwards(folder: Path) -> None:
    run(job(folder), Model())
    stale = {path: path.read_bytes() for path in (folder / "out").glob("errors-*")}
    run(job(folder, retry_failed=True), _mended())
    for path, data in stale.items():
        path.write_bytes(data)
    assert run(job(folder), Model()) == 1
    assert [record["index"] for record in _records(failed(folder))] == [9]


def test_what_was_not_there_yet_is_done_behind_what_is_tried_again(folder: Path) -> None:
    run(job(folder, output=str(folder / "whole")), _mended())
    with pytest.raises(CloudError, match="died"):
        run(job(folder), Model(22))
    assert len(_records(joined(folder))) < 37 and _records(failed(folder))
    again = _mended()
    assert run(job(folder, retry_failed=True), again) == 1
    assert joined(folder) == joined(folder, "whole") and len(again.asked) == len(set(again.asked))


def test_workers_try_their_own_parts_again(folder: Path) -> None:
    run(job(folder), Model())
    models = [_mended(), _mended()]
    left = [run(job(folder, retry_failed=True, lane=lane, lanes=2), models[lane - 1]) for lane in (1, 2)]
    assert [model.asked for model in models] == [[], ["r5", "r20"]] and left == [1, 0]  # parts 1 and 5; 9 is in part 2
    assert [record["index"] for record in _records(failed(folder))] == [9]


def test_too_many_that_fail_again_end_the_run(folder: Path) -> None:
    run(job(folder), Model())
    with pytest.raises(TooManyFailures, match="2 rows failed, more than the 1 allowed"):
        run(job(folder, retry_failed=True, max_failures=1), Model())
    assert len(_records(joined(folder))) == 37


def test_objects_that_could_not_be_had_are_read_again_but_one_that_holds_rows_is_left_and_told(folder: Path) -> None:
    """An object that is one row has a place in the output; the rows of an object that could not be read have none."""
    (folder / "list").write_text("z0.txt\nlate.txt\nlate.jsonl\na.jsonl\n")
    listed = {"manifest": str(folder / "list")}
    hidden = folder / "in" / "a.jsonl"
    hidden.rename(folder / "away")
    assert run(job(folder, **listed), Model()) == 3
    hidden.write_bytes((folder / "away").read_bytes())
    (folder / "in" / "late.txt").write_text("at last")
    (folder / "in" / "late.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    told: list[str] = []
    again = _mended()
    assert run(job(folder, retry_failed=True, **listed), again, report=told.append) == 2
    assert again.asked == ["late.txt"]
    assert [record["error"] and record["error"]["code"] for record in _records(joined(folder))] == [
        None,
        None,
        "missing",
        "missing",
    ]
    assert len(told) == 1 and "2 failed rows each represent" in told[0] and "late.jsonl, a.jsonl" in told[0]


def test_an_object_that_changed_since_is_still_another_one(folder: Path) -> None:
    run(job(folder), Model())
    (folder / "in" / "deep" / "b.jsonl").write_text('{"prompt": "another"}\n' * 20)
    assert run(job(folder, retry_failed=True), _mended()) == 2
    changed = _records(joined(folder))[20]
    assert changed["error"]["code"] == "changed" and (changed["custom_id"], changed["line"]) == ("r20", 8)


def test_a_part_with_rows_of_no_object_is_refused(folder: Path) -> None:
    run(job(folder), Model())
    part = folder / "out" / "part-000001.jsonl"
    part.write_bytes(part.read_bytes().replace(b'"line":6', b'"line":14'))
    with pytest.raises(
        RunRefused, match=r"part-000001\.jsonl has row 14 of a\.jsonl, which is not an object of this run's input"
    ):
        run(job(folder, retry_failed=True), _mended())


class _Contested(Store):
    """A store in which another worker answers row 1 between the reading and the writing of a part."""

    times = 1

    async def replace(self, key: str, data: bytes, marks: Mapping[str, str]) -> None:
        if self.times:
            self.times -= 1
            now, theirs = await super().look(key)
            lines = now.splitlines(keepends=True)
            answered = {
                **json.loads(lines[1]),
                "response": {"status_code": 200, "body": {"text": "theirs"}},
                "error": None,
            }
            lines[1] = json.dumps(answered).encode() + b" " * self.times + b"\n"
            await super().replace(key, b"".join(lines), theirs)
        await super().replace(key, data, marks)


def _contest(times: int) -> list[dict[str, Any]]:
    async def act() -> list[dict[str, Any]]:
        output = _Contested(Store.memory()._backend, "memory://")
        output.times = times
        objects = Store.memory()
        await objects.put("a.jsonl", b'{"prompt": "0"}\n{"prompt": "1"}\n{"prompt": "2"}\n')
        record = {"key": "a.jsonl", "custom_id": "", "response": None, "error": {"code": "c", "message": "m"}}
        lines = [json.dumps({"index": i, "line": i + 1, **record}).encode() + b"\n" for i in range(3)]
        await output.put("part-000000.jsonl", b"".join(lines))
        await output.put("errors-000000.jsonl", b"".join(lines))
        listed = [Listed(await objects.head("a.jsonl"))]
        failed_again = Outcome(failure=Failure("c", "m"))
        again = FailedRowRetry(Source(objects, listed, retry=QUICK), output, 3, RUN, most=1)
        async for group in again.groups([0]):
            async for row in again.rows(group):
                await again.put(Result(row, Outcome({"text": "ours"}) if row.index else failed_again))
        return _records(await output.get("part-000000.jsonl"))

    return asyncio.run(act())


def test_an_answer_that_another_worker_put_meanwhile_is_kept() -> None:
    assert [each["response"] and each["response"]["body"] for each in _contest(1)] == [
        None,
        {"text": "theirs"},
        {"text": "ours"},
    ]


def test_a_part_that_never_stops_changing_is_left_as_it_is() -> None:
    with pytest.raises(ObjectChanged, match="another worker keeps changing it"):
        _contest(99)


@pytest.mark.long
@pytest.mark.parametrize("place", ["memory", "folder", "s3"])
def test_what_is_written_over_is_the_version_that_was_read(place: str, tmp_path: Path, request: Any) -> None:
    async def act() -> None:
        store = Store.memory() if place == "memory" else Store.open(url)
        await store.put("a", b"one")
        data, marks = await store.look("a")
        assert data == b"one"
        await store.replace("a", b"second", marks)
        with pytest.raises(ObjectChanged):
            await store.replace("a", b"third", marks)
        assert await store.get("a") == b"second"
        await settle()

    url = str(tmp_path) if place != "s3" else f"s3://{request.getfixturevalue('bucket')}"
    asyncio.run(act())


def test_only_the_lines_that_are_wanted_are_rows_and_nothing_behind_them_is_fetched() -> None:
    body = b"".join(b'{"prompt": "%d"}\n' % number for number in range(20_000))

    async def read(server: FaultyServer) -> list[int | None]:
        store = Store.open("s3://bucket", {"endpoint": server.url, "skip_signature": "true", "region": "us-east-1"})
        objects = [Listed(await store.head("a.jsonl"))]
        source = Source(store, objects, block=10_000, ahead=PrefetchedRange(2, 20_000), lines={"a.jsonl": {3, 1200}})
        lines = [row.line async for row in source.rows()]
        await settle()
        return lines

    with faulty_server({"/bucket/a.jsonl": body}) as server:
        assert asyncio.run(read(server)) == [3, 1200]
        assert len(server.gets("/bucket/a.jsonl")) <= 5 < len(body) // 10_000


def test_groups_of_failed_rows_are_bounded(folder: Path) -> None:
    run(job(folder), Model())

    async def groups() -> list[list[FailedRow]]:
        output = Store.open(str(folder / "out"))
        again = FailedRowRetry(Source(output, [], retry=QUICK), output, 4, RUN, most=1)
        return [group async for group in again.groups([1, 2, 5])]

    assert [[row.index for row in group] for group in asyncio.run(groups())] == [[5], [9], [20]]


def test_the_command_tries_again_in_a_bucket_and_says_what_it_would(
    bucket: str, server: ModelServer, capsys: Any, aws: dict[str, str]
) -> None:
    lines = "".join(json.dumps({"prompt": f"row {i}"}) + "\n" for i in range(6))
    plain_http.put(f"{aws['AWS_ENDPOINT_URL']}/{bucket}/in/a.jsonl", content=lines.encode()).raise_for_status()
    where = ("--input", f"s3://{bucket}/in", "--output", f"s3://{bucket}/out")
    command = ("run", *where, "--url", server.url, "--part-rows", "4")
    server.trouble = lambda prompt, before: 422 if prompt in ("row 1", "row 5") else None
    assert cloud(*command) == 1
    server.trouble = lambda prompt, before: None
    assert cloud(*command) == 1 and len(server.asked) == 6  # not of itself: it costs, and mostly fails again
    capsys.readouterr()
    assert cloud(*command, "--retry-failed", "--dry-run") == 0
    assert "2 parts exist already with 2 failed rows to try again" in capsys.readouterr().out
    assert cloud(*command, "--retry-failed", "--progress", "on") == 0
    assert "2/2 rows" in capsys.readouterr().err
    assert server.asked[6:] in (["row 1", "row 5"], ["row 5", "row 1"])
    assert cloud("run", "--input", f"s3://{bucket}/in", "--url", server.url, "--retry-failed") == 2
    assert "--retry-failed: needs the --output" in capsys.readouterr().err
