"""Numbered parts: each written whole, once, only if it is not there yet; a part that is there is a checkpoint.

Knows rows by their index alone; what they say it does not read, except where a run is to go on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.cloud_errors import ObjectExists, ObjectMissing, RunRefused
from mlserver_torch_stream.cloud.naming import errors_name, part_name, part_number
from mlserver_torch_stream.cloud.rows import Result, RunIdentity
from mlserver_torch_stream.cloud.source import Cursor
from mlserver_torch_stream.cloud.store import Store
from mlserver_torch_stream.protocol.openai_batch import is_answered

_AT_ONCE = 16  # parts that are looked at


@dataclass(frozen=True, slots=True)
class Done:
    """What an output holds already. ``complete``: a part is shorter than the others, so it was the input's last.

    ``sparse``: there are parts behind a missing one, which several workers wrote. ``rows``: in all parts. ``stale``:
    the failed rows, by part, of those parts whose own object for them is missing or out of date.
    """

    parts: frozenset[int] = frozenset()
    cursor: Cursor = field(default_factory=Cursor)
    failures: Mapping[int, int] = field(default_factory=dict)  # by part, where there are any
    complete: bool = False
    sparse: bool = False
    rows: int = 0
    stale: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


class PartSink:
    """Writes results that come in order as parts of ``rows`` rows: row i belongs to part i // rows."""

    def __init__(self, store: Store, rows: int, run: RunIdentity, retry: Retry) -> None:
        self._store = store
        self._run = run
        self._rows = rows
        self._retry = retry
        self._number = -1
        self._lines: list[bytes] = []  # not the rows, which may be large objects
        self._failed: list[bytes] = []

    async def write(self, result: Result) -> bool:
        """True if with this result a part became durable."""
        number, place = divmod(result.row.index, self._rows)
        assert not self._lines or number == self._number, "a part was left before its end"
        self._number = number
        line = result.encode(self._run)
        self._lines.append(line)
        if result.outcome.failure is not None:
            self._failed.append(line)
        if place < self._rows - 1:
            return False
        await self.end()
        return True

    async def end(self) -> None:
        """Writes what is left: the input's last part."""
        if not self._lines:
            return
        part, failed = b"".join(self._lines), b"".join(self._failed)
        self._lines, self._failed = [], []
        await create(self._store, part_name(self._number), part, self._retry)
        if failed:
            await put_errors(self._store, self._number, failed, self._retry)


async def create(store: Store, name: str, data: bytes, retry: Retry) -> None:
    """Writes what is not there yet. An answer that was lost may have written it: then the same bytes are there.

    Raises Exists where others are.
    """
    try:
        await retry.run(lambda: store.create(name, data))
    except ObjectExists:
        if await retry.run(lambda: store.get(name)) != data:
            raise ObjectExists(
                f"{store.url}/{name}: is there already, from another worker or run; it is left as it is"
            ) from None


async def find_done(store: Store, rows: int, retry: Retry) -> Done:
    """What is there to go on from. Looks into the last parts, behind which a run may have died before it wrote their
    failed rows, and into those that have failed rows."""
    names = await retry.run(lambda: _names(store))
    parts = frozenset(number for name in names if (number := part_number(name)) is not None)
    if not parts:
        return Done()
    count = next(number for number in range(len(parts) + 1) if number not in parts)
    last = {count - 1, max(parts)} - {-1}
    seen: dict[int, _Seen] = {}
    for group in _groups(sorted(last | {number for number in parts if errors_name(number) in names})):
        found = await asyncio.gather(*(_look(store, number, rows, retry) for number in group))
        seen.update(zip(group, found, strict=True))
    cursor = seen[count - 1].end if count else Cursor()
    sparse = count < len(parts)
    short = any(seen[number].rows < rows for number in last)
    failures = {number: each.failed for number, each in seen.items() if each.failed}
    written = (len(parts) - 1) * rows + seen[max(parts)].rows
    stale = {number: each.stale for number, each in seen.items() if each.stale is not None}
    return Done(parts, cursor, failures, short and not sparse, sparse, written, stale)


async def mend_errors(store: Store, done: Done, retry: Retry) -> None:
    for number, failed in done.stale.items():
        await put_errors(store, number, failed, retry)


async def _names(store: Store) -> set[str]:
    return {info.key async for info in store.list()}


def _groups(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    return (numbers[at : at + _AT_ONCE] for at in range(0, len(numbers), _AT_ONCE))


@dataclass(frozen=True, slots=True)
class _Seen:
    rows: int
    failed: int
    end: Cursor
    stale: bytes | None


async def _look(store: Store, number: int, rows: int, retry: Retry) -> _Seen:
    data = await retry.run(lambda: store.get(part_name(number)))
    records = _records(data, number, rows)
    failed = failed_lines(data)
    stale = failed if failed != await _errors(store, number, retry) else None
    end = records[-1]
    return _Seen(len(records), failed.count(b"\n"), Cursor(end["index"] + 1, end["key"], end["line"]), stale)


async def _errors(store: Store, number: int, retry: Retry) -> bytes:
    try:
        return await retry.run(lambda: store.get(errors_name(number)))
    except ObjectMissing:
        return b""


def _records(data: bytes, number: int, rows: int) -> list[dict[str, Any]]:
    try:
        records = [json.loads(line) for line in data.splitlines()]
        first = number * rows
        if not records or [record["index"] for record in records] != list(range(first, first + len(records))):
            raise ValueError
        assert all({"key", "line", "response", "error"} <= set(record) for record in records)
    except (ValueError, KeyError, TypeError, AssertionError):
        raise RunRefused(f"--output: {part_name(number)} is no part that this run wrote") from None
    return records


def failed_lines(part: bytes) -> bytes:
    """Its rows that failed, as they are."""
    return b"".join(line for line in part.splitlines(keepends=True) if not is_answered(json.loads(line)))


async def put_errors(store: Store, number: int, failed: bytes, retry: Retry) -> None:
    """An empty object where none failed in the end: not every writer may delete."""
    await retry.run(lambda: store.put(errors_name(number), failed))
