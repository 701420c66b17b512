"""Divides tables into rows as their bytes arrive, and chooses columns. Tables are JSON Lines, CSV or TSV, in any
encoding.

A record that cannot be read becomes a row with a failure instead of an exception. The row's line is the line in which
the record begins.
"""

from __future__ import annotations

import codecs
import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from mlserver_torch_stream.cloud.archives import Decompressor, decompressor
from mlserver_torch_stream.cloud.naming import compression_of, glob_pattern
from mlserver_torch_stream.cloud.parse import MAX_LINE_BYTES, Lines, blank, parse_object, parse_row
from mlserver_torch_stream.cloud.rows import Failure, Kind, MemberPlace, Row, RunRefused
from mlserver_torch_stream.gunzip import Damaged

_CUSTOM_ID = "custom_id"
PROMPT_FIELDS = ("prompt", _CUSTOM_ID)  # what a column of a table of prompts may be
_UTF8 = "utf-8"
_DELIMITERS = {Kind.CSV: ",", Kind.TSV: "\t"}
_JSON, _TEXT, _BYTES = "application/json", "text/plain; charset=utf-8", "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Column:
    """One chosen column.

    ``column`` is a column number, counted from 1, a name in the header, or a key of JSONL. ``name`` is the field of the
    row that gets the value; None means that the value is the whole row.
    """

    column: int | str
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> Column:
        """Reads COLUMN or COLUMN=FIELD. Raises ValueError if a name is empty or the column's number is 0."""
        column, equals, name = text.partition("=")
        if not column or (equals and not name) or column == "0":
            raise ValueError("must be COLUMN or COLUMN=FIELD, where COLUMN is a name or a number from 1")
        return cls(int(column) if column.isascii() and column.isdigit() else column, name or None)


@dataclass(frozen=True, slots=True)
class Tables:
    """How tables and archives are read. ``columns`` are the columns that form a row. If there are none, the names in
    the header are the keys of a row's body, as in JSONL. ``header`` means that the first record names the columns.
    ``quote`` is the quote character; it is empty for tables without quoting. With ``data``, rows are bytes for a
    handler or a tensor; otherwise they are prompts.

    With ``archives``, archives are read member by member, and only the members that match the glob ``members``, if it
    is set. Otherwise an archive is a whole object.
    """

    columns: tuple[Column, ...] = ()
    header: bool = False
    encoding: str = _UTF8
    delimiter: str | None = None
    quote: str = '"'
    data: bool = False
    archives: bool = False
    members: str | None = None

    def __post_init__(self) -> None:
        """Raises RunRefused, which names the option, if an option is wrong or contradicts another."""
        try:
            codecs.getincrementaldecoder(self.encoding)
            b"a".decode(self.encoding, "replace")
        except LookupError:
            raise RunRefused(f"--encoding: {self.encoding!r} is not a known text encoding") from None
        for option, value in (("delimiter", self.delimiter), ("quote", self.quote)):
            if value and (len(value) != 1 or not value.isascii() or value in "\r\n\0"):
                raise RunRefused(f"--{option}: must be one ASCII character other than a line break or NUL")
        if self.delimiter == "" or self.delimiter == self.quote:
            raise RunRefused("--delimiter: must be one ASCII character, other than --quote")
        names = [column.name for column in self.columns]
        if None in names and len(names) > 1:
            raise RunRefused("--column: one column can be the whole row; with several, give each a field: COLUMN=FIELD")
        if len(set(names)) < len(names):
            raise RunRefused("--column: two columns have the same field")
        if not self.data:
            for name in names:
                if name not in (*PROMPT_FIELDS, None):
                    fields = " or ".join(PROMPT_FIELDS)
                    raise RunRefused(f"--column: {name}: the field must be {fields} if rows are prompts")
            if names == [_CUSTOM_ID]:
                raise RunRefused("--column: no column has the field prompt")
        if self.members is not None:
            glob_pattern(self.members)

    @property
    def named(self) -> bool:
        """True if the first record of CSV and TSV is a header."""
        return self.header or not self.columns or any(isinstance(each.column, str) for each in self.columns)

    def config(self) -> dict[str, Any]:
        """Returns these settings as a part of a run's configuration; empty if all have their defaults."""
        named = {
            "columns": [[each.column, each.name] for each in self.columns],
            "header": self.header,
            "encoding": "" if self.encoding == _UTF8 else self.encoding,
            "delimiter": self.delimiter,
            "quote": None if self.quote == '"' else self.quote,
            "members": self.members,
        }
        given = {name: value for name, value in named.items() if value or (name == "quote" and value is not None)}
        return {"table": given} if given else {}


class TableBroken(Damaged):
    """No further row of a table can be read."""


class Record:
    """Reads one CSV record, line after line. ``fields`` has the bytes of each field that has been read completely."""

    def __init__(self, delimiter: bytes, quote: bytes) -> None:
        self._delimiter = delimiter
        self._quote = quote
        self._cell = bytearray()
        self._open = False
        self.fields: list[bytes] = []
        self.size = 0

    def add(self, line: bytes) -> bool:
        """Adds a line. Returns True if the record ends with this line. Raises ValueError if a quote or a carriage
        return is in a wrong place.
        """
        self.size += len(line) + 1
        text = line.removesuffix(b"\r")
        if not self._open and (not self._quote or self._quote not in text):
            self.fields = text.split(self._delimiter)
            _refuse_return(text)
            return True
        at, begins = 0, not self._open
        while True:
            if begins and text.startswith(self._quote, at):
                self._open, at = True, at + 1
            if self._open:
                end = self._quoted(text, at)
                if end < 0:
                    self._cell += line[len(text) :] + b"\n"
                    return False
                self._open, at = False, end
                if at < len(text) and not text.startswith(self._delimiter, at):
                    raise ValueError("a quoted field has text after its closing quote")
            end = text.find(self._delimiter, at)
            plain = text[at:] if end < 0 else text[at:end]
            _refuse_return(plain)
            self._cell += plain
            self.fields.append(bytes(self._cell))
            self._cell.clear()
            if end < 0:
                return True
            at, begins = end + 1, True

    def _quoted(self, text: bytes, at: int) -> int:
        """Returns the position after the closing quote of a field; -1 if the field goes on in the next line."""
        while (end := text.find(self._quote, at)) >= 0:
            self._cell += text[at:end]
            if not text.startswith(self._quote, end + 1):
                return end + 1
            self._cell += self._quote
            at = end + 2
        self._cell += text[at:]
        return -1


def _refuse_return(text: bytes) -> None:
    """Raises ValueError for a carriage return, which would hide the end of a record: tables of old Macs end lines
    with it.
    """
    if b"\r" in text:
        raise ValueError("has a carriage return outside of quotes; a line must end with a line feed")


class RowReader:
    """Reads the rows of one table: an object, or a member of an archive.

    ``wanted`` says whether the record that begins in a line is to be read. ``number`` is the line in which the last
    record began. All rows have the index 0. Methods raise Damaged if the compression or the encoding is broken.
    """

    def __init__(
        self,
        key: str,
        kind: Kind,
        tables: Tables,
        wanted: Callable[[int], bool] = lambda number: True,
        member: MemberPlace | None = None,
    ) -> None:
        name = key if member is None else member.name
        self._key, self._kind, self._tables, self._wanted, self._member = key, kind, tables, wanted, member
        self._where = key if member is None else f"{key}/{member.name}"
        self._decompressor: Decompressor = decompressor(compression_of(name, kind))
        self._text = (
            None if _plain(tables.encoding) else codecs.getincrementaldecoder(tables.encoding)("surrogateescape")
        )
        self._lines = Lines()
        self._record: Record | None = None
        self._header: dict[str, int] | None = None
        self.number = 0

    def feed(self, data: bytes) -> Iterator[Row]:
        for plain in self._decompressor.feed(data):
            for number, line in self._lines.feed(self._utf8(plain, False)):
                yield from self._line(number, line)

    def end(self) -> Iterator[Row]:
        self._decompressor.end()
        rest = self._utf8(b"", True)
        for number, line in (*self._lines.feed(rest), *self._lines.end()):
            yield from self._line(number, line)
        if self._record is not None:
            self._record = None
            yield from self._failed(self.number, "has a quote that is never closed")

    def record(self, number: int, record: Mapping[str, Any], names: Sequence[str]) -> Row:
        """Returns the row for a Parquet record, which maps columns to values. ``names`` are the names of the chosen
        columns, in order.
        """
        try:
            if not self._tables.columns:
                body = {name: _json_value(value) for name, value in record.items() if value is not None}
                return self._made(number, json.dumps(body).encode())
            whole = len(names) == 1 and self._tables.columns[0].name is None
            values: dict[str | None, Any] = {}
            for column, name in zip(self._tables.columns, names, strict=True):
                value = record[name]
                values[column.name] = value if whole and isinstance(value, bytes) else _json_value(value)
        except ValueError as error:
            return self._broken(number, str(error))
        return self._chosen(number, values)

    def _utf8(self, data: bytes, last: bool) -> bytes:
        """Returns the text in UTF-8.

        Bytes that cannot be decoded become invalid UTF-8, which is reported later for their line.
        """
        if self._text is None:
            return data
        try:
            return self._text.decode(data, last).encode(_UTF8, "surrogateescape")
        except UnicodeError as error:
            raise TableBroken(f"is not {self._tables.encoding} after line {self._lines.number}: {error}") from None

    def _line(self, number: int, line: bytes | None) -> Iterator[Row]:
        if number == 1 and line is not None:
            if self._text is None and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise TableBroken("begins with the byte order mark of UTF-16; give --encoding utf-16")
            line = line.removeprefix(codecs.BOM_UTF8)
        if self._kind is not Kind.JSONL:
            yield from self._record_line(number, line)
            return
        self.number = number
        if self._wanted(number) and not blank(line):
            yield self._json_row(number, line)

    def _record_line(self, number: int, line: bytes | None) -> Iterator[Row]:
        if self._record is None:
            if blank(line):
                return
            delimiter = self._tables.delimiter or _DELIMITERS[self._kind]
            self._record, self.number = Record(delimiter.encode(), self._tables.quote.encode()), number
        record, ended, trouble = self._record, False, ""
        try:
            ended = line is not None and record.add(line)
        except ValueError as error:
            trouble = str(error)
        if line is None or record.size > MAX_LINE_BYTES:
            trouble = f"is longer than {MAX_LINE_BYTES} bytes"
        if not ended and not trouble:
            return
        self._record = None
        if self._tables.named and self._header is None:
            self._read_header(record.fields, trouble)
        elif self._wanted(self.number):
            yield from self._failed(self.number, trouble) if trouble else (self._row(self.number, record.fields),)

    def _read_header(self, fields: Sequence[bytes], trouble: str) -> None:
        """Reads the names of the columns. Raises TableBroken if the header does not have the chosen columns."""
        self._header = {}
        try:
            if trouble:
                raise ValueError(trouble)
            names = [_decoded(field) for field in fields]
            missing = [c.column for c in self._tables.columns if isinstance(c.column, str) and c.column not in names]
            if missing:
                raise ValueError(f"names no column {missing[0]!r}")
            if len(set(names)) < len(names) and (not self._tables.columns or _twice(names, self._tables.columns)):
                raise ValueError("names a column twice")
            self._header = {name: place for place, name in enumerate(names)}
        except ValueError as error:
            raise TableBroken(f"its header, line {self.number}, {error}") from None

    def _row(self, number: int, fields: Sequence[bytes]) -> Row:
        try:
            header = self._header or {}
            if not self._tables.columns:
                if len(fields) != len(header):
                    raise ValueError(f"has {len(fields)} fields, but the header has {len(header)}")
                body = {name: _decoded(fields[place]) for name, place in header.items()}
                body = {name: value for name, value in body.items() if value or name != _CUSTOM_ID}
                return self._made(number, json.dumps(body).encode())
            values: dict[str | None, Any] = {}
            for each in self._tables.columns:
                place = each.column - 1 if isinstance(each.column, int) else header[each.column]
                if place >= len(fields):
                    raise ValueError(f"has only {len(fields)} fields, so there is no column {each.column}")
                values[each.name] = _decoded(fields[place])
        except ValueError as error:
            return self._broken(number, str(error))
        return self._chosen(number, values)

    def _json_row(self, number: int, line: bytes | None) -> Row:
        if not self._tables.columns:
            return self._made(number, line)
        try:
            value = parse_object(line)
            values: dict[str | None, Any] = {}
            for each in self._tables.columns:
                if str(each.column) not in value:
                    raise ValueError(f"has no key {each.column!r}")
                values[each.name] = value[str(each.column)]
        except ValueError as error:
            return self._broken(number, str(error))
        return self._chosen(number, values)

    def _made(self, number: int, line: bytes | None) -> Row:
        """Returns a row whose body is the line, a JSON object."""
        if self._tables.data:
            return self._data_row(number, line, _JSON)
        where = f"{self._where}:{number}"
        row = parse_row(0, self._key, number, line, where)
        return row if self._member is None else replace(row, member=self._member)

    def _chosen(self, number: int, values: Mapping[str | None, Any]) -> Row:
        """Returns a row of the chosen values, which are given by field."""
        if not self._tables.data:
            prompt = values.get("prompt", values.get(None))
            if not isinstance(prompt, str):
                return self._broken(number, "the prompt is not a string")
            name = values.get(_CUSTOM_ID)
            data = prompt.encode(_UTF8, "surrogatepass")
            name = str(name) if name else f"{self._where}:{number}"
            return Row(0, self._key, number, name, Kind.TEXT, data=data, size=len(data), member=self._member)
        if None not in values:
            return self._data_row(number, json.dumps(values, ensure_ascii=False).encode(_UTF8, "replace"), _JSON)
        value = values[None]
        if isinstance(value, bytes):
            return self._data_row(number, value, _BYTES)
        if isinstance(value, str):
            return self._data_row(number, value.encode(_UTF8, "replace"), _TEXT)
        return self._data_row(number, json.dumps(value, ensure_ascii=False).encode(_UTF8, "replace"), _JSON)

    def _data_row(self, number: int, data: bytes | None, content_type: str) -> Row:
        if data is None:
            return self._broken(number, f"is longer than {MAX_LINE_BYTES} bytes")
        size = len(data)
        return Row(
            *(0, self._key, number, f"{self._where}:{number}", Kind.BYTES),
            data=data,
            size=size,
            whole=size,
            member=self._member,
            content_type=content_type,
        )

    def _failed(self, number: int, trouble: str) -> Iterator[Row]:
        if self._wanted(number):
            yield self._broken(number, trouble)

    def _broken(self, number: int, trouble: str) -> Row:
        where = f"{self._member.name}: " if self._member is not None else ""
        failure = Failure("invalid_row", f"{where}line {number}: {trouble}")
        return Row(0, self._key, number, f"{self._where}:{number}", self._kind, failure=failure, member=self._member)


def _json_value(value: Any) -> Any:
    """Returns a Parquet value as JSON can represent it: dates and times in ISO 8601, decimals as text. Raises
    ValueError.
    """

    def as_text(part: Any) -> str:
        if isinstance(part, datetime.date | datetime.time):
            return part.isoformat()
        if isinstance(part, Decimal):
            return str(part)
        raise ValueError(f"has a value of type {type(part).__name__}, which JSON cannot represent")

    if value is None or isinstance(value, str | bool | int):
        return value
    return json.loads(json.dumps(value, default=as_text, allow_nan=False))


def _plain(encoding: str) -> bool:
    return codecs.lookup(encoding).name in (_UTF8, "ascii", "utf-8-sig")


def _decoded(field: bytes) -> str:
    """Returns the text of a field. Raises ValueError if the field is not UTF-8."""
    try:
        return field.decode(_UTF8)
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot be decoded: byte {error.start} of a field") from None


def _twice(names: Sequence[str], columns: Sequence[Column]) -> bool:
    """True if a column is chosen by a name that several columns have."""
    return any(isinstance(each.column, str) and names.count(each.column) > 1 for each in columns)
