"""Describes exceptions of a model or a device: clients see only the kind of error; the log also has the text.

Clients do not see the text, because it can contain paths, addresses of machines or a part of another prompt.
"""

from __future__ import annotations

import logging

from mlserver_torch_stream.errors import GenerationFailed

logger = logging.getLogger(__name__)

_TORCH_OUT_OF_MEMORY = "OutOfMemoryError"  # compared by name, because a server whose models vLLM runs has no torch


class StepTimeout(RuntimeError):
    """Raised if a step did not return in time. A thread cannot be stopped, so the process has to end."""


class VllmLost(RuntimeError):
    """Raised if the process that generates the tokens has ended. The message is for clients."""


def in_short(error: BaseException) -> str:
    """Returns the end of a sentence such as ``decode failed: …``.

    A ``StepTimeout`` and a ``VllmLost`` keep their full text.
    """
    if isinstance(error, StepTimeout | VllmLost):
        return str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == _TORCH_OUT_OF_MEMORY:
        return "out of memory"
    return f"{type(error).__name__}; the server's log has the details"


def log_failure(what: str, error: Exception) -> GenerationFailed:
    """Logs that ``what`` failed, drops the tracebacks, and returns the error for the client.

    A ``GenerationFailed``, such as a constraint can raise, is returned unchanged, because its text is written for the
    client.
    """
    if isinstance(error, GenerationFailed):
        failure = error
    else:
        logger.error("%s failed", what, exc_info=error)
        failure = GenerationFailed(f"{what} failed: {in_short(error)}")
    drop_tracebacks(error)
    return failure


def drop_tracebacks(error: BaseException) -> None:
    """Removes the tracebacks of an error and of the errors that led to it.

    The frames of a traceback hold references to sequences and so keep them alive. If a frame also refers to the error,
    there is a reference cycle, which keeps the sequences alive until the next garbage collection.
    """
    chain = [error]
    for each in chain:
        each.__traceback__ = None
        chain += [cause for cause in (each.__cause__, each.__context__) if cause is not None and cause not in chain]


class Unsuitable(Exception):
    """Raised if a model, a file or a machine does not meet a requirement, which the message names in one line."""


class UnsupportedLayout(Unsuitable):
    """Raised if the model is not a decoder of the Llama layout, the only layout that our own kernels support."""


class NotPacked(Unsuitable):
    """Raised if the weights of a file cannot be kept packed here; the message says why in one line."""


def in_a_line(error: Exception) -> str:
    """Returns in one line why a check ended early. A model's code, a kernel or a compiler can raise any error."""
    return str(error) if isinstance(error, Unsuitable) else f"{type(error).__name__}: {error}".splitlines()[0]
