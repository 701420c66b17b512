"""What ties a rank's process to the one that started it: neither outlives the other by more than a moment.

Knows nothing of torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ends this process when ``parent`` does, however that ends: the kernel kills it, and its end of a pipe closes.

    The pipe is stdin, which the parent holds open and never writes to. The kernel's signal comes even where this
    process hangs, but on Linux only, and not if the parent was gone before it was asked for.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_end_with_stdin, name="rank-bond", daemon=True).start()


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)
