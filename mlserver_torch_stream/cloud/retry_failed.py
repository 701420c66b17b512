"""Infers the failed rows of an output's parts again and replaces them. It reads the same versions of the objects as the
run.

It deals with parts and objects, and does not depend on the model. A part is replaced as a whole, and only if it has not
changed since it was read, so that the output has one row for each input row at any time.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from mlserver_torch_stream.cloud.listing import heads
from mlserver_torch_stream.cloud.naming import errors_name, kind_of, part_name
from mlserver_torch_stream.cloud.rows import Kind, MemberPlace, ObjectChanged, Result, Row, RunIdentity, RunRefused
from mlserver_torch_stream.cloud.sink import failed_lines, put_errors
from mlserver_torch_stream.cloud.source import Source
from mlserver_torch_stream.cloud.store import Store
from mlserver_torch_stream.protocol.openai_batch import is_answered

Place = tuple[int | None, int | None, int | None]  # the numbers of the member, the line and the chunk
MAX_AT_ONCE = 100_000  # failed rows in memory at a time, some 300 bytes each


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A failed row, as recorded in its part."""

    index: int
    key: str
    line: int | None
    custom_id: str
    chunk: int | None = None
    member: MemberPlace | None = None

    @property
    def place(self) -> Place:
        """The row's place in its object, in the form that the input row has."""
        return None if self.member is None else self.member.index, self.line, self.chunk


@dataclass
class FailedRowRetry:
    """Infers failed rows again. ``source`` reads all rows of the run.

    ``lost`` contains the JSONL objects that could not be read. All rows of such an object are recorded as one failed
    row, so the output has no places for their answers, and they are not inferred again.
    """

    source: Source
    output: Store
    part_rows: int
    run: RunIdentity
    most: int = MAX_AT_ONCE
    lost: list[str] = field(default_factory=list)
    tried: int = 0

    def __post_init__(self) -> None:
        self._missing: dict[int, int] = {}  # part -> number of its rows without a result
        self._lines: dict[int, bytes] = {}  # encoded lines only: a row may hold a large object

    async def groups(self, parts: Iterable[int]) -> AsyncGenerator[list[FailedRow], None]:
        """Yields the failed rows of ``parts``, in order, in groups of bounded size.

        The objects are read again for each group.
        """
        found: list[FailedRow] = []
        for number in parts:
            data = await self.source.retry.run(self.output.get, errors_name(number))
            found += [row for line in data.splitlines() if self._may_be_tried(row := _failed_row(line, number))]
            if len(found) >= self.most:
                yield found
                found = []
        if found:
            yield found

    def _may_be_tried(self, row: FailedRow) -> bool:
        kind = self.source.kind_of(row.key)
        if kind is Kind.ARCHIVE and row.member is not None:
            kind = kind_of(row.member.name, self.source.kind)
        if row.line is None and (kind.many or (self.source.chunking.each and row.chunk is None)):
            self.lost.append(row.key)
            return False
        return True

    async def rows(self, failed: Sequence[FailedRow]) -> AsyncGenerator[Row, None]:
        """Yields an input row for each failed row. If an object cannot be read, all its rows get the same failure."""
        for each in failed:
            number = each.index // self.part_rows
            self._missing[number] = self._missing.get(number, 0) + 1
        left = deque(failed)
        async with aclosing((await self._source(failed)).rows()) as found:
            async for row in found:
                chunk = row.chunk if row.chunk is not None and not row.chunk.joined else None
                member = None if row.member is None else row.member.index
                place = (member, row.line, None if chunk is None else chunk.index)
                lost = row.failure is not None and place == (None, None, None)
                while left and left[0].key == row.key and (lost or left[0].place == place):
                    was = left[0]
                    yield replace(row, index=was.index, line=was.line, custom_id=was.custom_id)
                    if row.chunk is not None and row.chunk.joined and not row.chunk.last:
                        break  # the object's row gets the answers to all its chunks
                    left.popleft()
        if left:
            where = left[0]
            raise RunRefused(
                f"--output: {part_name(where.index // self.part_rows)} has row {where.line} of {where.key}, which is "
                "not an object of this run's input"
            )

    async def _source(self, failed: Sequence[FailedRow]) -> Source:
        lines: dict[str, set[int | tuple[int, int | None]]] = {}
        for row in failed:
            places: set[Any] = {row.line, row.chunk} - {None} if row.member is None else {row.place[:2]}
            lines.setdefault(row.key, set()).update(places)
        wanted = [each for each in self.source.objects if each.info.key in lines]
        # An object that was missing when the run began has no version yet: its present version is used.
        unseen = [each.info.key for each in wanted if each.failure is not None]
        now = {each.info.key: each for each in await heads(self.source.store, unseen, self.source.retry)}
        objects = [now.get(each.info.key, each) for each in wanted]
        return replace(self.source, objects=objects, lines=lines, strict=False, limit=None)

    async def put(self, result: Result) -> bool:
        """Adds the next result, in the order of the rows.

        If the result completes a part, replaces the part and returns True.
        """
        number = result.row.index // self.part_rows
        self.tried += 1
        self._lines[result.row.index] = result.encode(self.run)
        self._missing[number] -= 1
        if self._missing[number]:
            return False
        del self._missing[number]
        lines, self._lines = self._lines, {}
        await self._replace(number, lines)
        return True

    async def _replace(self, number: int, lines: Mapping[int, bytes]) -> None:
        """Replaces a part.

        If another worker has replaced the part in the meantime, it is read again, and the other worker's answers are
        kept.
        """
        name, retry = part_name(number), self.source.retry
        for _ in range(retry.tries):
            data, marks = await retry.run(self.output.look, name)
            merged = merge(data, lines)
            try:
                if merged != data:
                    await retry.run(self.output.replace, name, merged, marks)
            except ObjectChanged:
                continue
            await put_errors(self.output, number, failed_lines(merged), retry)
            return
        raise ObjectChanged(f"{self.output.url}/{name}: another worker keeps changing it; it is left as it is")


def merge(part: bytes, lines: Mapping[int, bytes]) -> bytes:
    """Returns the part with its failed rows replaced by ``lines``, which are by index. A row that has an answer keeps
    it.
    """
    merged: dict[int, bytes] = {}
    answered: set[int] = set()
    for line in part.splitlines(keepends=True):
        record = json.loads(line)
        merged[record["index"]] = merged.get(record["index"], b"") + line
        if is_answered(record):
            answered.add(record["index"])
    return b"".join(was if index in answered else lines.get(index, was) for index, was in merged.items())


def _failed_row(line: bytes, number: int) -> FailedRow:
    """Reads a failed row from its line. Raises RunRefused if the line was not written by this program."""
    try:
        record = json.loads(line)
        chunk = record.get("chunk")
        place = record["index"], record["key"], record["line"], record["custom_id"]
        member = None if "member" not in record else MemberPlace(record["member"]["index"], record["member"]["name"])
        return FailedRow(*place, None if chunk is None else chunk["index"], member)
    except (ValueError, KeyError, TypeError):
        raise RunRefused(f"--output: {errors_name(number)} was not written by this program") from None
