"""Decides whether a call of the handler ends early, at one of its sends, because all clients have disconnected.

Calls are numbered; a call that several ranks make together has the same number on all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from mlserver_torch_stream.handlers.worker.channel import Channel


class ClientsLeft(BaseException):
    """Raised from a handler's send when all clients of its call have disconnected.

    It derives from BaseException, so a handler's ``except Exception`` does not catch it.
    """


class NeverStop:
    """Lets every call run to its end: other processes may take part in it, and might wait for this process forever."""

    skips = False  # True: requests whose clients disconnected before the call are left out of it

    def begin(self) -> None: ...

    def sent(self, left: bool) -> None:
        """Called at each send; ``left`` says whether all clients have disconnected.

        Raises ClientsLeft if the call is to end here.
        """

    def end(self) -> None: ...

    def receive(self, header: Mapping[str, Any]) -> None:
        """Handles a message from the server; called in the thread that reads the connection."""


class StopAlone(NeverStop):
    """Ends a call, in which no other process takes part, at the first send after all clients have disconnected."""

    skips = True

    def sent(self, left: bool) -> None:
        if left:
            raise ClientsLeft


class StopTogether(NeverStop):
    """Ends a call on all ranks at the same send, or on none: a rank that went on would wait for the others forever.

    Once in a call, the first rank asks the server to end it, and waits. Each other rank reports the number of its next
    send and waits before that send. The ranks then meet at the highest reported number, which every rank can reach on
    its own. When all ranks have met there, the call ends. A call that has started a thread does not end early, because
    the thread might interfere with the next call.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._changed = threading.Condition()
        self._threads: set[threading.Thread] = set()
        self._call = 0
        self._running = False
        self._sends = 0
        self._asked = False  # whether this rank has asked in this call
        self._halting = 0  # the latest call that the ranks try to end early
        self._meetings: dict[int, int] = {}  # this and later calls -> the send at which the ranks meet
        self._verdicts: dict[int, bool] = {}  # this and later calls -> whether the call ends at that send

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
                self._channel.send("asks", call=self._call, at=self._sends)
            if self._halting != self._call:
                return
            self._changed.wait_for(lambda: self._call in self._meetings or self._call in self._verdicts)
            if self._call not in self._verdicts and self._meetings[self._call] == self._sends:
                self._channel.send("meets", call=self._call, here=self._single)
                self._changed.wait_for(lambda: self._call in self._verdicts)
                if self._verdicts[self._call]:
                    raise ClientsLeft

    def end(self) -> None:
        with self._changed:
            self._running = False
            self._channel.send("sends", call=self._call, sends=self._sends)
            if self._halting == self._call and self._call not in self._verdicts:
                self._channel.send("meets", call=self._call, here=False)

    def receive(self, header: Mapping[str, Any]) -> None:
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
        if call > self._call:  # this rank has not reached the call yet
            self._halting, following = call, 1
        elif call == self._call and self._running and self._single:
            self._halting, following = call, self._sends + 1
        else:
            following = 0
        self._channel.send("next", call=call, send=following)

    @property
    def _single(self) -> bool:
        """True if no thread that the call has started is still running."""
        return self._threads.issuperset(threading.enumerate())
