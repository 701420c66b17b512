"""A program in its own terminal: what is typed reaches it as keys, Ctrl-C as SIGINT from the terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

_BOUND_S = 60.0
# A session's leader that opens a terminal owns it: keys such as Ctrl-C are then signals.
_OWN_TERMINAL = (
    "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """``shown`` is everything that the program has printed so far, with ``\\n`` as line endings."""

    def __init__(self, leader: int, process: subprocess.Popen[bytes]) -> None:
        self._leader = leader
        self.process = process
        self._bytes = b""

    @property
    def shown(self) -> str:
        return self._bytes.decode("utf-8", "replace").replace("\r\n", "\n")

    def type(self, keys: str) -> None:
        os.write(self._leader, keys.encode())

    def wait_for(self, text: str, after: int = 0) -> int:
        """Waits for ``text`` in the output after position ``after``. Returns the position of its end."""
        end = time.monotonic() + _BOUND_S
        while (found := self.shown.find(text, after)) < 0:
            assert self._read(end), f"no {text!r} in {self.shown[after:]!r}"
        return found + len(text)

    def wait_for_end(self) -> int:
        end = time.monotonic() + _BOUND_S
        while self._read(end):
            pass
        return self.process.wait(_BOUND_S)

    def _read(self, end: float) -> bool:
        """Returns False if the program has ended or the time is over."""
        if not select.select([self._leader], [], [], max(0.0, end - time.monotonic()))[0]:
            return False
        try:
            chunk = os.read(self._leader, 65536)
        except OSError:  # how Linux says that no program has the terminal open any more
            return False
        self._bytes += chunk
        return bool(chunk)


@contextmanager
def terminal(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[Terminal]:
    """Runs Python with the arguments."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _OWN_TERMINAL, *arguments],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        env={**os.environ, "TERM": "dumb", "PYTHONIOENCODING": "utf-8", **environment},
    )
    os.close(follower)
    try:
        yield Terminal(leader, process)
    finally:
        process.kill()
        process.wait()
        os.close(leader)
