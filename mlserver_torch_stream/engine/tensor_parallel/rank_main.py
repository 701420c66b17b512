"""``python -m …tensor_parallel.rank_main RANK SIZE PORT PARENT``: runs a rank that rank 0 starts on its own machine.

Its process ends when its parent ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    rank, size, port, parent = (int(argument) for argument in argv)
    die_with(parent)  # before the seconds that the import of torch takes
    from mlserver_torch_stream.engine.tensor_parallel.follower import follow
    from mlserver_torch_stream.engine.tensor_parallel.rendezvous import find_local

    return follow(lambda: find_local(rank, size, port))


def die_with(parent: int) -> None:
    """Ends this process when ``parent`` ends, for whatever reason.

    On Linux the kernel kills it, even if it hangs. The kernel does nothing if the parent has ended before this call,
    and there is no such signal elsewhere. So a thread also reads stdin, a pipe that the parent holds open and never
    writes to.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if (actual := os.getppid()) != parent:
        print(f"process {os.getpid()} ends: its parent is {actual}, not {parent}", file=sys.stderr, flush=True)
        os._exit(1)
    threading.Thread(target=_end_with_stdin, name="parent-death", daemon=True).start()


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
