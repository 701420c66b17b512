"""Numbered parts: each written whole, once, only if it is not there yet; a part that is there is a checkpoint.

Knows rows by their index alone; what they say it does not read, except where a run is to go on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from mlserver_torch_stream.cloud.faults import Exists, Missing, Refused
from mlserver_torch_stream.cloud.naming import errors_name, part_name, part_number
from mlserver_torch_stream.cloud.retry import Retry
from mlserver_torch_stream.cloud.rows import Result
from mlserver_torch_stream.cloud.source import Cursor
from mlserver_torch_stream.cloud.store import Store


@dataclass(frozen=True, slots=True)
class Done:
    """What an output holds already. ``complete``: a part is shorter than the others, so it was the input's last.

    ``sparse``: there are parts behind a missing one, which several workers wrote.
    """

    parts: frozenset[int] = frozenset()
    cursor: Cursor = field(default_factory=Cursor)
    failed: int = 0
    complete: bool = False
    sparse: bool = False


class PartSink:
    """Writes results that come in order as parts of ``rows`` rows: row i belongs to part i // rows."""

    def __init__(self, store: Store, rows: int, retry: Retry) -> None:
        self._store = store
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
        line = result.encode()
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
        await _put_errors(self._store, self._number, failed, self._retry)


async def create(store: Store, name: str, data: bytes, retry: Retry) -> None:
    """Writes what is not there yet. An answer that was lost may have written it: then the same bytes are there.

    Raises Exists where others are.
    """
    try:
        await retry.run(lambda: store.create(name, data))
    except Exists:
        if await retry.run(lambda: store.get(name)) != data:
            raise Exists(
                f"{store.url}/{name}: is there already, from another worker or run; it is left as it is"
            ) from None


async def find_done(store: Store, rows: int, retry: Retry) -> Done:
    """What is there to go on from. Mends the errors file of the last part, before which a run may have died."""
    names = await retry.run(lambda: _names(store))
    parts = frozenset(number for name in names if (number := part_number(name)) is not None)
    if not parts:
        return Done()
    count = next(number for number in range(len(parts) + 1) if number not in parts)
    cursor, short = Cursor(), False
    for number in {count - 1, max(parts)} - {-1}:
        records = _records(await retry.run(lambda number=number: store.get(part_name(number))), number, rows)  # type: ignore[misc]
        await _put_errors(store, number, _errors_of(records), retry)
        short = short or len(records) < rows
        if number == count - 1:
            last = records[-1]
            cursor = Cursor(last["index"] + 1, last["key"], last["line"])
    sparse = count < len(parts)
    return Done(parts, cursor, await _count_errors(store, parts, retry), short and not sparse, sparse)


async def _names(store: Store) -> list[str]:
    return [info.key async for info in store.list()]


def _records(data: bytes, number: int, rows: int) -> list[dict[str, Any]]:
    try:
        records = [json.loads(line) for line in data.splitlines()]
        first = number * rows
        if not records or [record["index"] for record in records] != list(range(first, first + len(records))):
            raise ValueError
        assert all({"key", "line", "error"} <= set(record) for record in records)
    except (ValueError, KeyError, TypeError, AssertionError):
        raise Refused(f"--output: {part_name(number)} is no part that this run wrote") from None
    return records


def _errors_of(records: list[dict[str, Any]]) -> bytes:
    failed = [record for record in records if record["error"] is not None]
    return b"".join(
        json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
        for record in failed
    )


async def _put_errors(store: Store, number: int, failed: bytes, retry: Retry) -> None:
    if failed:
        await retry.run(lambda: store.put(errors_name(number), failed))


async def _count_errors(store: Store, parts: frozenset[int], retry: Retry) -> int:
    names = set(await retry.run(lambda: _names(store)))
    total = 0
    for number in sorted(parts):
        if errors_name(number) in names:
            try:
                total += (await retry.run(lambda number=number: store.get(errors_name(number)))).count(b"\n")  # type: ignore[misc]
            except Missing:
                continue
    return total
