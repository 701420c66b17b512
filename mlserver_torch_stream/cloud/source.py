"""Reads the rows of objects, in order: chooses the ranges to fetch, and parses the rows in them.

An object that cannot be read is replaced by one row with a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any
from zipfile import ZipInfo

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.cloud.archives import MAX_DIRECTORY_BYTES, DirectoryLonger, Tar, Zip, read_directory
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.members import ArchiveReader, damage
from mlserver_torch_stream.cloud.naming import is_archive, is_zip, kind_of
from mlserver_torch_stream.cloud.parquet import FOOTER_TAIL_BYTES, FooterLonger, ParquetTable, RowGroup
from mlserver_torch_stream.cloud.parse import Chunking
from mlserver_torch_stream.cloud.prefetch import Prefetch, PrefetchedRange, fetch_range
from mlserver_torch_stream.cloud.rows import Chunk, CloudError, Failure, Kind, Row, RunRefused
from mlserver_torch_stream.cloud.store import ObjectInfo, ReadableStore
from mlserver_torch_stream.cloud.tables import RowReader, Tables
from mlserver_torch_stream.gunzip import Damaged

BLOCK_BYTES = 8 * 2**20  # larger objects are fetched in ranges of this size, several at a time
_TAIL_BYTES = 128 * 2**10  # the end of a zip archive, which holds most directories
_LAST = float("inf")  # a line after all lines


@dataclass(frozen=True, slots=True)
class Listed:
    """An object of the run, or the key of an object that could not be found, with the reason."""

    info: ObjectInfo
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Cursor:
    """Says where reading resumes: at the row ``index``, after line ``line`` or chunk ``chunk`` of ``key``, or after
    ``key``.

    ``member`` is the number of the archive member that contains the line; if ``line`` is None, this member has been
    read to its end.
    """

    index: int = 0
    key: str | None = None
    line: int | None = None
    chunk: int | None = None
    member: int | None = None

    @property
    def within(self) -> bool:
        """True if this place is within an object, which may have more rows."""
        return (self.line, self.chunk, self.member) != (None, None, None)


START = Cursor()


@dataclass(frozen=True, slots=True)
class ObjectRange:
    """Bytes ``start`` to ``end`` of an object. ``skipped`` means that none of its rows is wanted, so the range is not
    fetched.
    """

    ordinal: int
    listed: Listed
    kind: Kind
    start: int
    end: int
    last: bool
    skipped: bool = False

    @property
    def size(self) -> int:
        return 0 if self.skipped else self.end - self.start


@dataclass(frozen=True, slots=True)
class _ColumnRange:
    """Bytes ``start`` to ``end`` of a Parquet file, which contain columns of a row group."""

    group: RowGroup
    info: ObjectInfo
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


Wanted = Callable[[int], bool]


@dataclass
class Source:
    """Reads the rows of ``objects``, in the order of the run.

    ``strict`` means that the run ends if a table or an archive cannot be read, because its number of rows is then
    unknown and other workers rely on this number. ``lines`` says for a key which lines of a table, members and lines of
    an archive, or chunks of another object are rows; ranges after the last of them are not fetched. Nothing is read
    after ``limit`` rows.
    """

    store: ReadableStore
    objects: Sequence[Listed]
    kind: Kind | None = None
    strict: bool = False
    retry: Retry = field(default_factory=Retry)
    ahead: PrefetchedRange = field(default_factory=PrefetchedRange)
    block: int = BLOCK_BYTES
    chunking: Chunking = field(default_factory=Chunking)
    lines: Mapping[str, Collection[Any]] | None = None
    tables: Tables = field(default_factory=Tables)
    limit: int | None = None
    on_retry: Callable[[CloudError], None] = lambda error: None

    def __post_init__(self) -> None:
        self._over: set[int] = set()  # ordinals of objects that are read to their end or given up

    def pieces(self, cursor: Cursor, wanted: Wanted) -> Iterator[ObjectRange]:
        """Yields the ranges to fetch. A range that is known to hold only unwanted rows is not fetched."""
        index: int | None = cursor.index
        for ordinal in range(self.first(cursor), len(self.objects)):
            listed = self.objects[ordinal]
            kind = self.kind_of(listed.info.key)
            if kind.many:
                index = None  # the number of its rows is unknown here
            elif self.chunking.each and listed.failure is None:
                first = cursor.chunk + 1 if cursor.chunk is not None and cursor.key == listed.info.key else 0
                yield from self._chunk_ranges(ordinal, listed, kind, first, index, wanted)
                index = None if index is None else index + self.chunking.rows(listed.info.size) - first
                continue
            skip = not kind.many and index is not None and not wanted(index)
            if index is not None:
                index += 1
            if skip or listed.failure is not None or self._too_large(kind, listed.info):
                yield ObjectRange(ordinal, listed, kind, 0, 0, True, skip)
                continue
            if kind is Kind.PARQUET:
                yield ObjectRange(ordinal, listed, kind, 0, 0, True)  # its footer says what is fetched
                continue
            yield from self._blocks(ordinal, listed, kind)

    def kind_of(self, key: str) -> Kind:
        """Returns the kind of an object; ARCHIVE if its members are read."""
        return Kind.ARCHIVE if self.tables.archives and is_archive(key) else kind_of(key, self.kind)

    def first(self, cursor: Cursor) -> int:
        """Returns the number of the first object with rows after the cursor.

        Raises RunRefused if the cursor's object is not in the run.
        """
        if cursor.key is None:
            return 0
        for ordinal, listed in enumerate(self.objects):
            if listed.info.key == cursor.key:
                return ordinal + (not cursor.within)
        raise RunRefused(f"--output: its last part ends with {cursor.key}, which is not an object of this run")

    def _too_large(self, kind: Kind, info: ObjectInfo) -> bool:
        return not kind.many and self.chunking.refuses(info.size)

    def _blocks(self, ordinal: int, listed: Listed, kind: Kind, start: int = 0) -> Iterator[ObjectRange]:
        block = self.block if kind.many else self.chunking.block(self.block)
        size = listed.info.size
        while ordinal not in self._over:
            end = min(size, start + block)
            yield ObjectRange(ordinal, listed, kind, start, end, end == size)
            start = end
            if start == size:
                return

    def _chunk_ranges(
        self, ordinal: int, listed: Listed, kind: Kind, first: int, index: int | None, wanted: Wanted
    ) -> Iterator[ObjectRange]:
        """Yields the ranges from chunk ``first`` on.

        ``index`` is the index of that chunk's row; None means that it is not known.
        """
        size = listed.info.size
        for piece in self._blocks(ordinal, listed, kind, first * (self.chunking.chunk_bytes or 0)):
            numbers = [chunk.index for chunk in self.chunking.chunks(piece.start, piece.end, size)]
            if self.lines is not None and not any(number in self.lines[listed.info.key] for number in numbers):
                continue
            skip = index is not None and not any(wanted(index + number - first) for number in numbers)
            yield replace(piece, skipped=skip)

    async def rows(self, cursor: Cursor = Cursor(), wanted: Wanted = lambda index: True) -> AsyncGenerator[Row, None]:
        """Yields the rows after ``cursor`` whose index is ``wanted``. The index counts all rows."""
        prefetch: Prefetch[ObjectRange] = Prefetch(self._fetch, self.ahead)
        index = cursor.index
        if self.limit is not None and index >= self.limit:
            return
        reading: _Object | None = None
        async with self.store.connected(), aclosing(prefetch.read(self.pieces(cursor, wanted))) as found:
            async for piece, data in found:
                if piece.ordinal in self._over:
                    continue
                if reading is None or reading.ordinal != piece.ordinal:
                    reading = self._object(piece, cursor)
                    data = data if isinstance(data, CloudError) else await self._opened(reading, piece, data)
                async with aclosing(self._rows(reading, index, piece, data)) as groups:
                    async for rows in groups:
                        for row in rows:
                            if self.limit is not None and row.index >= self.limit:
                                return
                            index = row.index + (row.chunk is None or row.chunk.last or not row.chunk.joined)
                            if wanted(row.index):
                                yield row
                data = b""
                if reading.over:
                    self._over.add(piece.ordinal)

    async def _rows(
        self, reading: _Object, index: int, piece: ObjectRange, data: bytes | CloudError
    ) -> AsyncGenerator[Iterable[Row], None]:
        """Yields the rows of a range in groups. A range of a Parquet object yields the rows of the whole object."""
        try:
            if isinstance(data, CloudError):
                raise data
            if piece.kind is not Kind.PARQUET or piece.listed.failure is not None:
                yield reading.rows(index, piece, data)
                return
            async with aclosing(self._parquet(reading, piece.listed.info)) as groups:
                async for rows in groups:
                    yield [replace(row, index=place) for place, row in enumerate(rows, index)]
                    index += len(rows)
        except Damaged as error:
            self._over.add(piece.ordinal)
            yield [reading.lost(index, damage(reading.key, piece.kind, reading.key, error))]
        except CloudError as error:
            self._over.add(piece.ordinal)
            if self.strict and piece.kind.many:
                raise
            yield reading.failed(index, piece, Failure(error.code, error.message))

    async def _parquet(self, reading: _Object, info: ObjectInfo) -> AsyncGenerator[list[Row], None]:
        """Yields the rows of a Parquet file. Row groups without wanted rows are not fetched. Raises Damaged if the
        file cannot be read, and CloudError if it cannot be fetched.
        """
        table, reader, wanted = await self._footer(info), reading.reader, reading.wanted
        assert isinstance(reader, RowReader)
        groups = [each for each in table.groups() if any(map(wanted, range(each.first, each.first + each.count)))]
        pieces = iter([_ColumnRange(each, info, start, end) for each in groups for start, end in each.ranges])
        parts: list[bytes] = []
        async with aclosing(Prefetch(self._fetch_columns, self.ahead).read(pieces)) as found:
            async for piece, data in found:
                if isinstance(data, CloudError):
                    raise data
                parts.append(data)
                if len(parts) == len(piece.group.ranges):
                    batches, parts = table.rows(piece.group, parts, reader, wanted), []
                    while (rows := await asyncio.to_thread(next, batches, None)) is not None:
                        yield rows

    async def _footer(self, info: ObjectInfo) -> ParquetTable:
        """Fetches the footer of a Parquet file. Raises TableBroken if it cannot be read, and CloudError if it cannot be
        fetched.
        """
        start = max(0, info.size - FOOTER_TAIL_BYTES)
        while True:
            tail = await fetch_range(self.store, info, start, info.size, self.retry, self.on_retry)
            try:
                return ParquetTable(tail, info.size, self.tables)
            except FooterLonger as longer:
                start = longer.start
            except RunRefused as error:
                raise RunRefused(f"{info.key}: {error.message}") from None

    def _fetch_columns(self, piece: _ColumnRange) -> asyncio.Future[bytes]:
        fetched = fetch_range(self.store, piece.info, piece.start, piece.end, self.retry, self.on_retry)
        return asyncio.ensure_future(fetched)

    def _object(self, piece: ObjectRange, cursor: Cursor) -> _Object:
        key, kind = piece.listed.info.key, piece.kind
        if self.lines is not None and (kind.many or self.chunking.each):
            lines = self.lines[key]
            last = max(lines, default=0) if kind.table else None
            return _Object(piece.ordinal, key, kind, self.chunking, self.tables, lines.__contains__, last)
        if key != cursor.key or not kind.many:
            return _Object(piece.ordinal, key, kind, self.chunking, self.tables, lambda place: True)
        if kind is Kind.ARCHIVE:
            done = (-1 if cursor.member is None else cursor.member, _LAST if cursor.line is None else cursor.line)
            return _Object(piece.ordinal, key, kind, self.chunking, self.tables, lambda place: _order(place) > done)
        line = cursor.line or 0
        return _Object(piece.ordinal, key, kind, self.chunking, self.tables, lambda number: number > line)

    async def _opened(self, reading: _Object, piece: ObjectRange, data: bytes) -> bytes | CloudError:
        """Begins to read the rows or members of an object. Returns ``data``, or the error if the archive's directory
        cannot be fetched.
        """
        info = piece.listed.info
        if piece.listed.failure is not None or not piece.kind.many:
            return data
        try:
            members = await self._directory(info) if piece.kind is Kind.ARCHIVE and is_zip(info.key) else None
            reading.begin(self.kind, Tar() if members is None else Zip(members))
        except Damaged as error:
            reading.broken = error
        except CloudError as error:
            return error
        return data

    async def _directory(self, info: ObjectInfo) -> list[ZipInfo]:
        """Returns the directory of a zip archive. Raises Damaged if it cannot be read, and CloudError if it cannot be
        fetched.
        """
        start = max(0, info.size - _TAIL_BYTES)
        while True:
            if info.size - start > MAX_DIRECTORY_BYTES + _TAIL_BYTES:
                raise Damaged(f"has a directory larger than {format_bytes(MAX_DIRECTORY_BYTES)}")
            tail = await fetch_range(self.store, info, start, info.size, self.retry, self.on_retry)
            try:
                return read_directory(tail, info.size)
            except DirectoryLonger as longer:
                start = longer.start

    def _fetch(self, piece: ObjectRange) -> asyncio.Future[bytes]:
        info, end = piece.listed.info, piece.start + piece.size
        return asyncio.ensure_future(fetch_range(self.store, info, piece.start, end, self.retry, self.on_retry))


def _order(place: tuple[int, int | None]) -> tuple[int, float]:
    """Returns the place of an archive's row, its member and line, in a form that can be compared.

    If the line is None, the place is the whole member or its end.
    """
    return place[0], _LAST if place[1] is None else place[1]


@dataclass
class _Object:
    """One object while it is read.

    ``wanted`` says whether a line, a member and line, or a chunk is to be read; ``last`` is the last line to be read,
    if known. ``broken`` says why nothing of the object can be read.
    """

    ordinal: int
    key: str
    kind: Kind
    chunking: Chunking
    tables: Tables
    wanted: Callable[[Any], bool]
    last: int | None = None
    damaged: bool = False
    broken: Damaged | None = None
    reader: RowReader | ArchiveReader | None = None
    blocks: list[bytes] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """True if no further row of the object is wanted or can be read."""
        if self.damaged or self.reader is None:
            return self.damaged
        if isinstance(self.reader, ArchiveReader):
            return self.reader.over
        return self.last is not None and self.reader.number >= self.last

    def begin(self, members: Kind | None, divider: Tar | Zip) -> None:
        """Begins to read. ``members`` is the kind of all members of an archive; None means that their names say the
        kind.

        Raises Damaged if the library for a compressed archive is missing.
        """
        if self.kind is Kind.ARCHIVE:
            whole = self.chunking.whole_bytes
            self.reader = ArchiveReader(self.key, members, self.tables, whole, self.wanted, divider)
        else:
            self.reader = RowReader(self.key, self.kind, self.tables, self.wanted)

    def lost(self, index: int, failure: Failure) -> Row:
        return Row(index, self.key, None, self.key, self.kind, failure=failure)

    def failed(self, index: int, piece: ObjectRange, failure: Failure) -> Iterator[Row]:
        """Yields the failed rows of an object that cannot be read any further. It is one row, or one for each chunk
        that is a row.
        """
        size = piece.listed.info.size
        if self.kind.many or self.chunking.chunk_bytes is None:
            yield self.lost(index, failure)
        elif self.chunking.joined:
            first = next(self.chunking.chunks(piece.start, piece.end, size))
            yield replace(self.lost(index, failure), chunk=replace(first, last=True))
        else:
            yield from self._without_data(index, self.chunking.chunks(piece.start, size, size), failure)

    def rows(self, index: int, piece: ObjectRange, data: bytes) -> Iterator[Row]:
        info, failure = piece.listed.info, piece.listed.failure
        if failure is None and not self.kind.many and self.tables.columns:
            problem = "is not a table, so it has no --column; exclude it with --glob"
            failure = Failure(RunRefused.code, f"{self.key}: {problem}")
        if failure is None and not self.kind.many and self.chunking.refuses(info.size):
            most = format_bytes(self.chunking.whole_bytes)
            problem = f"{info.size} bytes, larger than {most}, the limit for an object that is one row"
            failure = Failure("too_large", f"{self.key}: {problem}")
        if failure is None and piece.skipped and self.chunking.each:
            chunks = self.chunking.chunks(piece.start, piece.end, info.size)
            yield from self._without_data(index, chunks, Failure("skipped", self.key))
        elif piece.skipped or failure is not None:
            yield self.lost(index, failure or Failure("skipped", self.key))
        elif self.kind.many:
            yield from self._many(index, piece, data)
        elif self.chunking.chunk_bytes is not None:
            yield from self._chunks(index, piece, data, self.chunking.chunk_bytes)
        else:
            self.blocks.append(data)
            if piece.last:
                yield self._whole(index, b"".join(self.blocks))

    def _chunks(self, index: int, piece: ObjectRange, data: bytes, most: int) -> Iterator[Row]:
        size = piece.listed.info.size
        for chunk in self.chunking.chunks(piece.start, piece.end, size):
            start = chunk.offset - piece.start
            if self.wanted(chunk.index):
                part = data[start : start + most]
                row = Row(index, self.key, None, self._custom_id(chunk), self.kind, data=part, size=len(part))
                yield replace(row, chunk=chunk, whole=size)
            index += not chunk.joined

    def _without_data(self, index: int, chunks: Iterator[Chunk], failure: Failure) -> Iterator[Row]:
        for place, chunk in enumerate(chunks, index):
            if self.wanted(chunk.index):
                yield replace(self.lost(place, failure), custom_id=self._custom_id(chunk), chunk=chunk)

    def _custom_id(self, chunk: Chunk) -> str:
        return self.key if chunk.joined else f"{self.key}#{chunk.index}"

    def _many(self, index: int, piece: ObjectRange, data: bytes) -> Iterator[Row]:
        """Yields the rows of a table, or of the members of an archive."""
        try:
            if self.broken is not None:
                raise self.broken
            assert self.reader is not None
            for row in self.reader.feed(data):
                yield replace(row, index=index)
                index += 1
            if piece.last:
                for row in self.reader.end():
                    yield replace(row, index=index)
                    index += 1
        except Damaged as error:
            self.damaged = True
            yield self.lost(index, damage(self.key, self.kind, self.key, error))

    def _whole(self, index: int, data: bytes) -> Row:
        if self.kind is Kind.TEXT:
            try:
                data.decode("utf-8")
            except UnicodeDecodeError as error:
                return self.lost(index, Failure("invalid_text", f"{self.key}: is not UTF-8: byte {error.start}"))
        return Row(index, self.key, None, self.key, self.kind, data=data, size=len(data), whole=len(data))
