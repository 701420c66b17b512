"""What a client is told of an exception of a model's or a device's: its kind, never its text.

The text may hold paths of source files, addresses of other machines or a part of another prompt: it is for the log, and
whoever calls this has written it there. Knows nothing of who asks.
"""

from __future__ import annotations

import torch


class StepTimeout(RuntimeError):
    """A step has not come back in time. Its thread cannot be ended, so the process has to be."""


def in_short(error: BaseException) -> str:
    """The end of a sentence such as ``decode failed: …``. What the engine itself says is told in full."""
    if isinstance(error, StepTimeout):
        return str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}, of which the server's log says more"
