"""Opens gzip as it comes, in pieces of bounded size, however much a few bytes may unfold to.

Knows nothing of what is in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

PIECE_BYTES = 2**20
_GZIP = zlib.MAX_WBITS | 16


class Damaged(ValueError):
    """It is no gzip, or not to its end."""


class Gunzip:
    """Several members one after another are one stream, as gzip itself has it."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(_GZIP)
        self._begun = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Raises Damaged."""
        while data:
            if self._member.eof:
                data = data.lstrip(b"\0")  # padding of tapes and blocks
                if not data:
                    return
                self._member, self._begun = zlib.decompressobj(_GZIP), False
            try:
                piece = self._member.decompress(data, PIECE_BYTES)
            except zlib.error as error:
                raise Damaged(f"is no gzip: {error}") from None
            self._begun = True
            data = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
            if piece:
                yield piece

    def end(self) -> None:
        """Raises Damaged."""
        if self._begun and not self._member.eof:
            raise Damaged("is gzip that ends before its end")
