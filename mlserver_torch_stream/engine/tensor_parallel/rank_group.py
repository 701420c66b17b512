"""One rank's seat among all: messages from rank 0 to the others, and what all have to agree on.

Knows nothing of models or engines. What a lost rank leaves behind is a RuntimeError from any of these calls.
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

# A rank that says nothing for so long is lost; one whose process ends is noticed at once.
SILENCE = timedelta(seconds=20)
# Ranks load at different speeds: from other disks, through other networks.
_LOADING = timedelta(hours=2)
_FRAME = 4096  # bytes, which hold what most steps have to say: a second broadcast costs as much as the first
_PROBLEM = 512  # bytes of what a rank may say of its failure


class RankGroup:
    """``size`` ranks, of which this is number ``rank``. Blocks until all are there."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._store = store  # rank 0's is the server that the others have found
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=SILENCE)
            self._loading = dist.new_group(backend="gloo", timeout=_LOADING)
            self._serving = dist.new_group(backend="gloo", timeout=SILENCE)
        except BaseException:
            if dist.is_initialized():
                self.leave()
            raise

    # --- while they load ---

    def tell(self, message: Any) -> None:
        """From rank 0 to all others, which ``hear`` it."""
        _send(message, self._loading)

    def hear(self) -> Any:
        return _receive(self._loading)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A stretch of work that all ranks do, or none: raises LoadFailed on all of them if it raises on one."""
        problem = ""
        try:
            yield
        except Exception as error:
            problem = str(error) if isinstance(error, LoadFailed) else f"{type(error).__name__}: {error}"
        told = torch.zeros(_PROBLEM, dtype=torch.uint8)
        _put(told, problem.encode()[:_PROBLEM])
        everybodys = [torch.empty_like(told) for _ in range(self.size)]
        dist.all_gather(everybodys, told, group=self._loading)
        for rank, one in enumerate(everybodys):
            if text := bytes(one.tolist()).rstrip(b"\0").decode(errors="replace"):
                raise LoadFailed(text if rank == self.rank else f"rank {rank}: {text}")

    def smallest(self, number: int) -> int:
        """Of the numbers that all ranks give."""
        given = torch.tensor([number])
        dist.all_reduce(given, op=dist.ReduceOp.MIN, group=self._loading)
        return int(given.item())

    # --- while they serve ---

    def command(self, operations: Any) -> None:
        """From rank 0 to all others, which are in ``next_command``."""
        _send(operations, self._serving)

    def next_command(self) -> Any:
        return _receive(self._serving)

    def pulse(self) -> None:
        """Returns if all are alive: each has called it."""
        dist.barrier(group=self._serving)

    def leave(self) -> None:
        dist.destroy_process_group()


def _send(message: Any, group: dist.ProcessGroup) -> None:
    body = json.dumps(message).encode()
    data = len(body).to_bytes(8, "little") + body
    frame = torch.zeros(_FRAME, dtype=torch.uint8)
    _put(frame, data[:_FRAME])
    dist.broadcast(frame, 0, group=group)
    if rest := data[_FRAME:]:
        dist.broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8), 0, group=group)


def _receive(group: dist.ProcessGroup) -> Any:
    frame = torch.empty(_FRAME, dtype=torch.uint8)
    dist.broadcast(frame, 0, group=group)
    data = bytes(frame.tolist())
    length = int.from_bytes(data[:8], "little")
    body = data[8 : 8 + length]
    if len(body) < length:
        rest = torch.empty(length - len(body), dtype=torch.uint8)
        dist.broadcast(rest, 0, group=group)
        body += bytes(rest.tolist())
    return json.loads(body)


def _put(target: torch.Tensor, data: bytes) -> None:
    if data:
        target[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
