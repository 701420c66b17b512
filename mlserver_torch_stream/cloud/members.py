"""Reads the rows of an archive's members, in their order: the records of tables, and other members as whole rows.

A member that cannot be read becomes a row with a failure, and reading continues with the next member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.cloud.archives import Decompressor, Event, MemberBegin, MemberEnd, Tar, Zip, decompressor
from mlserver_torch_stream.cloud.naming import compression_of, glob_pattern, is_archive, kind_of
from mlserver_torch_stream.cloud.parquet import parquet_rows
from mlserver_torch_stream.cloud.rows import Failure, Kind, MemberPlace, Row, RunRefused
from mlserver_torch_stream.cloud.tables import RowReader, TableBroken, Tables
from mlserver_torch_stream.gunzip import Damaged

Wanted = Callable[[tuple[int, int | None]], bool]
"""Returns whether a row is to be read, given the number of its member and its line; a line of None is the whole member.
"""


class ArchiveReader:
    """Reads the rows of one archive. All rows have the index 0. Methods raise Damaged if the archive itself is broken.

    ``kind`` is the kind of all members; None means that the name of each member tells its kind. ``whole_bytes`` is the
    maximum number of bytes of a member that is one row.
    """

    def __init__(
        self, key: str, kind: Kind | None, tables: Tables, whole_bytes: int, wanted: Wanted, divider: Tar | Zip
    ) -> None:
        self._key, self._kind, self._tables, self._whole_bytes = key, kind, tables, whole_bytes
        self._wanted = wanted
        self._divider = divider
        self._decompressor: Decompressor = decompressor(compression_of(key, Kind.ARCHIVE))
        self._chosen = None if tables.members is None else glob_pattern(tables.members)
        self._table: RowReader | None = None
        self._whole: _WholeMember | None = None
        self._place = MemberPlace(0, "")

    @property
    def over(self) -> bool:
        """True if the directory of a zip archive lists no further member. A tar archive is always read to its end."""
        return isinstance(self._divider, Zip) and self._divider.over

    def feed(self, data: bytes) -> Iterator[Row]:
        for plain in self._decompressor.feed(data):
            for event in self._divider.feed(plain):
                yield from self._take(event)

    def end(self) -> Iterator[Row]:
        self._decompressor.end()
        self._divider.end()
        yield from ()

    def _take(self, event: Event) -> Iterator[Row]:
        if isinstance(event, MemberBegin):
            yield from self._begin(event)
            return
        try:
            if isinstance(event, MemberEnd):
                yield from self._end(event)
            elif self._table is not None:
                yield from self._table.feed(event)
            elif self._whole is not None:
                self._whole.add(event)
        except Damaged as error:
            self._table = None
            yield from self._failed(damage(self._place.name, kind_of(self._place.name, self._kind), self._name, error))

    @property
    def _name(self) -> str:
        return f"{self._key}/{self._place.name}"

    def _begin(self, member: MemberBegin) -> Iterator[Row]:
        self._place, self._table, self._whole = MemberPlace(member.index, member.name), None, None
        if self._chosen is not None and not self._chosen.fullmatch(member.name.removeprefix("./")):
            return
        kind = kind_of(member.name, self._kind)
        trouble = member.trouble
        if not trouble and not kind.many:
            if self._tables.columns:
                trouble = "is not a table, so it has no --column; exclude it with --members"
            elif is_archive(member.name) and not self._tables.data:
                trouble = "is an archive inside an archive, which is not opened; exclude it with --members"
        if trouble:
            yield from self._failed(Failure(RunRefused.code, f"{self._name}: {trouble}"))
        elif kind.table:
            index = member.index
            try:
                self._table = RowReader(
                    self._key, kind, self._tables, lambda line: self._wanted((index, line)), self._place
                )
            except Damaged as error:
                yield from self._failed(
                    damage(self._place.name, kind_of(self._place.name, self._kind), self._name, error)
                )
        elif kind is Kind.PARQUET or self._wanted((member.index, None)):
            self._whole = _WholeMember(kind, self._whole_bytes)

    def _end(self, event: MemberEnd) -> Iterator[Row]:
        if self._table is None and self._whole is None:
            return
        if event.trouble:
            raise Damaged(event.trouble)
        if self._table is not None:
            yield from self._table.end()
        if self._whole is not None:
            kind, data, failure = self._whole.kind, self._whole.data, self._whole.failure(self._name)
            if failure is not None:
                yield from self._failed(failure)
            elif kind is Kind.PARQUET:
                yield from self._parquet(data)
            else:
                size = len(data)
                row = Row(0, self._key, None, self._name, kind, data=data, size=size, whole=size, member=self._place)
                yield row
        self._table = self._whole = None

    def _parquet(self, data: bytes) -> Iterator[Row]:
        index = self._place.index
        reader = RowReader(self._key, Kind.PARQUET, self._tables, member=self._place)
        try:
            yield from parquet_rows(data, self._tables, reader, lambda line: self._wanted((index, line)))
        except RunRefused as error:
            yield from self._failed(Failure(error.code, f"{self._name}: {error.message}"))

    def _failed(self, failure: Failure) -> Iterator[Row]:
        self._whole = None
        if self._wanted((self._place.index, None)):
            yield Row(0, self._key, None, self._name, Kind.BYTES, failure=failure, member=self._place)


class _WholeMember:
    """Collects a member that is one row or a Parquet file. If the member is too large, none of its bytes are kept."""

    def __init__(self, kind: Kind, most: int) -> None:
        self.kind = kind
        self._most = most
        self._pieces: list[bytes] = []
        self._size = 0

    @property
    def data(self) -> bytes:
        return b"".join(self._pieces)

    def add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._most:
            self._pieces.clear()
        else:
            self._pieces.append(piece)

    def failure(self, name: str) -> Failure | None:
        if self._size > self._most:
            return Failure(
                "too_large",
                f"{name}: larger than {format_bytes(self._most)}, the limit for a member that is read as a whole",
            )
        if self.kind is Kind.TEXT:
            try:
                self.data.decode("utf-8")
            except UnicodeDecodeError as error:
                return Failure("invalid_text", f"{name}: is not UTF-8: byte {error.start}")
        return None


def damage(key: str, kind: Kind, name: str, error: Damaged) -> Failure:
    """Returns the failure of a table, an archive or a member that cannot be read further. The failure's code names what
    broke.
    """
    if isinstance(error, TableBroken):
        return Failure("invalid_table", f"{name}: {error}")
    packed = None if kind is Kind.ARCHIVE else compression_of(key, kind)
    return Failure(f"invalid_{packed or 'archive'}", f"{name}: {error}")
