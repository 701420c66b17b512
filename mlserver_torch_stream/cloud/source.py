"""Reads the rows of objects, in order: chooses the ranges to fetch, and parses the rows in them.

Knows neither parts nor models. An object that cannot be read is one row with a failure, in its place.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.cloud_errors import CloudError, RunRefused
from mlserver_torch_stream.cloud.naming import is_gzip, kind_of
from mlserver_torch_stream.cloud.parse import Lines, blank, parse_row
from mlserver_torch_stream.cloud.prefetch import Prefetch, PrefetchedRange, fetch_range
from mlserver_torch_stream.cloud.rows import Failure, Kind, Row
from mlserver_torch_stream.cloud.store import ObjectInfo, Store
from mlserver_torch_stream.gunzip import Damaged, Gunzip

BLOCK_BYTES = 8 * 2**20  # larger objects are fetched in ranges of this size, several at a time
MOST_OBJECT_BYTES = 64 * 2**20  # of an object that is one row
_MOST = f"{MOST_OBJECT_BYTES // 2**20} MiB"


@dataclass(frozen=True, slots=True)
class Listed:
    """An object of the run, or the key of an object that could not be found, with the reason."""

    info: ObjectInfo
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where reading resumes: ``index`` is the next row's; it follows line ``line`` of ``key``, or all of ``key``."""

    index: int = 0
    key: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class ObjectRange:
    """Bytes ``start`` to ``end`` of an object; an empty range of an object that is not fetched."""

    ordinal: int
    listed: Listed
    kind: Kind
    start: int
    end: int
    last: bool
    skipped: bool = False

    @property
    def size(self) -> int:
        return self.end - self.start


Wanted = Callable[[int], bool]


@dataclass
class Source:
    """``objects``: in the order of the run. ``strict``: a JSONL object that cannot be read ends the run, because the
    number of its rows is unknown then and other workers count on it. ``lines``: key -> the only lines of that JSONL
    object that are rows; ranges behind the last of them are not fetched."""

    store: Store
    objects: Sequence[Listed]
    kind: Kind | None = None
    strict: bool = False
    retry: Retry = field(default_factory=Retry)
    ahead: PrefetchedRange = field(default_factory=PrefetchedRange)
    block: int = BLOCK_BYTES
    lines: Mapping[str, Collection[int]] | None = None
    on_retry: Callable[[CloudError], None] = lambda error: None

    def __post_init__(self) -> None:
        self._over: set[int] = set()  # ordinals of objects that are read to their end or given up

    def pieces(self, cursor: Cursor, wanted: Wanted) -> Iterator[ObjectRange]:
        """The ranges to fetch. An object that is one row is not fetched if that row is known to be unwanted."""
        index: int | None = cursor.index
        for ordinal in range(self._first(cursor), len(self.objects)):
            listed = self.objects[ordinal]
            kind = kind_of(listed.info.key, self.kind)
            if kind is Kind.JSONL:
                index = None  # the number of its rows is unknown here
            skip = kind is not Kind.JSONL and index is not None and not wanted(index)
            if index is not None:
                index += 1
            if skip or listed.failure is not None or too_large(kind, listed.info):
                yield ObjectRange(ordinal, listed, kind, 0, 0, True, skip)
                continue
            yield from self._blocks(ordinal, listed, kind)

    def _first(self, cursor: Cursor) -> int:
        """The first object with rows behind the cursor. Raises RunRefused where its object is not in the run."""
        if cursor.key is None:
            return 0
        for ordinal, listed in enumerate(self.objects):
            if listed.info.key == cursor.key:
                return ordinal + (cursor.line is None)
        raise RunRefused(f"--output: its last part ends with {cursor.key}, which is none of this run's objects")

    def _blocks(self, ordinal: int, listed: Listed, kind: Kind) -> Iterator[ObjectRange]:
        size, start = listed.info.size, 0
        while True:
            if ordinal in self._over:
                return
            end = min(size, start + self.block)
            yield ObjectRange(ordinal, listed, kind, start, end, end == size)
            start = end
            if start == size:
                return

    async def rows(self, cursor: Cursor = Cursor(), wanted: Wanted = lambda index: True) -> AsyncGenerator[Row, None]:
        """The rows behind ``cursor`` whose index is ``wanted``; the others are counted."""
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
                    rows: Iterator[Row] = iter([reading.lost(index, Failure(data.code, data.message))])
                else:
                    rows = reading.rows(index, piece, data)
                for row in rows:
                    index += 1
                    if wanted(row.index):
                        yield row
                if reading.over:
                    self._over.add(piece.ordinal)

    def _object(self, piece: ObjectRange, cursor: Cursor) -> _Object:
        key = piece.listed.info.key
        if self.lines is not None and piece.kind is Kind.JSONL:
            lines = self.lines[key]
            return _Object(piece.ordinal, key, piece.kind, lines.__contains__, max(lines, default=0))
        done = cursor.line or 0 if key == cursor.key else 0
        return _Object(piece.ordinal, key, piece.kind, lambda number: number > done)

    def _fetch(self, piece: ObjectRange) -> asyncio.Future[bytes]:
        info = piece.listed.info
        return asyncio.ensure_future(fetch_range(self.store, info, piece.start, piece.end, self.retry, self.on_retry))


@dataclass
class _Object:
    """One object while it is read. ``wanted``: whether a line is a row of this reading; ``last``: the last such line,
    if it is known."""

    ordinal: int
    key: str
    kind: Kind
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

    def rows(self, index: int, piece: ObjectRange, data: bytes) -> Iterator[Row]:
        failure = piece.listed.failure
        if failure is None and too_large(piece.kind, piece.listed.info):
            failure = Failure(
                "too_large",
                f"{self.key}: {piece.listed.info.size} bytes, over the {_MOST} of an object that is one row",
            )
        if piece.skipped or failure is not None:
            yield self.lost(index, failure or Failure("skipped", self.key))
        elif self.kind is Kind.JSONL:
            yield from self._lines(index, piece, data)
        else:
            self.blocks.append(data)
            if piece.last:
                yield self._whole(index, b"".join(self.blocks))

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
        return Row(index, self.key, None, self.key, self.kind, data=data, size=len(data))


def too_large(kind: Kind, info: ObjectInfo) -> bool:
    """True of an object that is one row and larger than is held in memory. JSONL of any size is read in blocks."""
    return kind is not Kind.JSONL and info.size > MOST_OBJECT_BYTES
