"""Passes a message of one rank to the cancellation of its call, and the answer to all ranks of the worker.

Knows nothing of requests. All of it runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from typing import Any

from mlserver_torch_stream.torchserve.rank_cancel import Message, RankCancellation
from mlserver_torch_stream.torchserve.supervisor import WorkerSlot


def pass_rank_message(slot: WorkerSlot, header: dict[str, Any], meet_s: float) -> None:
    """If a call is to end early, its ranks have ``meet_s`` seconds to come to the same send."""
    cancellation = slot.cancellation
    assert cancellation is not None
    kind, rank, call = header["t"], header["rank"], header["call"]
    if kind == "sends":
        cancellation.ended(rank, call, header["sends"])
    elif kind == "next":
        _send(slot, cancellation.next_send(rank, call, header["send"]))
    elif kind == "meets":
        _send(slot, cancellation.met(rank, call, header["here"]))
    elif kind == "asks":
        _send(slot, cancellation.asked(call, header["at"]))
        asyncio.get_running_loop().call_later(meet_s, _give_up, slot, cancellation, call)


def _give_up(slot: WorkerSlot, cancellation: RankCancellation, call: int) -> None:
    if slot.cancellation is cancellation:  # else the worker has been replaced
        _send(slot, cancellation.too_late(call))


def _send(slot: WorkerSlot, message: Message | None) -> None:
    if message is not None and slot.worker is not None:
        slot.worker.send(message, b"", all_ranks=True)
