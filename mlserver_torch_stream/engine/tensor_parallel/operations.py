"""Encodes the messages of rank 0 to the other ranks as 32-bit numbers: operations, and the batch of a forward.

An operation's numbers come after its kind and their count; a batch is its token ids, block tables and copies, after the
counts of each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum

from mlserver_torch_stream.engine.batch import Batch, BatchSequence

_NUMBER = "i"
_OF_SEQUENCE = 4  # numbers of a sequence before the lengths of its block tables


class Operation(IntEnum):
    """In brackets: the numbers of an operation. A cache has the same name on every rank."""

    CACHE = 1  # (name, page size, state slots, pages of each group): make a cache
    DROP = 2  # (name)
    FORWARD = 3  # (name, batch): run a batch on a cache
    PULSE = 4  # (): answer, as a sign of life
    STOP = 5  # (): end


def encode_operations(operations: Iterable[tuple[Operation, Sequence[int]]]) -> bytes:
    message = array(_NUMBER)
    for operation, numbers in operations:
        message.extend((operation, len(numbers)))
        message.extend(numbers)
    return message.tobytes()


def decode_operations(message: bytes) -> list[tuple[Operation, list[int]]]:
    """Raises RuntimeError for an operation that is not known."""
    numbers = array(_NUMBER)
    numbers.frombytes(message)
    operations = []
    reader = _Reader(numbers.tolist())
    while reader.left:
        kind, count = reader.take(2)
        try:
            operations.append((Operation(kind), reader.take(count)))
        except ValueError:
            raise RuntimeError(f"unknown operation {kind}: the ranks run different versions") from None
    return operations


def batch_numbers(batch: Batch) -> Sequence[int]:
    groups = len(batch.sequences[0].tables) if batch.sequences else 0
    numbers = array(_NUMBER, (len(batch.sequences), groups, len(batch.copies), len(batch.state_copies)))
    for each in batch.sequences:
        numbers.extend((each.count, each.start, each.wanted, each.state_slot))
        numbers.extend(map(len, each.tables))
    for each in batch.sequences:
        numbers.extend(each.token_ids)
        for table in each.tables:
            numbers.extend(table)
    for copies in (*batch.copies, *batch.state_copies):
        numbers.extend(copies)
    return numbers


def batch_of(numbers: Sequence[int]) -> Batch:
    """Returns the batch of ``batch_numbers``, with lists as its token ids and block tables."""
    reader = _Reader(numbers)
    sequences, groups, copies, state_copies = reader.take(4)
    heads = [reader.take(_OF_SEQUENCE + groups) for _ in range(sequences)]
    return Batch(
        tuple(_sequence(head, reader) for head in heads),
        tuple((group, source, target) for group, source, target in (reader.take(3) for _ in range(copies))),
        tuple((source, target) for source, target in (reader.take(2) for _ in range(state_copies))),
    )


def _sequence(head: Sequence[int], reader: _Reader) -> BatchSequence:
    count, start, wanted, state_slot, *lengths = head
    token_ids = reader.take(count)
    return BatchSequence(token_ids, start, tuple(reader.take(length) for length in lengths), wanted, state_slot)


class _Reader:
    """Reads numbers from the front."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = list(numbers)
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._numbers) - self._at

    def take(self, count: int) -> list[int]:
        self._at += count
        return self._numbers[self._at - count : self._at]
