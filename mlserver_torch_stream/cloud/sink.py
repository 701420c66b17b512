"""Writes numbered parts. Each is written as a whole, and only if it does not exist yet. An existing part is a
checkpoint.

Knows rows by their index. The content of parts is read only to find where a run resumes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.naming import errors_name, part_name, part_number
from mlserver_torch_stream.cloud.rows import ObjectExists, Result, RunIdentity, RunRefused
from mlserver_torch_stream.cloud.source import Cursor
from mlserver_torch_stream.cloud.store import Store, get_or_none
from mlserver_torch_stream.protocol.openai_batch import is_answered

_AT_ONCE = 16  # parts that are read at a time


@dataclass(frozen=True, slots=True)
class Done:
    """The parts that an output contains. ``complete`` means that one part is shorter than the others, so it is the last
    part of the input.

    ``sparse`` means that parts exist after a missing one, because several workers write them. ``rows`` is the number of
    rows in all parts. ``stale`` contains the failed rows of those parts whose object of failed rows is missing or out
    of date.
    """

    parts: frozenset[int] = frozenset()
    cursor: Cursor = field(default_factory=Cursor)
    failures: Mapping[int, int] = field(default_factory=dict)  # number of failed rows of each part that has some
    complete: bool = False
    sparse: bool = False
    rows: int = 0
    stale: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


class PartSink:
    """Writes results, which it gets in order, as parts of ``rows`` rows: row i belongs to part i // rows."""

    def __init__(self, store: Store, rows: int, run: RunIdentity, retry: Retry) -> None:
        self._store = store
        self._run = run
        self._rows = rows
        self._retry = retry
        self._number = -1
        self._lines: list[bytes] = []  # encoded lines only: a row may hold a large object
        self._failed: list[bytes] = []

    async def write(self, result: Result) -> bool:
        """Writes a result. Returns True if the result completes a part, which is then durable."""
        number, place = divmod(result.row.index, self._rows)
        assert not self._lines or number == self._number, "the previous part is not complete"
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
        """Writes the input's last part, if rows are left."""
        if not self._lines:
            return
        part, failed = b"".join(self._lines), b"".join(self._failed)
        self._lines, self._failed = [], []
        await create(self._store, part_name(self._number), part, self._retry)
        if failed:
            await put_errors(self._store, self._number, failed, self._retry)


async def create(store: Store, name: str, data: bytes, retry: Retry) -> None:
    """Writes an object that does not exist yet. If the store's answer to an earlier try was lost, the object may exist
    with the same bytes; this is not an error.

    Raises ObjectExists if it exists with other bytes.
    """
    try:
        await retry.run(store.create, name, data)
    except ObjectExists:
        if await retry.run(store.get, name) != data:
            raise ObjectExists(
                f"{store.url}/{name}: already exists, from another worker or run; it is left unchanged"
            ) from None


async def find_done(store: Store, rows: int, retry: Retry) -> Done:
    """Returns the parts that exist, and where the run resumes.

    Reads all parts that have failed rows, and also the last parts, because a run may have died before it wrote the
    failed rows of the last parts.
    """
    names = await retry.run(_names, store)
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
    """Rewrites the objects with failed rows that ``find_done`` found to be missing or out of date."""
    for number, failed in done.stale.items():
        await put_errors(store, number, failed, retry)


async def _names(store: Store) -> set[str]:
    return {info.key async for info in store.list()}


def _groups(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    return (numbers[start : start + _AT_ONCE] for start in range(0, len(numbers), _AT_ONCE))


@dataclass(frozen=True, slots=True)
class _Seen:
    rows: int
    failed: int
    end: Cursor
    stale: bytes | None


async def _look(store: Store, number: int, rows: int, retry: Retry) -> _Seen:
    data = await retry.run(store.get, part_name(number))
    indexes, end = _contents(data, number, rows)
    failed = failed_lines(data)
    stale = failed if failed != (await get_or_none(store, errors_name(number), retry) or b"") else None
    chunk = end.get("chunk")
    within = chunk["index"] if chunk is not None and not chunk["last"] else None
    member = None if "member" not in end else end["member"]["index"]
    return _Seen(indexes, failed.count(b"\n"), Cursor(end["index"] + 1, end["key"], end["line"], within, member), stale)


def _contents(data: bytes, number: int, rows: int) -> tuple[int, dict[str, Any]]:
    """Returns how many rows a part has, and its last line. A row has one line, or one for each piece of its answer."""
    try:
        records = [json.loads(line) for line in data.splitlines()]
        first = number * rows
        indexes = [index for index, _ in groupby(record["index"] for record in records)]
        if not records or indexes != list(range(first, first + len(indexes))):
            raise ValueError
        assert all({"key", "line", "response", "error"} <= set(record) for record in records)
    except (ValueError, KeyError, TypeError, AssertionError):
        raise RunRefused(f"--output: {part_name(number)} is not a part that this run wrote") from None
    return len(indexes), records[-1]


def failed_lines(part: bytes) -> bytes:
    """Returns the failed rows of a part, unchanged."""
    return b"".join(line for line in part.splitlines(keepends=True) if not is_answered(json.loads(line)))


async def put_errors(store: Store, number: int, failed: bytes, retry: Retry) -> None:
    """Writes the failed rows of a part.

    If no row has failed, the object is written without content, because not every writer has the permission to delete
    it.
    """
    await retry.run(store.put, errors_name(number), failed)
