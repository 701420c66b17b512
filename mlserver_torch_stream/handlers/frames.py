"""Frames the messages between the server and a worker: a JSON header and raw bytes, each preceded by its length.

The server never unpickles bytes from a worker; a worker unpickles the YAML in its first message.
"""

from __future__ import annotations

import io
import json
import re
import select
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

_LENGTHS = struct.Struct("!II")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_ENCODER = json.JSONEncoder(ensure_ascii=False)
MAX_BYTES = 1 << 30  # the bound of a message's header, and of its body; larger values are refused before the send
MAX_READ = 1 << 18  # bytes that are read from a connection at once
DROPPED = "dropped"  # in the header of a frame whose body was too large and is missing: the body's size in bytes


class BrokenFrame(Exception):
    """Raised if a frame of the other side is too large or has no valid header."""


def encode_frame(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """Encodes a message."""
    return begin_frame(encode_header(header), len(body)) + body


def encode_header(header: Mapping[str, Any]) -> bytes:
    """Encodes a header. A lone surrogate, which UTF-8 cannot encode, is sent as its escape, such as ``\\ud800``."""
    text = _ENCODER.encode(header)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub(lambda found: f"\\\\u{ord(found[0]):04x}", text).encode()


def begin_frame(header: bytes, body_bytes: int) -> bytes:
    """Returns the beginning of a frame: the lengths and the encoded header. The body follows."""
    return _LENGTHS.pack(len(header), body_bytes) + header


def bytes_in_frame(value: bytes, *texts: str) -> int:
    """Returns an upper bound on the bytes of a frame with this value and these texts.

    JSON writes a character in up to 7 bytes.
    """
    return len(value) + 7 * sum(map(len, texts)) + 100


class FrameBuffer:
    """Collects bytes and returns the complete frames.

    ``parse`` parses a header, or raises ValueError. ``max_bytes`` is the limit for a header, and for a body. With
    ``drops``, a body that is too large is dropped as it arrives, and its frame has ``DROPPED`` in its header.
    """

    def __init__(
        self, parse: Callable[[bytes], Any] = json.loads, max_bytes: int = MAX_BYTES, drops: bool = False
    ) -> None:
        self._parse = parse
        self._max_bytes = max_bytes
        self._drops = drops
        self._unwanted = 0  # bytes of a dropped body that have not arrived yet
        self._data = bytearray()
        self._taken = 0  # bytes at the buffer's beginning that were returned already

    def feed(self, data: bytes) -> None:
        """Appends bytes that were read from the connection."""
        if self._taken:
            del self._data[: self._taken]
            self._taken = 0
        self._data += data

    def take(self) -> tuple[dict[str, Any], bytes] | None:
        """Removes and returns the next frame; None if it is not complete yet. Raises BrokenFrame if it is not valid."""
        if self._unwanted:
            passed = min(self._unwanted, len(self._data) - self._taken)
            self._taken, self._unwanted = self._taken + passed, self._unwanted - passed
        start = self._taken + _LENGTHS.size
        if len(self._data) < start:
            return None
        header_bytes, body_bytes = _lengths(self._data, self._taken, self._max_bytes, self._drops)
        dropped = body_bytes if body_bytes > self._max_bytes else 0
        middle, end = start + header_bytes, start + header_bytes + body_bytes - dropped
        if len(self._data) < end:
            return None
        with memoryview(self._data) as view:
            encoded, body = bytes(view[start:middle]), bytes(view[middle:end])
        self._taken, self._unwanted = end, dropped
        if end == len(self._data):
            self._data, self._taken = bytearray(), 0
        header = _header(encoded, self._parse)
        return {**header, DROPPED: dropped} if dropped else header, body


class _Arrivals(io.RawIOBase):
    """The bytes that arrive on a blocking socket.

    A thread in ``recv`` is woken whenever the other side reads what was sent on this socket, that is once for each
    token of a stream. A thread in ``poll`` is only woken when there is something to read.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._poll.poll()
        return self._connection.recv_into(buffer)


class FrameReader:
    """Reads frames from a blocking socket, many small ones with one system call."""

    def __init__(self, connection: socket.socket, max_bytes: int = MAX_BYTES) -> None:
        self._file = io.BufferedReader(_Arrivals(connection), MAX_READ)
        self._max_bytes = max_bytes

    def read(self) -> tuple[dict[str, Any], bytes] | None:
        """Returns the next frame; None at the end of the connection.

        Raises BrokenFrame if the frame is malformed or too large, and OSError if the connection breaks.
        """
        if (begun := self._begin()) is None:
            return None
        header, body_bytes = begun
        body = self._file.read(body_bytes)
        return None if len(body) < body_bytes else (header, body)

    def read_values(self) -> tuple[dict[str, Any], list[bytes]] | None:
        """Reads as ``read`` does, but the body as values of the ``sizes`` in the header; without them, as one value."""
        if (begun := self._begin()) is None:
            return None
        header, body_bytes = begun
        sizes = header.get("sizes", [body_bytes])
        if min(sizes, default=0) < 0 or sum(sizes) != body_bytes:
            raise BrokenFrame(f"the values have {sum(sizes)} bytes, and the body has {body_bytes}")
        values = [self._file.read(size) for size in sizes]
        return None if sum(map(len, values)) < body_bytes else (header, values)

    def _begin(self) -> tuple[dict[str, Any], int] | None:
        """Reads the header; also returns the size of the body."""
        lengths = self._file.read(_LENGTHS.size)
        if len(lengths) < _LENGTHS.size:
            return None
        header_bytes, body_bytes = _lengths(lengths, max_bytes=self._max_bytes)
        encoded = self._file.read(header_bytes)
        return None if len(encoded) < header_bytes else (_header(encoded), body_bytes)

    def close(self) -> None:
        """Closes the reader's file, not the socket."""
        self._file.close()


def _lengths(
    data: bytes | bytearray, start: int = 0, max_bytes: int = MAX_BYTES, drops: bool = False
) -> tuple[int, int]:
    header_bytes, body_bytes = _LENGTHS.unpack_from(data, start)
    largest = header_bytes if drops else max(header_bytes, body_bytes)
    if largest > max_bytes:
        raise BrokenFrame(f"a message of {largest} bytes is too large: the limit is {max_bytes}")
    return header_bytes, body_bytes


def _header(encoded: bytes, parse: Callable[[bytes], Any] = json.loads) -> dict[str, Any]:
    try:
        header = parse(encoded)
    except (ValueError, RecursionError) as error:
        raise BrokenFrame(f"the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise BrokenFrame("the header is not a JSON object")
    return header


def split(body: bytes, lengths: list[int]) -> list[bytes]:
    """Splits a body into parts of these lengths."""
    parts = []
    position = 0
    for length in lengths:
        parts.append(body[position : position + length])
        position += length
    return parts
