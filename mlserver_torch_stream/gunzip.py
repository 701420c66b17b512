"""Decompresses a gzip stream as its bytes arrive, in pieces of bounded size, even if a few bytes decompress to very
many.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

PIECE_BYTES = 2**20
_GZIP = zlib.MAX_WBITS | 16


class Damaged(ValueError):
    """The bytes are not gzip, or the stream is cut off."""


class Gunzip:
    """Decompresses a stream. Several members one after another are one stream, as for ``gzip``. ``padded`` means that
    zeros may follow a member, as tapes and block devices add them.
    """

    def __init__(self, *, padded: bool = False) -> None:
        self._padded = padded
        self._member = zlib.decompressobj(_GZIP)
        self._begun = False

    def feed(self, data: bytes, most: int = PIECE_BYTES) -> Iterator[bytes]:
        """Yields the decompressed bytes in pieces of at most ``most`` bytes. Raises Damaged."""
        while data:
            if self._member.eof:
                data = data.lstrip(b"\0") if self._padded else data
                if not data:
                    return
                self._member = zlib.decompressobj(_GZIP)
            try:
                piece = self._member.decompress(data, most)
            except zlib.error as error:
                raise Damaged(f"is not gzip: {error}") from None
            self._begun = True
            data = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
            if piece:
                yield piece

    def end(self) -> None:
        """Raises Damaged if the last member is cut off, or if there is no member."""
        if not self._begun:
            raise Damaged("is empty, so it is not gzip")
        if not self._member.eof:
            raise Damaged("is a gzip stream that ends too early")
