"""Objects in chunks: every byte once and in order, one row for an object or for a chunk, resumed and retried."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlserver_torch_stream.cloud.parse import Chunking, ChunkJoin
from mlserver_torch_stream.cloud.pipeline import PipelineLimits
from mlserver_torch_stream.cloud.prefetch import PrefetchedRange
from mlserver_torch_stream.cloud.rows import Chunk, Failure, Kind, Outcome, Result, Row, RunRefused, StoreUnavailable
from mlserver_torch_stream.cloud.run import CloudRun, plan, stream, write
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.source import Cursor, Listed, Source
from mlserver_torch_stream.cloud.store import Store
from tests.cloud.jobs import QUICK, RUN, failed, joined

_SIZES = {"a.bin": 10, "b.bin": 0, "c.bin": 23, "d.bin": 6}
_EACH, _JOINED = Chunking(6, joined=False), Chunking(6)


def _bytes(key: str, size: int) -> bytes:
    return bytes((ord(key[0]) + number) % 256 for number in range(size))


class _Echo:
    """Answers with what each row contains.

    Rows in ``fails``, named ``key#number``, fail; ``lasts`` is the number of rows after which it dies, ``pieces`` the
    number of pieces in which answers come.
    """

    def __init__(self, fails: Sequence[str] = (), lasts: int | None = None, pieces: int | None = None) -> None:
        self.asked: list[str] = []
        self._fails, self._lasts, self._pieces = fails, lasts, pieces

    async def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        if self._lasts is not None and len(self.asked) + len(rows) > self._lasts:
            raise StoreUnavailable("the model died")
        self.asked += [self._name(row) for row in rows]
        return [self._outcome(row) for row in rows]

    def _name(self, row: Row) -> str:
        return f"{row.key}#{row.chunk.index}" if row.chunk is not None else row.key

    def _outcome(self, row: Row) -> Outcome:
        if self._name(row) in self._fails:
            return Outcome(failure=Failure("inference_failed", "as asked"))
        if self._pieces is None:
            return Outcome({"predictions": [row.data.hex()]})
        return Outcome(pieces=[{"predictions": [number, row.data.hex()]} for number in range(self._pieces)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for key, size in _SIZES.items():
        (tmp_path / "in" / key).write_bytes(_bytes(key, size))
    return tmp_path


def _job(folder: Path, chunking: Chunking, **changes: Any) -> CloudRun:
    settings: dict[str, Any] = {
        "output": str(folder / "out"),
        "part_rows": 3,
        "retry": QUICK,
        "limits": PipelineLimits(batch_rows=2, window=6),
        "created": RUN.created,
        "kind": Kind.BYTES,
    }
    return CloudRun(str(folder / "in"), chunking=chunking, **{**settings, **changes})


def _run(job: CloudRun, model: Any) -> int:
    async def act() -> int:
        return await write(await plan(job), model, RunMetrics())

    return asyncio.run(act())


def _rows(folder: Path, out: str = "out") -> list[dict[str, Any]]:
    return [json.loads(line) for line in joined(folder, out).splitlines()]


def _predictions(row: dict[str, Any]) -> Any:
    return row["response"] and row["response"]["body"]["predictions"]


@given(
    size=st.integers(0, 200),
    chunk=st.integers(1, 60),
    block=st.integers(1, 90),
    start=st.integers(0, 200),
    wanted=st.sets(st.integers(0, 220)),
)
def test_chunks_hold_every_byte_once_and_unwanted_ones_are_not_fetched(
    size: int, chunk: int, block: int, start: int, wanted: set[int]
) -> None:
    async def read() -> tuple[list[Row], int]:
        store = Store.memory()
        await store.put("a", b"-")
        await store.put("b", _bytes("b", size))
        chunking = Chunking(chunk, joined=False)
        objects = [Listed(await store.head(key)) for key in "ab"]
        source = Source(store, objects, Kind.BYTES, chunking=chunking, block=block)
        cursor = Cursor(1 + start, "b", None, start - 1) if 0 < start < chunking.rows(size) else Cursor(1, "a")
        fetched = sum(piece.size for piece in source.pieces(cursor, wanted.__contains__))
        return [row async for row in source.rows(cursor, wanted.__contains__)], fetched

    rows, fetched = asyncio.run(read())
    count = Chunking(chunk, joined=False).rows(size)
    first = start if 0 < start < count else 0
    expected = [number for number in range(first, count) if number + 1 in wanted]
    assert [row.index for row in rows] == [number + 1 for number in expected]
    assert [row.data for row in rows] == [_bytes("b", size)[n * chunk : (n + 1) * chunk] for n in expected]
    assert [row.chunk for row in rows] == [Chunk(n, n * chunk, n == count - 1, False) for n in expected]
    assert all(row.whole == size and row.custom_id == f"b#{row.chunk.index}" for row in rows if row.chunk)
    assert fetched <= len(expected) * max(chunk, block)


def test_an_object_is_one_row_with_the_answers_to_all_its_chunks(folder: Path) -> None:
    assert _run(_job(folder, _JOINED), _Echo()) == 0
    rows = _rows(folder)
    assert [(row["index"], row["key"], row["custom_id"]) for row in rows] == [(i, k, k) for i, k in enumerate(_SIZES)]
    for row, (key, size) in zip(rows, _SIZES.items(), strict=True):
        assert "chunk" not in row and bytes.fromhex("".join(_predictions(row))) == _bytes(key, size)
        assert len(_predictions(row)) == max(1, -(-size // 6))


def test_each_chunk_is_a_row_that_says_where_it_lies(folder: Path) -> None:
    assert _run(_job(folder, _EACH), _Echo()) == 0
    rows = _rows(folder)
    assert [row["index"] for row in rows] == list(range(8))
    found = [(row["custom_id"], row["chunk"]["offset"], row["chunk"]["last"]) for row in rows]
    assert found[:4] == [("a.bin#0", 0, False), ("a.bin#1", 6, True), ("b.bin#0", 0, True), ("c.bin#0", 0, False)]
    assert found[-2:] == [("c.bin#3", 18, True), ("d.bin#0", 0, True)]
    assert len({row["id"] for row in rows}) == len(rows)


def test_each_piece_is_a_line_and_a_part_holds_whole_rows(folder: Path) -> None:
    assert _run(_job(folder, _EACH), _Echo(pieces=3, fails=["c.bin#1"])) == 1
    rows = _rows(folder)
    assert [(row["index"], row["piece"]["index"]) for row in rows if "piece" in row] == [
        (index, piece) for index in range(8) for piece in range(3) if index != 4
    ]
    assert [row["piece"]["last"] for row in rows[:3]] == [False, False, True]
    assert len({row["id"] for row in rows}) == len(rows)
    assert {json.loads(line)["index"] for line in (folder / "out/part-000001.jsonl").read_text().splitlines()} == {
        3,
        4,
        5,
    }


@pytest.mark.parametrize("lasts", range(0, 8))
@pytest.mark.parametrize("chunking", [_JOINED, _EACH])
@pytest.mark.parametrize("pieces", [None, 2])
def test_a_run_that_died_anywhere_goes_on_and_writes_the_same_bytes(
    folder: Path, chunking: Chunking, lasts: int, pieces: int | None
) -> None:
    if chunking is _JOINED and pieces is not None:
        return  # pieces have rows of their own
    _run(_job(folder, chunking, output=str(folder / "whole")), _Echo(pieces=pieces))
    with pytest.raises(StoreUnavailable):
        _run(_job(folder, chunking), _Echo(lasts=lasts, pieces=pieces))
    before = {row["index"] for row in _rows(folder)}
    again = _Echo(pieces=pieces)
    assert _run(_job(folder, chunking), again) == 0
    assert joined(folder) == joined(folder, "whole")
    assert len(again.asked) == len(set(again.asked))
    if chunking is _EACH:
        assert len(again.asked) == 8 - len(before)  # also in the middle of an object


def test_two_workers_share_the_chunks_of_one_object(folder: Path) -> None:
    _run(_job(folder, _EACH, output=str(folder / "whole")), _Echo())
    models = [_Echo(), _Echo()]
    for lane, model in enumerate(models, 1):
        assert _run(_job(folder, _EACH, lane=lane, lanes=2), model) == 0
    assert joined(folder) == joined(folder, "whole")
    assert models[0].asked == [f"{key}#{n}" for key, n in (("a.bin", 0), ("a.bin", 1), ("b.bin", 0))] + [
        "c.bin#3",
        "d.bin#0",
    ]


@pytest.mark.parametrize("chunking", [_JOINED, _EACH])
def test_an_object_that_changed_between_two_attempts_is_named_and_shifts_nothing(
    folder: Path, chunking: Chunking
) -> None:
    with pytest.raises(StoreUnavailable):
        _run(_job(folder, chunking, part_rows=1), _Echo(lasts=4))
    (folder / "in" / "c.bin").write_bytes(b"another version, as long")
    done = len(_rows(folder))
    assert _run(_job(folder, chunking, part_rows=1), _Echo()) == (1 if chunking is _JOINED else 7 - done)
    rows = _rows(folder)
    assert [row["index"] for row in rows] == list(range(4 if chunking is _JOINED else 8))
    changed = [row for row in rows if row["error"]]
    assert {(row["key"], row["error"]["code"]) for row in changed} == {("c.bin", "changed")}
    assert _predictions(rows[-1]) == [_bytes("d.bin", 6).hex()]


def test_another_way_to_cut_is_another_run(folder: Path) -> None:
    assert _run(_job(folder, _EACH), _Echo()) == 0
    for other, said in (
        (Chunking(7, joined=False), "--chunk-bytes was 6 and is 7 now"),
        (_JOINED, "--rows was chunk and is object now"),
        (Chunking(), "--chunk-bytes was 6 and is not given now"),
    ):
        with pytest.raises(RunRefused, match=said):
            _run(_job(folder, other), _Echo())


@pytest.mark.parametrize("pieces", [None, 2])
@pytest.mark.parametrize("chunking", [_JOINED, _EACH, Chunking()])
def test_failed_rows_are_tried_again_in_their_places(folder: Path, chunking: Chunking, pieces: int | None) -> None:
    if chunking is _JOINED and pieces is not None:
        return
    bad = ["a.bin#1", "c.bin#0", "c.bin#3", "c.bin", "d.bin"]
    _run(_job(folder, chunking, output=str(folder / "whole")), _Echo(pieces=pieces))
    count = _run(_job(folder, chunking), _Echo(fails=bad, pieces=pieces))
    assert count == {6: 3 if chunking is _EACH else 2, None: 2}[chunking.chunk_bytes]
    if chunking is _JOINED:
        assert _rows(folder)[2]["error"]["message"] == "chunk 0: as asked"
    again = _Echo(pieces=pieces)
    assert _run(_job(folder, chunking, retry_failed=True), again) == 0
    assert joined(folder) == joined(folder, "whole") and failed(folder) == b""
    if chunking is _EACH:
        assert again.asked == ["a.bin#1", "c.bin#0", "c.bin#3"]


def test_answers_to_the_chunks_of_an_object_are_bounded_together() -> None:
    join = ChunkJoin(most_bytes=20)

    def add(index: int, last: bool, text: str) -> Result | None:
        row = Row(0, "a", None, "a", Kind.BYTES, chunk=Chunk(index, index, last, True))
        return join.add(Result(row, Outcome({"predictions": [text]})))

    assert add(0, False, "x" * 10) is None and add(1, False, "x" * 10) is None
    result = add(2, True, "x")
    assert result is not None and result.outcome.failure is not None
    assert result.outcome.failure.code == "too_large" and "up to chunk 1" in result.outcome.failure.message
    fresh = add(0, True, "y")
    assert fresh is not None and fresh.outcome.response == {"predictions": ["y"]}


def test_an_answer_that_cannot_be_joined_fails_its_object(folder: Path) -> None:
    async def model(rows: Sequence[Row]) -> list[Outcome]:
        return [Outcome({"text": row.key}) for row in rows]

    assert _run(_job(folder, _JOINED), model) == 4
    assert "the answer to chunk 0 has no 'predictions'" in _rows(folder)[0]["error"]["message"]


@pytest.mark.parametrize("order", [lambda chunk: chunk, lambda chunk: -chunk])
def test_what_is_held_is_bounded_however_large_the_object(folder: Path, order: Callable[[int], int]) -> None:
    """The answer to the first chunk arrives last."""
    (folder / "in" / "c.bin").write_bytes(bytes(200_000))
    metrics, limits = RunMetrics(), PipelineLimits(window_bytes=8000, batches=4, batch_weight=2000)

    async def model(rows: Sequence[Row]) -> list[Outcome]:
        number = rows[0].chunk.index if rows[0].chunk else 0
        await asyncio.sleep(0.0005 * (order(number) % 4))
        return [Outcome({"predictions": [len(row.data)]}) for row in rows]

    async def act() -> int:
        job = _job(folder, Chunking(1000), output=None, limits=limits, ahead=PrefetchedRange(nbytes=4000), glob="c.bin")
        found = [result async for result in stream(job, model, metrics)]
        assert [result.outcome.response for result in found] == [{"predictions": [1000] * 200}]
        return found[0].row.size

    assert asyncio.run(act()) == 200_000
    assert metrics.peak_undelivered_bytes <= 8000 and metrics.rows == 1
