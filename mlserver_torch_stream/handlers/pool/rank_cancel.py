"""Chooses the send at which all ranks end a call whose clients have disconnected.

Methods return the message that the caller must send to the ranks, or None if there is nothing to send.
"""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


class RankCancellation:
    """Ends a call early, but only if all ranks have made the same number of sends in each earlier call.

    In such a handler, sends with the same number come from the same place in the code on every rank. The same holds if
    a handler calls ``send_intermediate_predict_response`` on every rank, although only the first rank's pieces reach
    the client.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._alike: bool | None = None  # None: not known yet
        self._sends: dict[int, dict[int, int]] = {}  # call -> rank -> sends, until all ranks have ended the call
        self._call = 0  # the call that is being ended
        self._next: dict[int, int] = {}  # the next send of each rank
        self._waiting: set[int] = set()  # ranks that have reached the common send and wait there

    def ended(self, rank: int, call: int, sends: int) -> None:
        """Called when a call has ended on a rank, after ``sends`` sends."""
        counts = self._sends.setdefault(call, {})
        counts[rank] = sends
        if len(counts) == self._ranks:
            del self._sends[call]
            if any(counts.values()):
                self._alike = self._alike is not False and len(set(counts.values())) == 1

    def asked(self, call: int, send: int) -> Message:
        """Called when the first rank asks to end the call. This rank waits at its send number ``send``."""
        if not self._alike:
            return _verdict(call, False)
        self._call, self._next, self._waiting = call, {0: send}, set()
        return {"t": "halt", "call": call}

    def next_send(self, rank: int, call: int, send: int) -> Message | None:
        """Called when a rank reports the number of the send at which it waits; 0 if it can no longer end the call."""
        if call != self._call:
            return None
        if not send:
            return self._decide(False)
        self._next[rank] = send
        if len(self._next) < self._ranks:
            return None
        return {"t": "meet", "call": call, "at": max(self._next.values())}

    def met(self, rank: int, call: int, here: bool) -> Message | None:
        """Called when a rank has reached the common send. If ``here`` is false, it can no longer end the call there."""
        if call != self._call:
            return None
        self._waiting.add(rank)
        if not here or len(self._waiting) == self._ranks:
            return self._decide(here)
        return None

    def too_late(self, call: int) -> Message | None:
        """Called when the time to meet is over.

        If ranks are missing, no later call of this handler is ended early.
        """
        if call != self._call:
            return None
        self._alike = False
        return self._decide(False)

    def _decide(self, stop: bool) -> Message:
        call, self._call = self._call, 0
        return _verdict(call, stop)


def _verdict(call: int, stop: bool) -> Message:
    return {"t": "verdict", "call": call, "stop": stop}
