"""At which of its sends a call stops on all of its ranks, when nobody waits for it any more: the server's part of it.

Plain state and plain methods, which return what the ranks are to be told. Knows nothing of processes or time.
"""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


class RankCancellation:
    """Only for handlers that have been seen to send alike on all ranks, as those do that leave it to TorchServe's
    function to be silent on other ranks than the first. Others, at the same number of sends, may be anywhere.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._alike: bool | None = None  # None: not known yet
        self._sends: dict[int, dict[int, int]] = {}  # of calls that have not ended on all ranks
        self._call = 0  # that is to stop, if it can
        self._next: dict[int, int] = {}  # send of each rank
        self._met: set[int] = set()

    def ended(self, rank: int, call: int, sends: int) -> None:
        """A call is over on a rank."""
        counts = self._sends.setdefault(call, {})
        counts[rank] = sends
        if len(counts) == self._ranks:
            del self._sends[call]
            if any(counts.values()):
                self._alike = self._alike is not False and len(set(counts.values())) == 1

    def asked(self, call: int, at: int) -> Message:
        """The first rank waits at this send."""
        if not self._alike:
            return _verdict(call, False)
        self._call, self._next, self._met = call, {0: at}, set()
        return {"t": "halt", "call": call}

    def said_next(self, rank: int, call: int, send: int) -> Message | None:
        """The send that a rank will come to, and wait at. 0: it cannot stop any more."""
        if call != self._call:
            return None
        if not send:
            return self._decide(False)
        self._next[rank] = send
        if len(self._next) < self._ranks:
            return None
        return {"t": "meet", "call": call, "at": max(self._next.values())}

    def met(self, rank: int, call: int, here: bool) -> Message | None:
        """A rank waits where they are to meet; or not: its call has ended, or cannot stop any more."""
        if call != self._call:
            return None
        self._met.add(rank)
        if not here or len(self._met) == self._ranks:
            return self._decide(here)
        return None

    def too_late(self, call: int) -> Message | None:
        """Not all have met in time: they do not send alike. None if they have."""
        if call != self._call:
            return None
        self._alike = False
        return self._decide(False)

    def _decide(self, stop: bool) -> Message:
        call, self._call = self._call, 0
        return _verdict(call, stop)


def _verdict(call: int, stop: bool) -> Message:
    return {"t": "verdict", "call": call, "stop": stop}
