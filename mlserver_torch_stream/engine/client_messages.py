"""Describes an exception of a model or a device to a client: by its kind, never by its text.

The text can hold paths of source files, addresses of other machines or a part of another prompt, so the caller writes
it to the log. Knows nothing of requests.
"""

from __future__ import annotations


class StepTimeout(RuntimeError):
    """A step did not return in time. Its thread cannot be stopped, so the process has to end."""


def in_short(error: BaseException) -> str:
    """Returns the end of a sentence such as ``decode failed: …``. A ``StepTimeout`` keeps its full text."""
    import torch  # here: the scheduler does without

    if isinstance(error, StepTimeout):
        return str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}, of which the server's log says more"
