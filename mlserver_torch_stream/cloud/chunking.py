"""Divides objects that are not JSONL into rows: one row for the whole object, or one for each chunk of it.

Knows sizes, and neither bytes nor stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mlserver_torch_stream.cloud.rows import Chunk

WHOLE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Chunking:
    """``chunk_bytes``: the most bytes of a chunk; None: an object is one row. ``joined``: the answers to the
    chunks of an object are one output row. ``whole_bytes``: the most bytes of an object that is one row."""

    chunk_bytes: int | None = None
    joined: bool = True
    whole_bytes: int = WHOLE_BYTES

    @property
    def each(self) -> bool:
        """True if each chunk is an output row."""
        return self.chunk_bytes is not None and not self.joined

    def refuses(self, size: int) -> bool:
        """True for an object that is one row and is larger than ``whole_bytes``."""
        return self.chunk_bytes is None and size > self.whole_bytes

    def rows(self, size: int) -> int:
        """The number of output rows of an object of ``size`` bytes."""
        return self.count(size) if self.each else 1

    def block(self, block: int) -> int:
        """The bytes to fetch in one range, about ``block``: whole chunks."""
        return block if self.chunk_bytes is None else self.chunk_bytes * max(1, block // self.chunk_bytes)

    def chunks(self, start: int, end: int, size: int) -> Iterator[Chunk]:
        """The chunks that begin in bytes ``start`` to ``end`` of an object of ``size`` bytes."""
        assert self.chunk_bytes is not None and start % self.chunk_bytes == 0
        last = self.count(size) - 1
        first = start // self.chunk_bytes
        for index in range(first, first + self.count(end - start)):
            yield Chunk(index, index * self.chunk_bytes, index == last, self.joined)

    def config(self) -> dict[str, Any]:
        """The part of a run's configuration that these settings are; empty for the default ones."""
        if self.chunk_bytes is not None:
            return {"chunk_bytes": self.chunk_bytes, "rows": "object" if self.joined else "chunk"}
        return {} if self.whole_bytes == WHOLE_BYTES else {"whole_bytes": self.whole_bytes}

    def count(self, size: int) -> int:
        """The number of chunks of an object of ``size`` bytes; an empty one is one."""
        assert self.chunk_bytes is not None
        return max(1, -(-size // self.chunk_bytes))
