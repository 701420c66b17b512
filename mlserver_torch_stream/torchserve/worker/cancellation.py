"""Whether a call ends at one of its sends, because nobody waits for it any more. Which kind it is, is chosen once.

Knows nothing of what is sent. A call has its number, which is the same on all ranks that make it together.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from mlserver_torch_stream.torchserve.worker.channel import Channel


class ClientsLeft(BaseException):
    """Raised out of a handler's send when nobody waits for its call any more. No ``except Exception`` catches it."""


class NeverStop:
    """Others take part in the call, of whom nothing is known: they might wait for it for ever."""

    def begin(self) -> None: ...

    def sent(self, left: bool) -> None:
        """At each send; ``left``: nobody waits for the call. Raises ClientsLeft where it is to end here."""

    def end(self) -> None: ...

    def heed(self, header: Mapping[str, Any]) -> None:
        """What the server says about it, in the thread that reads."""


class StopAlone(NeverStop):
    """Nobody else takes part."""

    def sent(self, left: bool) -> None:
        if left:
            raise ClientsLeft


class StopTogether(NeverStop):
    """All ranks at the same send, or none of them: whoever went on would wait for the others for ever.

    The first rank asks, once in a call, and waits. The others say which send is their next, and wait at that until they
    know where to meet: at the furthest of them all, so that nobody needs a rank to go beyond it. Where all have met,
    they stop. A call that has started a thread does not stop: what runs in that would come between the next call and
    its ranks.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._changed = threading.Condition()
        self._threads: set[threading.Thread] = set()
        self._call = 0
        self._running = False
        self._sends = 0
        self._asked = False  # by this rank, in this call
        self._halting = 0  # the last call that is to stop, if it can
        self._meetings: dict[int, int] = {}  # of this call and later ones: the send at which its ranks meet
        self._verdicts: dict[int, bool] = {}  # likewise: whether it stops there

    def begin(self) -> None:
        with self._changed:
            self._call += 1
            self._running, self._sends, self._asked = True, 0, False
            self._threads = set(threading.enumerate())
            self._meetings = {call: at for call, at in self._meetings.items() if call >= self._call}
            self._verdicts = {call: stop for call, stop in self._verdicts.items() if call >= self._call}

    def sent(self, left: bool) -> None:
        with self._changed:
            self._sends += 1
            if left and not self._asked and self._single:
                self._asked, self._halting = True, self._call
                self._channel.tell("asks", call=self._call, at=self._sends)
            if self._halting != self._call:
                return
            self._changed.wait_for(lambda: self._call in self._meetings or self._call in self._verdicts)
            if self._call not in self._verdicts and self._meetings[self._call] == self._sends:
                self._channel.tell("meets", call=self._call, here=self._single)
                self._changed.wait_for(lambda: self._call in self._verdicts)
                if self._verdicts[self._call]:
                    raise ClientsLeft

    def end(self) -> None:
        with self._changed:
            self._running = False
            self._channel.tell("sends", call=self._call, sends=self._sends)
            if self._halting == self._call and self._call not in self._verdicts:
                self._channel.tell("meets", call=self._call, here=False)

    def heed(self, header: Mapping[str, Any]) -> None:
        call = header["call"]
        with self._changed:
            if header["t"] == "verdict":
                self._verdicts[call] = header["stop"]
            elif header["t"] == "meet":
                self._meetings[call] = header["at"]
            elif not (self._asked and call == self._call):
                self._halt(call)
            self._changed.notify_all()

    def _halt(self, call: int) -> None:
        if call > self._call:  # still at an earlier one
            self._halting, following = call, 1
        elif call == self._call and self._running and self._single:
            self._halting, following = call, self._sends + 1
        else:
            following = 0
        self._channel.tell("next", call=call, send=following)

    @property
    def _single(self) -> bool:
        """The call has started no thread that still runs."""
        return self._threads.issuperset(threading.enumerate())
