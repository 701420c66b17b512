"""Connects a rank with all others: messages from rank 0, and values on which all ranks agree.

Knows nothing of models or engines. If a rank is lost, each call raises a RuntimeError.
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

# A rank that does not answer for so long is lost; a rank whose process ends is noticed at once.
_SERVING_TIMEOUT = timedelta(seconds=20)
# Ranks load at different speeds: from other disks, through other networks.
_LOADING_TIMEOUT = timedelta(hours=2)
# Bytes of a broadcast, enough for the operations of most steps: a second broadcast costs as much as the first.
_FRAME = 4096


class RankGroup:
    """``size`` ranks, of which this is number ``rank``. Blocks until all are connected."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._store = store  # rank 0's is the server that the others have found
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_SERVING_TIMEOUT)
            self._loading = dist.new_group(backend="gloo", timeout=_LOADING_TIMEOUT)
            self._serving = dist.new_group(backend="gloo", timeout=_SERVING_TIMEOUT)
        except BaseException:
            if dist.is_initialized():
                self.leave()
            raise

    # --- during the load ---

    def send(self, message: Any) -> None:
        """Sends JSON from rank 0 to all others, which call ``receive``."""
        _send(message, self._loading)

    def receive(self) -> Any:
        return _receive(self._loading)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Runs the block on all ranks. If it raises on one, raises LoadFailed on all of them."""
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

    # --- during generation ---

    def send_operations(self, operations: Any) -> None:
        """Sends JSON from rank 0 to all others, which call ``receive_operations``."""
        _send(operations, self._serving)

    def receive_operations(self) -> Any:
        return _receive(self._serving)

    def pulse(self) -> None:
        """Returns when every rank has called it."""
        dist.barrier(group=self._serving)

    def leave(self) -> None:
        dist.destroy_process_group()


def _send(message: Any, group: dist.ProcessGroup) -> None:
    body = json.dumps(message).encode()
    data = (len(body).to_bytes(8, "little") + body).ljust(_FRAME, b"\0")
    for part in (data[:_FRAME], data[_FRAME:]):
        if part:
            dist.broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8), 0, group=group)


def _receive(group: dist.ProcessGroup) -> Any:
    data = _receive_bytes(_FRAME, group)
    end = 8 + int.from_bytes(data[:8], "little")
    if end > _FRAME:
        data += _receive_bytes(end - _FRAME, group)
    return json.loads(data[8:end])


def _receive_bytes(count: int, group: dist.ProcessGroup) -> bytes:
    received = torch.empty(count, dtype=torch.uint8)
    dist.broadcast(received, 0, group=group)
    return bytes(received.tolist())
