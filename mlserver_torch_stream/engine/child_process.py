"""Runs a function in a separate process during a load; the end of the process frees its imports and memory.

The modeling code of transformers alone takes 105 MB. A server that computes with our own kernels needs this code only
to convert a GGUF file, and to check a load that no earlier start has checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.work_threads import cancellation

MODULE = "mlserver_torch_stream.engine.child_process_main"
PACKAGE = "mlserver_torch_stream"
LOG, RETURNED, RAISED = range(3)  # the kinds of messages that the process sends

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1


def in_process(function: Callable[..., T], *args: object) -> T:
    """Calls ``function(*args)`` in another process. Returns the function's result, or raises its error. Blocks.

    The function, its arguments and its result must be picklable. What the package logs in the other process appears in
    this process's log. The cause of an error other than LoadFailed is its traceback in the other process. Raises
    LoadFailed if the process cannot be started or ends early, for example because it is killed. If the load is
    cancelled, the process is killed.
    """
    process = _start()
    with cancellation().interrupted_by(process.kill), process:
        try:
            _send(process, pickle.dumps((function, args)))
            kind, value, *trace = _last_message(process)
        except BaseException:
            process.kill()
            raise
    if kind == RAISED:
        raise value from (RemoteTraceback(*trace) if trace else None)
    result: T = value
    return result


class RemoteTraceback(Exception):
    """The traceback of an error in another process, as text."""


def _start() -> subprocess.Popen[bytes]:
    """Starts Python with this process's ``sys.path``.

    The process sends its messages over a separate pipe, which is ``stdout`` of the returned object.
    """
    if not sys.executable:
        raise LoadFailed("cannot start a process that loads the model: sys.executable names no interpreter")
    level = logging.getLogger(PACKAGE).getEffectiveLevel()
    run = f"import sys; sys.path[:] = {[str(path) for path in sys.path]}; from {MODULE} import main; main(sys.argv[1:])"
    reads, writes = os.pipe()
    command = [sys.executable, "-c", run, str(writes), str(os.getpid()), str(level)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(writes,))
    except OSError as error:
        os.close(reads)
        raise LoadFailed(f"cannot start a process that loads the model: {error}") from error
    finally:
        os.close(writes)
    process.stdout = os.fdopen(reads, "rb")
    return process


def _send(process: subprocess.Popen[bytes], job: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the process has ended: its last message, or its exit status, says why
        os.write(process.stdin.fileno(), job)


def _last_message(process: subprocess.Popen[bytes]) -> tuple[Any, ...]:
    assert process.stdout is not None
    while True:
        try:
            kind, *message = pickle.load(process.stdout)
        except EOFError:
            raise LoadFailed(f"the process that loads the model {_how_it_ended(process.wait())}") from None
        except Exception as error:
            process.kill()
            raise LoadFailed(
                f"the process that loads the model sent something that is not a message: {error}"
            ) from error
        if kind != LOG:
            return kind, *message
        name, level, text = message
        logging.getLogger(name).log(level, "%s", text)


def _how_it_ended(status: int) -> str:
    return how_it_ended(status) + (" (usually a lack of memory)" if status == -signal.SIGKILL else "")


def how_it_ended(status: int) -> str:
    """Returns a text such as ``was killed by SIGKILL`` for the exit status of a process."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # most real-time signals have no name
        return f"was killed by signal {-status}"


def die_with(parent: int) -> None:
    """Ends this process when ``parent`` ends for any reason.

    On Linux, the parent's end makes the kernel kill this process, even if it hangs, unless the parent had already ended
    before this call. Other systems have no such signal. So a thread also reads stdin, a pipe that closes when the
    parent ends; nothing is ever written to it.
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
