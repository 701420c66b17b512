"""Reads the rows of objects, in order: chooses the ranges to fetch, and parses the rows in them.

An object that cannot be read is one row with a failure, in its place.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.naming import is_gzip, kind_of
from mlserver_torch_stream.cloud.parse import Chunking, Lines, blank, parse_row
from mlserver_torch_stream.cloud.prefetch import Prefetch, PrefetchedRange, fetch_range
from mlserver_torch_stream.cloud.rows import Chunk, CloudError, Failure, Kind, Row, RunRefused
from mlserver_torch_stream.cloud.store import ObjectInfo, Store
from mlserver_torch_stream.gunzip import Damaged, Gunzip

BLOCK_BYTES = 8 * 2**20  # larger objects are fetched in ranges of this size, several at a time


@dataclass(frozen=True, slots=True)
class Listed:
    """An object of the run, or the key of an object that could not be found, with the reason."""

    info: ObjectInfo
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where reading resumes: ``index`` is the next row's; it follows line ``line`` or chunk ``chunk`` of ``key``, or
    all of ``key``."""

    index: int = 0
    key: str | None = None
    line: int | None = None
    chunk: int | None = None

    @property
    def within(self) -> bool:
        """Whether this is a place within an object, of which more rows may follow."""
        return self.line is not None or self.chunk is not None


START = Cursor()


@dataclass(frozen=True, slots=True)
class ObjectRange:
    """Bytes ``start`` to ``end`` of an object. ``skipped``: they are not fetched, as none of their rows is wanted."""

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


Wanted = Callable[[int], bool]


@dataclass
class Source:
    """``objects``: in the order of the run. ``strict``: a JSONL object that cannot be read ends the run, because the
    number of its rows is unknown then and other workers count on it. ``lines``: key -> the only lines of that JSONL
    object, or chunks of another, that are rows; ranges after the last of them are not fetched."""

    store: Store
    objects: Sequence[Listed]
    kind: Kind | None = None
    strict: bool = False
    retry: Retry = field(default_factory=Retry)
    ahead: PrefetchedRange = field(default_factory=PrefetchedRange)
    block: int = BLOCK_BYTES
    chunking: Chunking = field(default_factory=Chunking)
    lines: Mapping[str, Collection[int]] | None = None
    on_retry: Callable[[CloudError], None] = lambda error: None

    def __post_init__(self) -> None:
        self._over: set[int] = set()  # ordinals of objects that are read to their end or given up

    def pieces(self, cursor: Cursor, wanted: Wanted) -> Iterator[ObjectRange]:
        """The ranges to fetch. What is known to make unwanted rows only is not fetched."""
        index: int | None = cursor.index
        for ordinal in range(self.first(cursor), len(self.objects)):
            listed = self.objects[ordinal]
            kind = kind_of(listed.info.key, self.kind)
            if kind is Kind.JSONL:
                index = None  # the number of its rows is unknown here
            elif self.chunking.each and listed.failure is None:
                first = cursor.chunk + 1 if cursor.chunk is not None and cursor.key == listed.info.key else 0
                yield from self._chunk_ranges(ordinal, listed, kind, first, index, wanted)
                index = None if index is None else index + self.chunking.rows(listed.info.size) - first
                continue
            skip = kind is not Kind.JSONL and index is not None and not wanted(index)
            if index is not None:
                index += 1
            if skip or listed.failure is not None or self._too_large(kind, listed.info):
                yield ObjectRange(ordinal, listed, kind, 0, 0, True, skip)
                continue
            yield from self._blocks(ordinal, listed, kind)

    def first(self, cursor: Cursor) -> int:
        """The first object with rows after the cursor. Raises RunRefused where its object is not in the run."""
        if cursor.key is None:
            return 0
        for ordinal, listed in enumerate(self.objects):
            if listed.info.key == cursor.key:
                return ordinal + (not cursor.within)
        raise RunRefused(f"--output: its last part ends with {cursor.key}, which is not an object of this run")

    def _too_large(self, kind: Kind, info: ObjectInfo) -> bool:
        return kind is not Kind.JSONL and self.chunking.refuses(info.size)

    def _blocks(self, ordinal: int, listed: Listed, kind: Kind, start: int = 0) -> Iterator[ObjectRange]:
        block = self.block if kind is Kind.JSONL else self.chunking.block(self.block)
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
        """The ranges from chunk ``first`` on. ``index``: that of its row, if it is known."""
        size = listed.info.size
        for piece in self._blocks(ordinal, listed, kind, first * (self.chunking.chunk_bytes or 0)):
            numbers = [chunk.index for chunk in self.chunking.chunks(piece.start, piece.end, size)]
            if self.lines is not None and not any(number in self.lines[listed.info.key] for number in numbers):
                continue
            skip = index is not None and not any(wanted(index + number - first) for number in numbers)
            yield replace(piece, skipped=skip)

    async def rows(self, cursor: Cursor = Cursor(), wanted: Wanted = lambda index: True) -> AsyncGenerator[Row, None]:
        """The rows after ``cursor`` whose index is ``wanted``. The index counts all rows."""
        prefetch: Prefetch[ObjectRange] = Prefetch(self._fetch, self.ahead)
        index = cursor.index
        reading: _Object | None = None
        async with aclosing(prefetch.read(self.pieces(cursor, wanted))) as found:
            async for piece, data in found:
                if piece.ordinal in self._over:
                    continue
                if reading is None or reading.ordinal != piece.ordinal:
                    reading = self._object(piece, cursor)
                if isinstance(data, CloudError):
                    self._over.add(piece.ordinal)
                    if self.strict and piece.kind is Kind.JSONL:
                        raise data
                    rows = reading.failed(index, piece, Failure(data.code, data.message))
                else:
                    rows = reading.rows(index, piece, data)
                for row in rows:
                    index = row.index + (row.chunk is None or row.chunk.last or not row.chunk.joined)
                    if wanted(row.index):
                        yield row
                if reading.over:
                    self._over.add(piece.ordinal)

    def _object(self, piece: ObjectRange, cursor: Cursor) -> _Object:
        key, jsonl = piece.listed.info.key, piece.kind is Kind.JSONL
        if self.lines is not None and (jsonl or self.chunking.each):
            lines = self.lines[key]
            last = max(lines, default=0) if jsonl else None
            return _Object(piece.ordinal, key, piece.kind, self.chunking, lines.__contains__, last)
        done = cursor.line or 0 if key == cursor.key else 0
        return _Object(piece.ordinal, key, piece.kind, self.chunking, lambda number: not jsonl or number > done)

    def _fetch(self, piece: ObjectRange) -> asyncio.Future[bytes]:
        info, end = piece.listed.info, piece.start + piece.size
        return asyncio.ensure_future(fetch_range(self.store, info, piece.start, end, self.retry, self.on_retry))


@dataclass
class _Object:
    """One object while it is read. ``wanted``: whether a line or a chunk is a row of this reading; ``last``: the last
    such line, if it is known."""

    ordinal: int
    key: str
    kind: Kind
    chunking: Chunking
    wanted: Callable[[int], bool]
    last: int | None = None
    damaged: bool = False
    lines: Lines = field(default_factory=Lines)
    gunzip: Gunzip = field(default_factory=lambda: Gunzip(padded=True))
    blocks: list[bytes] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """No further row of the object is wanted, or can be read."""
        return self.damaged or (self.last is not None and self.lines.number >= self.last)

    def lost(self, index: int, failure: Failure) -> Row:
        return Row(index, self.key, None, self.key, self.kind, failure=failure)

    def failed(self, index: int, piece: ObjectRange, failure: Failure) -> Iterator[Row]:
        """The rows of an object that cannot be read from this range on: of each of its chunks, where they are rows."""
        size = piece.listed.info.size
        if self.kind is Kind.JSONL or self.chunking.chunk_bytes is None:
            yield self.lost(index, failure)
        elif self.chunking.joined:
            first = next(self.chunking.chunks(piece.start, piece.end, size))
            yield replace(self.lost(index, failure), chunk=replace(first, last=True))
        else:
            yield from self._without_data(index, self.chunking.chunks(piece.start, size, size), failure)

    def rows(self, index: int, piece: ObjectRange, data: bytes) -> Iterator[Row]:
        info, failure = piece.listed.info, piece.listed.failure
        if failure is None and self.kind is not Kind.JSONL and self.chunking.refuses(info.size):
            most = format_bytes(self.chunking.whole_bytes)
            failure = Failure(
                "too_large", f"{self.key}: {info.size} bytes, over the {most} of an object that is one row"
            )
        if failure is None and piece.skipped and self.chunking.each:
            chunks = self.chunking.chunks(piece.start, piece.end, info.size)
            yield from self._without_data(index, chunks, Failure("skipped", self.key))
        elif piece.skipped or failure is not None:
            yield self.lost(index, failure or Failure("skipped", self.key))
        elif self.kind is Kind.JSONL:
            yield from self._lines(index, piece, data)
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

    def _lines(self, index: int, piece: ObjectRange, data: bytes) -> Iterator[Row]:
        try:
            for number, line in self._numbered(piece, data):
                if number == 1 and line is not None:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if self.wanted(number) and not blank(line):
                    yield parse_row(index, self.key, number, line)
                    index += 1
        except Damaged as error:
            self.damaged = True
            yield self.lost(index, Failure("invalid_gzip", f"{self.key}: {error}"))

    def _numbered(self, piece: ObjectRange, data: bytes) -> Iterator[tuple[int, bytes | None]]:
        zipped = is_gzip(self.key, self.kind)
        for plain in self.gunzip.feed(data) if zipped else (data,):
            yield from self.lines.feed(plain)
        if piece.last:
            if zipped:
                self.gunzip.end()
            yield from self.lines.end()

    def _whole(self, index: int, data: bytes) -> Row:
        if self.kind is Kind.TEXT:
            try:
                data.decode("utf-8")
            except UnicodeDecodeError as error:
                return self.lost(index, Failure("invalid_text", f"{self.key}: is not UTF-8: byte {error.start}"))
        return Row(index, self.key, None, self.key, self.kind, data=data, size=len(data), whole=len(data))
