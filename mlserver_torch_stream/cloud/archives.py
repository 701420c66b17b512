"""Divides tar and zip archives into members as their bytes arrive, in pieces of bounded size, and decompresses streams.

Nothing is unpacked to disk. For each member there is an event with its name, then its bytes, then an event for its end.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlserver_torch_stream.gunzip import PIECE_BYTES, Damaged, Gunzip

MAX_MEMBERS = 1_000_000
MAX_DIRECTORY_BYTES = 8 * 2**20  # the maximum size of a zip archive's directory: some 100,000 members
_MAX_HEADER_BYTES = 2**20  # the maximum size of a member's extended header in tar
_SLICE = 64 * 2**10  # compressed bytes that are decompressed at a time
_ZSTD_SLICE = 2**10  # zstd does not bound its output, so its input is cut: a slice unfolds to at most 32 MiB
_ZSTD_WINDOW = 2**27  # the largest window that the zstd command accepts
_BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True, slots=True)
class MemberBegin:
    """Begins a member. ``trouble`` says why the member's bytes are not read; empty if they are read."""

    index: int
    name: str
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class MemberEnd:
    """Ends a member. ``trouble`` says why the member's last bytes are missing or wrong; empty if they are right."""

    trouble: str = ""


Event = MemberBegin | MemberEnd | bytes


class Decompressor(Protocol):
    """Decompresses a stream. ``feed`` and ``end`` raise Damaged."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decompresses the next bytes, and yields the result in pieces."""

    def end(self) -> None:
        """Checks that the compressed stream is complete."""


class Plain:
    """A stream that is not compressed."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        if data:
            yield data

    def end(self) -> None:
        return


class SlicedGunzip(Gunzip):
    """Passes a large block to zlib in slices, because for each piece zlib copies all input that it has not read yet."""

    def __init__(self) -> None:
        super().__init__(padded=True)

    def feed(self, data: bytes, most: int = PIECE_BYTES) -> Iterator[bytes]:
        for start in range(0, len(data), _SLICE):
            yield from super().feed(data[start : start + _SLICE], most)


class Unzstd:
    """Decompresses zstd. Consecutive frames are one stream."""

    def __init__(self) -> None:
        """Raises Damaged if the library is missing."""
        try:
            import zstandard
        except ImportError:
            raise Damaged("is zstd, which needs the extra [zstd]: pip install 'mlserver-torch-stream[zstd]'") from None
        self._error = zstandard.ZstdError
        self._library = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        self._frame: Any = None
        self._begun = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), _ZSTD_SLICE):
            rest = data[start : start + _ZSTD_SLICE]
            while rest:
                if self._frame is None:
                    self._frame, self._begun = self._library.decompressobj(), True
                try:
                    found = self._frame.decompress(rest)
                except self._error as error:
                    raise Damaged(f"is not zstd: {error}") from None
                rest = b""
                if self._frame.eof:
                    rest, self._frame = self._frame.unused_data, None
                for at in range(0, len(found), PIECE_BYTES):
                    yield found[at : at + PIECE_BYTES]

    def end(self) -> None:
        if not self._begun:
            raise Damaged("is empty, so it is not zstd")
        if self._frame is not None:
            raise Damaged("is a zstd stream that ends too early")


def decompressor(compression: str | None) -> Decompressor:
    """Returns a decompressor for this compression; None means not compressed. Raises Damaged if its library is
    missing."""
    return SlicedGunzip() if compression == "gzip" else Unzstd() if compression == "zstd" else Plain()


class Tar:
    """Reads the members of a tar archive in the POSIX (pax), GNU or an older format.

    Folders are skipped. A link, a device or a sparse file becomes a member with ``trouble``.
    """

    def __init__(self) -> None:
        self._header = bytearray()
        self._left = 0  # bytes of the current content that are still to come
        self._padding = 0
        self._taken = ""  # what the content is: "member", "pax", "global", "name", or "" if it is skipped
        self._extended = bytearray()
        self._global: dict[str, str] = {}
        self._next: dict[str, str] = {}
        self._members = 0
        self.over = False

    def feed(self, data: bytes) -> Iterator[Event]:
        """Reads the next bytes of the archive, and yields the events that they contain. Raises Damaged."""
        at = 0
        while at < len(data) and not self.over:
            if self._left:
                part = data[at : at + self._left]
                at += len(part)
                self._left -= len(part)
                yield from self._content(part)
            elif self._padding:
                skipped = min(self._padding, len(data) - at)
                at += skipped
                self._padding -= skipped
            else:
                part = data[at : at + _BLOCK - len(self._header)]
                at += len(part)
                self._header += part
                if len(self._header) == _BLOCK:
                    block = bytes(self._header)
                    self._header.clear()
                    yield from self._begin(block)

    def end(self) -> None:
        if not self.over:
            raise Damaged("is a tar archive that ends too early")

    def _content(self, part: bytes) -> Iterator[Event]:
        if self._taken == "member":
            yield part
            if not self._left:
                yield MemberEnd()
        elif self._taken:
            self._extended += part
            if not self._left:
                self._read_extended(bytes(self._extended))
                self._extended.clear()

    def _begin(self, block: bytes) -> Iterator[Event]:
        if not any(block):
            self.over = True
            return
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
            size = int(self._next.get("size", self._global.get("size", info.size)))
        except (tarfile.HeaderError, ValueError) as error:
            raise Damaged(f"is not tar: {error}") from None
        kinds = {tarfile.XHDTYPE: "pax", tarfile.SOLARIS_XHDTYPE: "pax", tarfile.XGLTYPE: "global"}
        kinds[tarfile.GNUTYPE_LONGNAME] = "name"
        extended = kinds.get(info.type, "")
        if extended or info.type == tarfile.GNUTYPE_LONGLINK:
            size = info.size
        if size < 0 or (extended and size > _MAX_HEADER_BYTES):
            raise Damaged(f"is not tar: a header says that {size} bytes follow")
        if not extended and info.type in tarfile.SUPPORTED_TYPES and not info.isreg():
            size = size if info.type in tarfile.GNU_TYPES else 0
        self._taken, self._left, self._padding = extended, size, -size % _BLOCK
        if not extended and info.type != tarfile.GNUTYPE_LONGLINK:
            yield from self._member(info)

    def _member(self, info: tarfile.TarInfo) -> Iterator[Event]:
        headers, self._next = {**self._global, **self._next}, {}
        if info.isdir():
            return
        trouble = ""
        if info.issparse() or any(name.startswith("GNU.sparse") for name in headers):
            trouble = "is a sparse file"
        elif not info.isreg():
            trouble = "is a link, not a file" if info.issym() or info.islnk() else "is a special file"
        index, self._members = self._members, self._members + 1
        if self._members > MAX_MEMBERS:
            raise Damaged(f"has more than {MAX_MEMBERS} members")
        yield MemberBegin(index, headers.get("path", info.name), trouble)
        if trouble:
            return
        self._taken = "member"
        if not self._left:
            yield MemberEnd()

    def _read_extended(self, data: bytes) -> None:
        if self._taken == "name":
            self._next["path"] = data.split(b"\0")[0].decode("utf-8", "replace")
            return
        headers = self._global if self._taken == "global" else self._next
        while data.strip(b"\0"):
            length, space, _ = data.partition(b" ")
            if not space or not length.isdigit() or len(length) > 7 or not len(length) + 2 < int(length) <= len(data):
                raise Damaged("is not tar: an extended header cannot be read")
            name, _, value = data[len(space) + len(length) : int(length) - 1].partition(b"=")
            headers[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
            data = data[int(length) :]


class DirectoryLonger(Exception):
    """The directory of a zip archive begins at ``start``, before the bytes that were fetched."""

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.start = start


class _Tail(io.RawIOBase):
    """A file object that has the size of an object in the store but only its last bytes."""

    def __init__(self, tail: bytes, size: int) -> None:
        self._tail, self._begin, self._size, self._at = tail, size - len(tail), size, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        if self._at < self._begin and size:
            raise DirectoryLonger(self._at)
        start = self._at - self._begin
        found = self._tail[start:] if size < 0 else self._tail[start : start + size]
        self._at += len(found)
        return found


def read_directory(tail: bytes, size: int) -> list[zipfile.ZipInfo]:
    """Returns the members of a zip archive of ``size`` bytes, in the order of their positions.

    Raises Damaged, or DirectoryLonger if ``tail`` does not contain the whole directory.
    """
    try:
        with zipfile.ZipFile(_Tail(tail, size)) as archive:
            return sorted(archive.infolist(), key=lambda info: info.header_offset)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, UnicodeError) as error:
        raise Damaged(f"is not zip: {error}") from None


class Zip:
    """Reads the members of a zip archive from its bytes, in order. ``members`` is the archive's directory.

    A member gets ``trouble`` if it is encrypted, or compressed by another method than deflate.
    """

    def __init__(self, members: Sequence[zipfile.ZipInfo]) -> None:
        self._members = list(members)
        self._at = 0  # bytes fed so far
        self._number = -1  # index of the current member
        self._index = 0
        self._content: _ZipContent | None = None
        self._local = bytearray()

    @property
    def over(self) -> bool:
        return self._content is None and self._number + 1 >= len(self._members)

    def feed(self, data: bytes) -> Iterator[Event]:
        """Reads the next bytes of the archive, and yields the events that they contain. Raises Damaged."""
        for start in range(0, len(data), _SLICE):
            rest = data[start : start + _SLICE]
            while rest and not self.over:
                before = len(rest)
                if self._content is None:
                    rest = yield from self._seek(rest)
                else:
                    part, rest = rest[: self._content.left], rest[self._content.left :]
                    yield from self._content.feed(part)
                self._at += before - len(rest)
                if self._content is not None and not self._content.left:
                    yield from self._content.end()
                    self._content = None

    def end(self) -> None:
        if not self.over:
            raise Damaged("is a zip archive that ends too early")

    def _seek(self, data: bytes) -> Generator[Event, None, bytes]:
        """Skips to the content of the next member; returns the bytes that are left."""
        info = self._members[self._number + 1]
        if not self._local and self._at > info.header_offset:
            raise Damaged("is not zip: members overlap")
        skipped = 0 if self._local else min(info.header_offset - self._at, len(data))
        data = data[skipped:]
        needed = 30 if len(self._local) < 30 else 30 + _lengths(self._local)
        part, rest = data[: needed - len(self._local)], data[needed - len(self._local) :]
        self._local += part
        if len(self._local) < 30 or len(self._local) < 30 + _lengths(self._local):
            return rest
        if not self._local.startswith(b"PK\3\4"):
            raise Damaged("is not zip: a member does not begin where the directory says")
        self._local.clear()
        self._number += 1
        self._content = _ZipContent(info)
        if not info.is_dir():
            self._content.shown = True
            trouble = _zip_trouble(info)
            yield MemberBegin(self._index, info.filename, trouble)
            self._index += 1
            self._content.shown = not trouble
        return rest


def _lengths(local: bytearray) -> int:
    """Returns the total length, in bytes, of the name and the extra fields that follow a local header."""
    return int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")


def _zip_trouble(info: zipfile.ZipInfo) -> str:
    if info.flag_bits & 1:
        return "is encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"is compressed with zip method {info.compress_type}, which is not supported"
    return ""


class _ZipContent:
    """Decompresses one member. ``left`` is the number of compressed bytes still to come; ``shown`` says whether the
    content becomes events.
    """

    def __init__(self, info: zipfile.ZipInfo) -> None:
        self._info = info
        self.left = info.compress_size
        self.shown = False
        self._sum = self._size = 0
        self._trouble = ""
        self._inflate = zlib.decompressobj(-zlib.MAX_WBITS) if info.compress_type == zipfile.ZIP_DEFLATED else None

    def feed(self, data: bytes) -> Iterator[Event]:
        self.left -= len(data)
        if not self.shown or self._trouble:
            return
        for piece in self._pieces(data):
            self._sum = zlib.crc32(piece, self._sum)
            self._size += len(piece)
            if self._size > self._info.file_size:
                self._trouble = f"is longer than the {self._info.file_size} bytes stated in the archive's directory"
                return
            yield piece

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        if self._inflate is None:
            yield data
            return
        while not self._inflate.eof:
            try:
                piece = self._inflate.decompress(data, PIECE_BYTES)
            except zlib.error as error:
                self._trouble = f"is damaged: {error}"
                return
            data = self._inflate.unconsumed_tail
            if piece:
                yield piece
            if not data and len(piece) < PIECE_BYTES:  # after a full piece more may follow
                return

    def end(self) -> Iterator[Event]:
        if not self.shown:
            return
        if not self._trouble and (self._size, self._sum) != (self._info.file_size, self._info.CRC):
            self._trouble = "is damaged: its size or checksum differs from the archive's directory"
        yield MemberEnd(self._trouble)
