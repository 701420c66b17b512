"""Lays a batch out as the arrays of numbers that the kernels read.

Knows nothing of kernels, of tensors or of layers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlserver_torch_stream.engine.batch import Batch

_LONG, _POINTER, _TABLE = "q", "q", "i"  # C's int64_t, an address, int32_t
_BYTES = 8  # of the first two


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Neighbouring tokens of a batch, as addresses of the numbers of ``kernels/model.h``'s Step."""

    sequences: int
    tokens: int
    wanted: int
    ids: int
    starts: int
    counts: int
    wants: int
    tables: int
    kept: tuple[array[int], ...] = ()  # the memory of some of these


class PackedBatch:
    """Owns the arrays for as long as it lives, but block tables that are arrays of int32: they must not grow."""

    def __init__(self, batch: Batch, groups: int) -> None:
        sequences = batch.sequences
        self._ids = array(_LONG)
        for each in sequences:
            self._ids.extend(each.token_ids)
        self._starts = array(_LONG, [each.start for each in sequences])
        self._counts = array(_LONG, [len(each.token_ids) for each in sequences])
        self._wants = array(_LONG, [each.wanted for each in sequences])
        self._held = [_as_array(each.tables[group]) for group in range(groups) for each in sequences]
        self._tables = array(_POINTER, map(_address, self._held))
        self.table_stride = len(sequences)
        self.wanted = sum(self._wants)
        self.longest = max(map(sum, zip(self._starts, self._counts, strict=True)))

    def parts(self, most: int) -> Iterator[BatchPart]:
        """Yields the tokens in order, in parts of almost equal size and of at most ``most`` tokens."""
        total = len(self._ids)
        count = -(-total // most)
        if count == 1:
            yield self._part(0, 0, self._starts, self._counts, self._wants)
            return
        sequence = done = 0  # tokens of the sequence that are in the parts so far
        for part in range(count):
            token, stop = part * total // count, (part + 1) * total // count
            first, at, starts, counts, wants = sequence, token, array(_LONG), array(_LONG), array(_LONG)
            while at < stop:
                left = self._counts[sequence] - done
                some = min(left, stop - at)
                starts.append(self._starts[sequence] + done)
                counts.append(some)
                wants.append(min(some, max(0, self._wants[sequence] - (left - some))))
                sequence, done = (sequence + 1, 0) if some == left else (sequence, done + some)
                at += some
            yield self._part(first, token, starts, counts, wants)

    def _part(self, sequence: int, token: int, starts: array[int], counts: array[int], wants: array[int]) -> BatchPart:
        return BatchPart(
            sequences=len(counts),
            tokens=sum(counts),
            wanted=sum(wants),
            ids=_address(self._ids) + token * _BYTES,
            starts=_address(starts),
            counts=_address(counts),
            wants=_address(wants),
            tables=_address(self._tables) + sequence * _BYTES,
            kept=(starts, counts, wants),
        )


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


def _as_array(table: Sequence[int]) -> array[int]:
    """Returns the table as an array of int32, without a copy if it is one."""
    return table if isinstance(table, array) and table.typecode == _TABLE else array(_TABLE, table)
