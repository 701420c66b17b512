"""Runs a function of a load in a process of its own, whose imports and memory end with it.

Knows nothing of models. transformers' code of models takes 105 MB, which a server that computes with our kernels alone
needs only while it loads. ``started_ahead`` starts the process before the function is known.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from mlserver_torch_stream.engine.tensor_parallel.rank_processes import how_it_ended
from mlserver_torch_stream.errors import LoadFailed

MODULE = "mlserver_torch_stream.engine.loading.load_process_main"
PACKAGE = "mlserver_torch_stream"
LOG, RETURNED, RAISED = range(3)  # the kinds of messages that the process sends

T = TypeVar("T")

_AHEAD: ContextVar[list[subprocess.Popen[bytes]]] = ContextVar("started ahead")  # processes that wait for a function


@contextlib.contextmanager
def started_ahead(*modules: str) -> Iterator[None]:
    """Starts a process that imports ``modules`` and then waits for the first ``in_process`` within this block.

    The process is killed at the end of the block if nothing has used it. Raises LoadFailed if it cannot be started.
    """
    waiting = [_start(modules)]
    token = _AHEAD.set(waiting)
    try:
        yield
    finally:
        _AHEAD.reset(token)
        for process in waiting:
            with process:
                process.kill()


def in_process(function: Callable[..., T], *args: object) -> T:
    """Returns what ``function(*args)`` returns in another process, or raises what it raises there. Blocks.

    The process is the one that was ``started_ahead``, else a new one. It runs one function, and ends.

    The function, its arguments and its result can be pickled. The package's log lines of that process are logged here.
    Raises LoadFailed if the process cannot be started or ends early, for example because it is killed.
    """
    waiting = _AHEAD.get([])
    process = waiting.pop() if waiting else _start(())
    with process:
        try:
            _send(process, pickle.dumps((function, args)))
            kind, value = _last_message(process)
        except BaseException:
            process.kill()
            raise
    if kind == RAISED:
        raise value
    result: T = value
    return result


def _start(modules: tuple[str, ...]) -> subprocess.Popen[bytes]:
    level = logging.getLogger(PACKAGE).getEffectiveLevel()
    command = [sys.executable, "-m", MODULE, str(os.getpid()), str(level), *modules]
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        raise LoadFailed(f"cannot start a process that loads the model: {error}") from error


def _send(process: subprocess.Popen[bytes], job: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended: its last message, or its exit status, says why
        os.write(process.stdin.fileno(), job)


def _last_message(process: subprocess.Popen[bytes]) -> tuple[int, Any]:
    assert process.stdout is not None
    while True:
        try:
            kind, *message = pickle.load(process.stdout)
        except (EOFError, pickle.UnpicklingError):
            raise LoadFailed(f"the process that loads the model {how_it_ended(process.wait())}") from None
        if kind != LOG:
            return kind, message[0]
        name, level, text = message
        logging.getLogger(name).log(level, "%s", text)
