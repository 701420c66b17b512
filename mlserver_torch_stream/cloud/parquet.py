"""Divides a Parquet file into rows: finds the bytes of the chosen columns of a row group, and decodes them.

It does not fetch anything. Its caller passes the bytes, and the file's other bytes are never needed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.cloud.rows import Row, RunRefused
from mlserver_torch_stream.cloud.tables import RowReader, TableBroken, Tables

FOOTER_TAIL_BYTES = 128 * 2**10  # most footers fit into the last 128 KiB of a file; pyarrow looks into 64 KiB
MAX_FOOTER_BYTES = 16 * 2**20
MAX_ROW_GROUP_BYTES = 512 * 2**20  # the size of the chosen columns in the file, that is, compressed
_END = 8  # bytes: the length of the footer, and the magic
_MAGIC = b"PAR1"
_SLACK = 100  # bytes that pyarrow reads after a column: some old writers left the dictionary's header out of its size
_GAP_BYTES = 64 * 2**10  # ranges with at most this gap between them are fetched as one
_BATCH_BYTES, _BATCH_ROWS = 8 * 2**20, 1024  # how much is decoded at a time


@dataclass
class FooterLonger(Exception):
    """The footer begins at byte ``start``, before the bytes that were passed."""

    start: int


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows from ``first`` to ``first + count - 1``, counted from 1. ``ranges`` are the byte ranges of the chosen
    columns.
    """

    index: int
    first: int
    count: int
    ranges: Sequence[tuple[int, int]]


def parquet_library() -> Any:
    """Returns pyarrow.parquet. Raises RunRefused if it is not installed; the message names the extra to install."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise RunRefused(
            "is Parquet, which needs the extra [parquet]: pip install 'mlserver-torch-stream[parquet]'"
        ) from None
    return pyarrow.parquet


class ParquetTable:
    """Reads a file of ``size`` bytes, whose last bytes are ``tail``.

    Raises TableBroken if the file cannot be read, FooterLonger if the footer is longer than ``tail``, and RunRefused if
    the library is missing.
    """

    def __init__(self, tail: bytes, size: int, tables: Tables) -> None:
        self._library = parquet_library()
        if len(tail) < _END or tail[-4:] != _MAGIC:
            raise TableBroken("is not a Parquet file, is encrypted, or ends early")
        footer = int.from_bytes(tail[-_END:-4], "little") + _END
        if footer > MAX_FOOTER_BYTES or footer > size:
            most = format_bytes(min(MAX_FOOTER_BYTES, size))
            raise TableBroken(f"has a footer of {footer} bytes; the limit is {most}")
        if footer > len(tail):
            raise FooterLonger(size - footer)
        self._size = size
        self._metadata = self._decoded(lambda: self._library.read_metadata(_Sparse([(size - len(tail), tail)], size)))
        schema = self._metadata.schema
        self._columns = _chosen(self._decoded(lambda: schema.to_arrow_schema().names), tables)
        paths = [schema.column(leaf).path for leaf in range(self._metadata.num_columns)]
        self._leaves = [
            leaf
            for leaf, path in enumerate(paths)
            if any(path == name or path.startswith(f"{name}.") for name in self._columns)
        ]

    def groups(self) -> Iterator[RowGroup]:
        """Yields the row groups. Raises TableBroken at a row group that is too large."""
        first = 1
        for index in range(self._metadata.num_row_groups):
            self._check(index)
            group = self._metadata.row_group(index)
            ranges = _merged(sorted(self._range(group.column(place)) for place in self._leaves))
            nbytes = sum(end - start for start, end in ranges)
            if nbytes > MAX_ROW_GROUP_BYTES:
                most = format_bytes(MAX_ROW_GROUP_BYTES)
                raise TableBroken(f"row group {index} has {nbytes} bytes in the chosen columns; the limit is {most}")
            yield RowGroup(index, first, group.num_rows, ranges)
            first += group.num_rows

    def _check(self, index: int) -> None:
        """Raises TableBroken if the footer contradicts itself in a row group. Reading the group makes pyarrow 26 raise
        an error in this case. If the group's columns were requested first, pyarrow would end the process instead.
        """

        def read() -> None:
            file = _Sparse([], self._size)
            opened = self._library.ParquetFile(file, metadata=self._metadata, pre_buffer=True)
            with suppress(_Unknown):
                next(opened.iter_batches(1, row_groups=[index], columns=self._columns), None)

        self._decoded(read)

    def _range(self, column: Any) -> tuple[int, int]:
        start = column.data_page_offset
        if column.dictionary_page_offset is not None:
            start = min(start, column.dictionary_page_offset)
        end = start + column.total_compressed_size
        if not 0 <= start <= end <= self._size:
            raise TableBroken("refers to bytes outside the file")
        return start, min(end + _SLACK, self._size)

    def rows(
        self, group: RowGroup, parts: Sequence[bytes], reader: RowReader, wanted: Callable[[int], bool]
    ) -> Iterator[list[Row]]:
        """Yields the ``wanted`` rows of a group in lists. ``parts`` are the bytes of the group's ranges. Raises
        TableBroken if a row cannot be decoded.
        """
        file = _Sparse([(start, part) for (start, _), part in zip(group.ranges, parts, strict=True)], self._size)
        nbytes = self._metadata.row_group(group.index).total_byte_size
        size = max(1, min(_BATCH_ROWS, _BATCH_BYTES * group.count // max(1, nbytes)))
        opened = self._decoded(lambda: self._library.ParquetFile(file, metadata=self._metadata))
        batches = opened.iter_batches(size, row_groups=[group.index], columns=self._columns)
        number = group.first
        while (batch := self._decoded(lambda: next(batches, None))) is not None:
            records = self._decoded(batch.to_pylist)
            numbered = enumerate(records, number)
            number += len(records)
            yield [reader.record(place, record, self._columns) for place, record in numbered if wanted(place)]

    def _decoded(self, call: Callable[[], Any]) -> Any:
        """Raises TableBroken if the library cannot read the file."""
        import pyarrow

        try:
            return call()
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise TableBroken(f"cannot be read: {why}") from None


def parquet_rows(data: bytes, tables: Tables, reader: RowReader, wanted: Callable[[int], bool]) -> Iterator[Row]:
    """Yields the ``wanted`` rows of a whole file. Raises TableBroken if the file cannot be read, and RunRefused if the
    library is missing.
    """
    table = ParquetTable(data, len(data), tables)
    for group in table.groups():
        for rows in table.rows(group, [data[start:end] for start, end in group.ranges], reader, wanted):
            yield from rows


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges ranges that are separated by at most ``_GAP_BYTES`` bytes."""
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and start <= merged[-1][1] + _GAP_BYTES:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _chosen(names: Sequence[str], tables: Tables) -> list[str]:
    """Returns the columns to read. Raises TableBroken if one is missing or two have the same name."""
    chosen: list[str] = []
    for each in tables.columns:
        if isinstance(each.column, int):
            if each.column > len(names):
                raise TableBroken(f"has only {len(names)} columns, so there is no column {each.column}")
            chosen.append(names[each.column - 1])
        elif each.column not in names:
            raise TableBroken(f"has no column {each.column!r}")
        else:
            chosen.append(each.column)
    chosen = chosen or list(names)
    twice = next((name for name in chosen if names.count(name) > 1), None)
    if twice is not None:
        raise TableBroken(f"has two columns named {twice!r}")
    return chosen


class _Unknown(OSError):
    """Some bytes of the file are not known, because they are outside the row groups that the footer describes."""


class _Sparse(io.RawIOBase):
    """A file of ``size`` bytes of which only ``parts`` are known. Each part is the offset of its first byte, and its
    bytes.
    """

    def __init__(self, parts: Sequence[tuple[int, bytes]], size: int) -> None:
        self._parts = parts
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, count: int = -1) -> bytes:
        """Reads at most ``count`` bytes. Raises _Unknown if they are not all in one part."""
        end = self._size if count < 0 else min(self._size, self._at + count)
        for start, part in self._parts:
            if start <= self._at and end <= start + len(part):
                found = part[self._at - start : end - start]
                self._at = end
                return found
        raise _Unknown("bytes outside of a row group")
