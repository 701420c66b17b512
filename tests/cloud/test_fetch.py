"""Fetching from a failing server: transient failures change no byte, and other failures are errors that name them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator

import pytest

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.prefetch import Prefetch, PrefetchedRange, fetch_range
from mlserver_torch_stream.cloud.rows import AccessDenied, CloudError, ObjectChanged, ObjectMissing, StoreUnavailable
from mlserver_torch_stream.cloud.source import Cursor, Listed, Source
from mlserver_torch_stream.cloud.store import Store, settle
from tests.cloud.faulty import Fault, FaultyServer, faulty_server

_BODY = random.Random(5).randbytes(300_000)
_KEY = "a.bin"
_QUICK = Retry(tries=4, first=0.01, longest=0.05)


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with faulty_server({"/bucket/a.bin": _BODY}) as running:
        yield running


def _store(server: FaultyServer, kind: str, stall_s: float = 5.0) -> Store:
    if kind == "http":
        return Store.open(f"{server.url}/bucket", stall_s=stall_s)
    if kind == "gs":
        options = {"base_url": server.url, "skip_signature": "true"}
        return Store.open("gs://bucket", options, stall_s)
    options = {"endpoint": server.url, "skip_signature": "true", "region": "us-east-1"}
    return Store.open("s3://bucket", options, stall_s)


def _fetch(server: FaultyServer, kind: str = "s3", stall_s: float = 5.0) -> tuple[bytes, list[CloudError]]:
    retried: list[CloudError] = []

    async def fetch() -> bytes:
        store = _store(server, kind, stall_s)
        info = await store.head(_KEY)
        try:
            return await fetch_range(store, info, 0, info.size, _QUICK, retried.append)
        finally:
            await settle()

    return asyncio.run(fetch()), retried


@pytest.mark.parametrize("kind", ["s3", "gs", "http"])
@pytest.mark.parametrize("fault", [503, 500, 429, "reset", "cut"])
def test_faults_that_pass_are_survived_byte_for_byte(server: FaultyServer, kind: str, fault: str | int) -> None:
    server.faults["/bucket/a.bin"] = [Fault(fault)]
    body, retried = _fetch(server, kind)
    assert body == _BODY and len(retried) == 1


def test_a_stall_is_noticed_and_the_rest_is_fetched_from_where_it_stopped(server: FaultyServer) -> None:
    server.faults["/bucket/a.bin"] = [Fault("stall")]
    body, _ = _fetch(server, stall_s=1.0)
    assert body == _BODY
    first, second = server.gets("/bucket/a.bin")
    assert first is None and second is not None and 0 < int(second[len("bytes=") :].split("-")[0]) <= len(_BODY) // 2


def test_a_body_that_is_cut_twice_goes_on_each_time_from_what_has_come(server: FaultyServer) -> None:
    server.faults["/bucket/a.bin"] = [Fault("cut"), Fault("cut")]
    assert _fetch(server)[0] == _BODY
    starts = [int((asked or "bytes=0-").removeprefix("bytes=").split("-")[0]) for asked in server.gets("/bucket/a.bin")]
    assert starts == sorted(set(starts)) and len(starts) == 3


def test_a_connection_that_breaks_between_the_last_byte_and_the_end_has_brought_everything(
    server: FaultyServer,
) -> None:
    server.faults["/bucket/a.bin"] = [Fault("unended")]
    body, retried = _fetch(server, "http")
    assert body == _BODY and len(retried) == 1
    assert len(server.gets("/bucket/a.bin")) == 1


def test_no_byte_is_kept_of_an_answer_with_more_bytes_than_were_asked_for(server: FaultyServer) -> None:
    server.faults["/bucket/a.bin"] = [Fault("cut"), Fault("more")]
    assert _fetch(server, "http")[0] == _BODY
    assert [asked is None for asked in server.gets("/bucket/a.bin")] == [True, False, True]


def test_a_range_of_an_object_of_another_size_is_refused(server: FaultyServer) -> None:
    server.faults["/bucket/a.bin"] = [Fault("cut"), Fault("resized")]
    with pytest.raises(ObjectChanged, match=r"a\.bin"):
        _fetch(server, "http")


@pytest.mark.parametrize("fault", ["cut", "change"])
def test_a_weak_etag_meets_no_condition_and_is_compared_all_the_same(server: FaultyServer, fault: str) -> None:
    server.weak = True
    server.faults["/bucket/a.bin"] = [Fault(fault)]
    if fault == "cut":
        assert _fetch(server, "http")[0] == _BODY
        return
    with pytest.raises(ObjectChanged, match=r"a\.bin"):
        _fetch(server, "http")


def test_an_object_that_changes_between_cut_and_resume_is_never_spliced(server: FaultyServer) -> None:
    server.faults["/bucket/a.bin"] = [Fault("change")]
    with pytest.raises(ObjectChanged, match=r"a\.bin"):
        _fetch(server)


@pytest.mark.parametrize(("fault", "error"), [(403, AccessDenied), (404, ObjectMissing)])
def test_what_trying_again_cannot_help_is_told_at_once(
    server: FaultyServer, fault: int, error: type[CloudError]
) -> None:
    server.faults["/bucket/a.bin"] = [Fault(fault)] * 3
    with pytest.raises(error, match=r"s3://bucket/a\.bin"):
        _fetch(server)
    assert len(server.gets("/bucket/a.bin")) == 1


def test_tries_are_bounded(server: FaultyServer) -> None:
    server.faults["/bucket/a.bin"] = [Fault(503)] * 50
    with pytest.raises(StoreUnavailable):
        _fetch(server)
    assert len(server.gets("/bucket/a.bin")) == _QUICK.tries


def test_no_server_is_a_clear_error() -> None:
    with faulty_server() as gone:
        pass
    with pytest.raises(StoreUnavailable, match=r"s3://bucket/a\.bin"):
        _fetch(gone)


def test_large_objects_come_in_pinned_ranges_side_by_side(server: FaultyServer) -> None:
    server.faults["/bucket/a.bin"] = [Fault("cut"), Fault(503)]

    async def read() -> list[bytes]:
        store = _store(server, "s3")
        source = Source(store, [Listed(await store.head(_KEY))], retry=_QUICK, block=65_536)
        rows = [row async for row in source.rows()]
        await settle()
        return [row.data for row in rows]

    assert asyncio.run(read()) == [_BODY]
    assert len({asked for asked in server.gets("/bucket/a.bin") if asked}) >= 5


class _Piece:
    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size


def test_prefetching_keeps_order_and_both_bounds_and_one_huge_piece_still_comes() -> None:
    flying, most = 0, 0

    async def fetch(piece: _Piece) -> bytes:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.001 * (5 - piece.number % 5))
        flying -= 1
        if piece.number == 7:
            raise ObjectMissing("7 is gone")
        return bytes([piece.number])

    async def read() -> AsyncIterator[tuple[int, bytes | str]]:
        prefetch: Prefetch[_Piece] = Prefetch(lambda piece: asyncio.ensure_future(fetch(piece)), PrefetchedRange(4, 10))
        pieces = iter([_Piece(number, 25 if number == 3 else 4) for number in range(12)])
        async for piece, data in prefetch.read(pieces):
            yield piece.number, data if isinstance(data, bytes) else data.message
        assert prefetch.peak_bytes == 25

    async def collect() -> list[tuple[int, bytes | str]]:
        return [each async for each in read()]

    expected: list[tuple[int, bytes | str]] = [(number, bytes([number])) for number in range(12)]
    expected[7] = (7, "7 is gone")
    assert asyncio.run(collect()) == expected
    assert most == 2  # 4 + 4 bytes fit into 10, a third does not


def test_leaving_early_ends_what_is_in_flight() -> None:
    ended = []

    async def fetch(piece: _Piece) -> bytes:
        try:
            await asyncio.sleep(0 if piece.number == 0 else 60)
        finally:
            ended.append(piece.number)
        return b""

    async def leave() -> None:
        prefetch: Prefetch[_Piece] = Prefetch(
            lambda piece: asyncio.ensure_future(fetch(piece)), PrefetchedRange(3, 100)
        )
        pieces = prefetch.read(iter([_Piece(number, 1) for number in range(9)]))
        async for _ in pieces:
            await asyncio.sleep(0)
            break
        await pieces.aclose()

    asyncio.run(leave())
    assert ended == [0, 1, 2]


def test_a_cursor_begins_behind_its_line_and_strictness_ends_a_run() -> None:
    async def rows(cursor: Cursor) -> list[tuple[int, str, int | None]]:
        store = Store.memory()
        await store.put("a.jsonl", b'{"prompt": "1"}\n\n{"prompt": "2"}\n{"prompt": "3"}')
        await store.put("b.jsonl", b'{"prompt": "4"}\n')
        objects = [Listed(await store.head(key)) for key in ("a.jsonl", "b.jsonl")]
        return [(row.index, row.key, row.line) async for row in Source(store, objects).rows(cursor)]

    whole = asyncio.run(rows(Cursor()))
    assert whole == [(0, "a.jsonl", 1), (1, "a.jsonl", 3), (2, "a.jsonl", 4), (3, "b.jsonl", 1)]
    assert asyncio.run(rows(Cursor(2, "a.jsonl", 3))) == whole[2:]
    assert asyncio.run(rows(Cursor(3, "a.jsonl", None))) == whole[3:]
    assert asyncio.run(rows(Cursor(4, "b.jsonl", 1))) == []
