"""Chooses the send at which all ranks end a call whose clients have disconnected.

It is plain state and plain methods, which return the message for the ranks.
"""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


class RankCancellation:
    """Ends a call only if all ranks have sent equally often in earlier calls.

    Then a send of one rank is the same place in the handler as the send with the same number of another rank. It is so
    in a handler that calls TorchServe's function on every rank, although only the first rank sends to the client.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._alike: bool | None = None  # None: not known yet
        self._sends: dict[int, dict[int, int]] = {}  # by call, then by rank, until the call has ended on all ranks
        self._call = 0  # the call that shall end
        self._next: dict[int, int] = {}  # the next send of each rank
        self._waiting: set[int] = set()  # ranks that wait at the send where they meet

    def ended(self, rank: int, call: int, sends: int) -> None:
        """A call has ended on a rank."""
        counts = self._sends.setdefault(call, {})
        counts[rank] = sends
        if len(counts) == self._ranks:
            del self._sends[call]
            if any(counts.values()):
                self._alike = self._alike is not False and len(set(counts.values())) == 1

    def asked(self, call: int, send: int) -> Message:
        """The first rank asks to end the call, and waits at its send with this number."""
        if not self._alike:
            return _verdict(call, False)
        self._call, self._next, self._waiting = call, {0: send}, set()
        return {"t": "halt", "call": call}

    def next_send(self, rank: int, call: int, send: int) -> Message | None:
        """The next send of a rank, at which it waits. 0: the rank cannot end the call any more."""
        if call != self._call:
            return None
        if not send:
            return self._decide(False)
        self._next[rank] = send
        if len(self._next) < self._ranks:
            return None
        return {"t": "meet", "call": call, "at": max(self._next.values())}

    def met(self, rank: int, call: int, here: bool) -> Message | None:
        """A rank waits at the send where all ranks meet; not ``here``: it can no longer end the call there."""
        if call != self._call:
            return None
        self._waiting.add(rank)
        if not here or len(self._waiting) == self._ranks:
            return self._decide(here)
        return None

    def too_late(self, call: int) -> Message | None:
        """The ranks did not all meet in time, so they do not send alike. None: they met."""
        if call != self._call:
            return None
        self._alike = False
        return self._decide(False)

    def _decide(self, stop: bool) -> Message:
        call, self._call = self._call, 0
        return _verdict(call, stop)


def _verdict(call: int, stop: bool) -> Message:
    return {"t": "verdict", "call": call, "stop": stop}
