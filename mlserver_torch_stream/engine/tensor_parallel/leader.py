"""Sends rank 0's operations and signs of life to the other ranks, and detects the loss of a rank.

Only one thread sends at a time. A message consists of operations. Each operation is encoded as its kind, the count of
its numbers, and the numbers. A batch is encoded as counts, followed by its token ids, block tables and copies.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import count

from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.tensor_parallel.rank_group import RankGroup
from mlserver_torch_stream.engine.tensor_parallel.rendezvous import RankProcesses

_NUMBER = "i"
_OF_SEQUENCE = 4  # numbers of a sequence before the lengths of its block tables


class Operation(IntEnum):
    """The kinds of operations, with their numbers in brackets. A cache has the same name on every rank."""

    CACHE = 1  # (name, page size, state slots, pages of each group): make a cache
    DROP = 2  # (name)
    FORWARD = 3  # (name, batch): run a batch on a cache
    PULSE = 4  # (): answer, as a sign of life
    STOP = 5  # (): end


def encode_operations(operations: Iterable[tuple[Operation, Sequence[int]]]) -> bytes:
    """Returns one message with the operations in order, as 32-bit integers: for each, its kind, length and numbers."""
    message = array(_NUMBER)
    for operation, numbers in operations:
        message.extend((operation, len(numbers)))
        message.extend(numbers)
    return message.tobytes()


def decode_operations(message: bytes) -> list[tuple[Operation, list[int]]]:
    """Decodes a message of ``encode_operations``. Raises RuntimeError for an unknown operation."""
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
    """Returns a batch as a flat list of integers; on the other ranks, ``batch_of`` restores the batch from the list."""
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
    """Returns the batch that ``batch_numbers`` has encoded; its token ids and block tables are lists."""
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
    """Returns the numbers of a list in order, a few at a time."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = list(numbers)
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._numbers) - self._at

    def take(self, count: int) -> list[int]:
        self._at += count
        return self._numbers[self._at - count : self._at]


logger = logging.getLogger(__name__)

_PULSE_SECONDS = 5.0  # between two signs of life; after four times as long without an answer a rank is lost
_FATE_SECONDS = 1.0  # time to wait for the end of a process that has closed its connections
_END_SECONDS = 5.0  # time for the other ranks to end by themselves
PATIENCE = 5.0  # seconds in which a step notices that the other ranks do not answer


OnLoss = Callable[[BaseException, float], None]
"""A method that gets the error, and the seconds after which the engine's step is abandoned."""


class RanksLost(RuntimeError):
    """Raised if a rank has ended, or if its state differs from the state of the other ranks.

    The contents of all caches are lost.
    """


class Leader:
    """Collects the operations for the followers and sends them with the next forward or the next sign of life."""

    def __init__(self, group: RankGroup, other_ranks: RankProcesses) -> None:
        self.size = group.size
        self.lost: str | None = None
        self._group = group
        self._other_ranks = other_ranks
        self._sending_lock = threading.RLock()
        self._fate_lock = threading.Lock()
        self._notes: deque[tuple[Operation, tuple[int, ...]]] = deque()
        self._names = count(1)
        self._over = threading.Event()
        self._left = False
        self._listeners: list[weakref.WeakMethod[OnLoss]] = []
        other_ranks.watch(self.lose)
        threading.Thread(target=self._send_pulses, name="ranks-pulse", daemon=True).start()
        atexit.register(self.stop)

    def name(self) -> int:
        """Returns a new name for a cache that exists on every rank."""
        return next(self._names)

    def note(self, operation: Operation, *numbers: int) -> None:
        """Records an operation that the followers run before the next forward. Any thread may call it."""
        if not self._over.is_set():
            self._notes.append((operation, numbers))

    @contextmanager
    def sending(self, operation: Operation, *numbers: int) -> Iterator[None]:
        """Sends the recorded operations and then this operation. The followers run them while the ``with`` block runs.

        If the block raises an error, the states of the ranks differ, so all ranks are lost.
        """
        with self._sending_lock:
            self.check()
            if self._over.is_set():
                raise RanksLost("the other ranks were stopped")
            self.note(operation, *numbers)
            try:
                self._send()
                yield
            except BaseException as error:
                self.lose(f"{type(error).__name__}: {error}")
                raise

    def all_raised(self) -> bool:
        """Returns whether all ranks have raised errors at the same place of this forward, so that they can continue.

        Blocks until the ranks have compared their places.
        """
        return self._group.all_raised()

    def check(self) -> None:
        """Raises RanksLost if a rank is lost."""
        if self.lost is not None:
            raise RanksLost(f"the ranks have lost their connection: {self.lost}")

    def watch_loss(self, on_loss: OnLoss) -> None:
        """Calls ``on_loss`` once, on any thread: when the ranks are lost, or immediately if they are already lost."""
        with self._fate_lock:
            self._listeners = [each for each in self._listeners if each() is not None]
            self._listeners.append(weakref.WeakMethod(on_loss))
            lost = self.lost
        if lost is not None:
            on_loss(RanksLost(lost), PATIENCE)

    def lose(self, why: str) -> None:
        """Kills all ranks and reports the loss. Only the first call has an effect.

        If the process of a rank has ended, its end is reported as the reason instead of ``why``.
        """
        with self._fate_lock:
            if self._over.is_set():
                return
            self._over.set()
            self.lost = self._other_ranks.fate(_FATE_SECONDS) or why
            listeners = self._listeners
        logger.error("The ranks have lost their connection: %s", self.lost)
        self._other_ranks.kill()
        for listener in listeners:
            if (on_loss := listener()) is not None:
                on_loss(RanksLost(self.lost), PATIENCE)

    def stop(self) -> None:
        """Ends the other ranks. Blocks until the ranks have ended. A second call does nothing."""
        with self._fate_lock:
            orderly = not self._over.is_set()
            self._over.set()
        atexit.unregister(self.stop)
        if orderly and self._sending_lock.acquire(timeout=_END_SECONDS):
            try:
                self._notes.append((Operation.STOP, ()))
                self._send()
            except RuntimeError as error:
                logger.warning("The other ranks did not get the message to stop: %s", error)
            finally:
                self._sending_lock.release()
        self._other_ranks.end(_END_SECONDS if orderly else 0)
        if not self._left:
            self._left = True
            self._group.leave()

    def _send(self) -> None:
        operations = []
        while self._notes:
            operations.append(self._notes.popleft())
        self._group.send_operations(encode_operations(operations))

    def _send_pulses(self) -> None:
        while not self._over.wait(_PULSE_SECONDS):
            try:
                with self.sending(Operation.PULSE):
                    self._group.pulse()
            except RuntimeError:
                return  # ``lose`` has reported it
