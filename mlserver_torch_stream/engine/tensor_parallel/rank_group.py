"""Connects a rank with all other ranks: transfers messages from rank 0, and compares values across ranks.

If a rank is lost, each call raises a RuntimeError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mlserver_torch_stream.errors import LoadFailed

# A rank that does not answer for this long is lost. The end of a rank's process is noticed at once.
_SERVING_TIMEOUT = timedelta(seconds=20)
# Ranks load at different speeds: their disks and networks differ.
_LOADING_TIMEOUT = timedelta(hours=2)
# Time for the ranks to find out whether a forward that raised on one rank has raised on all: they all leave it at
# almost the same time.
_RAISING_TIMEOUT = timedelta(seconds=3)
# Bytes of a broadcast, enough for most steps (32 sequences of 1,500 tokens in pages of 16): a second broadcast costs as
# much as the first.
_FRAME = 16384


class RankGroup:
    """Connects this process, rank ``rank``, with the other ranks; there are ``size`` ranks in all.

    Blocks until all are connected.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._store = store  # rank 0 runs the server that the other ranks connect to
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_SERVING_TIMEOUT)
            self._loading = dist.new_group(backend="gloo", timeout=_LOADING_TIMEOUT)
            self._serving = dist.new_group(backend="gloo", timeout=_SERVING_TIMEOUT)
            self._raising = dist.new_group(backend="gloo", timeout=_RAISING_TIMEOUT)
        except BaseException:
            if dist.is_initialized():
                self.leave()
            raise

    # --- during the load ---

    def send(self, message: Any) -> None:
        """Sends JSON from rank 0 to all other ranks, which call ``receive``."""
        _send(json.dumps(message).encode(), self._loading)

    def receive(self) -> Any:
        """Returns the JSON that rank 0 has sent. Blocks until it arrives."""
        return json.loads(_receive(self._loading))

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Runs the ``with`` block on all ranks. If the block raises on one rank, raises LoadFailed on all of them."""
        problem = ""
        try:
            yield
        except Exception as error:
            problem = str(error) if isinstance(error, LoadFailed) else f"{type(error).__name__}: {error}"
        problems: list[Any] = [""] * self.size
        dist.all_gather_object(problems, problem, group=self._loading)
        for rank, text in enumerate(problems):
            if text:
                raise LoadFailed(text if rank == self.rank else f"rank {rank}: {text}")

    def smallest(self, number: int) -> int:
        """Returns the smallest of the numbers of all ranks."""
        given = torch.tensor([number])
        dist.all_reduce(given, op=dist.ReduceOp.MIN, group=self._loading)
        return int(given.item())

    def agrees(self, value: str) -> bool:
        """Returns whether ``value`` is the same on all ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._loading)
        return len(set(values)) == 1

    # --- during generation ---

    def send_operations(self, operations: bytes) -> None:
        """Sends the bytes from rank 0 to all other ranks, which call ``receive_operations``."""
        _send(operations, self._serving)

    def receive_operations(self) -> bytes:
        """Returns the bytes that rank 0 has sent. Blocks until they arrive."""
        return _receive(self._serving)

    def pulse(self) -> None:
        """Blocks until every rank has made this call."""
        dist.barrier(group=self._serving)

    def all_raised(self) -> bool:
        """Returns True if every rank makes this call now, after the same number of collective operations.

        Otherwise the ranks are lost.
        """
        try:
            place = torch.tensor([self._collectives()])
            places = [torch.zeros_like(place) for _ in range(self.size)]
            dist.all_gather(places, place, group=self._raising)
        except RuntimeError:
            return False
        return all(torch.equal(place, each) for each in places)

    def _collectives(self) -> int:
        """Returns how many collective operations the model has started.

        Raises RuntimeError if the backend does not count them.
        """
        count: int = dist.group.WORLD._get_sequence_number_for_group()
        return count

    def leave(self) -> None:
        """Closes this rank's connections to the other ranks."""
        dist.destroy_process_group()


def _send(body: bytes, group: dist.ProcessGroup) -> None:
    data = (len(body).to_bytes(8, "little") + body).ljust(_FRAME, b"\0")
    for part in (data[:_FRAME], data[_FRAME:]):
        if part:
            dist.broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8), 0, group=group)


def _receive(group: dist.ProcessGroup) -> bytes:
    data = _receive_bytes(_FRAME, group)
    end = 8 + int.from_bytes(data[:8], "little")
    if end > _FRAME:
        data += _receive_bytes(end - _FRAME, group)
    return data[8:end]


def _receive_bytes(count: int, group: dist.ProcessGroup) -> bytes:
    received = bytearray(count)
    dist.broadcast(torch.frombuffer(received, dtype=torch.uint8), 0, group=group)
    return bytes(received)
