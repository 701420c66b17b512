"""Runs chat templates, and tokenizers that may be slow, in other processes.

Templates and tokenizers are programs from a model's files that process the text of clients. A process has a memory
limit and, for each job, a time limit. A job that exceeds a limit is ended together with its process. The first job
takes half a second longer, because a process has to start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import orjson

from mlserver_torch_stream.errors import GenerationFailed, NotServing

logger = logging.getLogger(__name__)

MODULE = "mlserver_torch_stream.engine.text.text_process_main"
MAX_SECONDS = 5.0  # the time limit of one job
MAX_BYTES = 2**30  # the address space that a job may use, beside the space for the process's imports
MAX_REPLY_BYTES = 2**27
_MAX_START_S = 60.0
_MAX_IDLE = 2  # processes that wait for a job, of some 60 MB each
_NO_PROCESS = "no process can be started for the model's chat template and tokenizer"
_PIECE = 2**18


class JobRefused(Exception):
    """Raised if a job failed: the template refused the messages, or the tokenizer's library panicked.

    The error's text is the reason.
    """


class TextProcesses:
    """Processes for jobs of one kind. Several threads may call ``run``; concurrent jobs run in different processes.

    ``tokenizer`` returns the JSON text of the ``tokenizers`` library, for processes that tokenize. Without it, the
    processes render templates.
    """

    def __init__(self, tokenizer: Callable[[], str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._idle: deque[_Process] = deque()
        weakref.finalize(self, _stop_all, self._idle)

    def run(self, job: str, /, **arguments: Any) -> Any:
        """Returns what the job returns.

        Blocks for at most ``MAX_SECONDS``, plus the time that a process takes to start. Raises JobRefused if the job is
        refused, GenerationFailed if it exceeds a limit, and NotServing if no process can be started.
        """
        message = _line([job, arguments])
        process = self._living() or self._started()
        try:
            reply = process.ask(message, MAX_SECONDS)
        except _LimitExceeded as exceeded:
            process.stop()
            logger.warning("a %s job of a model exceeded a limit: it %s", job, exceeded)
            raise GenerationFailed(str(exceeded)) from None
        except BaseException:
            process.stop()
            raise
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(process)
        else:
            process.stop()
        if "error" in reply:
            raise JobRefused(reply["error"])
        return reply["result"]

    def _living(self) -> _Process | None:
        """Reserves and returns an idle process; None if no process is idle."""
        with contextlib.suppress(IndexError):
            while True:
                process = self._idle.pop()
                if process.lives():
                    return process
                process.stop()
        return None

    def _started(self) -> _Process:
        try:
            process = _Process()
        except OSError as error:
            raise NotServing(f"{_NO_PROCESS}: {error}") from error
        try:
            tokenizer = None if self._tokenizer is None else self._tokenizer()
            process.ask(_line(["start", {"tokenizer": tokenizer}]), _MAX_START_S)
        except _LimitExceeded as exceeded:
            process.stop()
            raise NotServing(f"{_NO_PROCESS}: it {exceeded}") from None
        except BaseException:
            process.stop()
            raise
        return process


class _Process:
    """A process, and the socket for its jobs and replies.

    The socket is its stdin, because libraries may print to stdout.
    """

    def __init__(self) -> None:
        path = [str(entry) for entry in sys.path]
        run = f"import sys; sys.path[:] = {path}; from {MODULE} import main; main({MAX_BYTES}, {MAX_SECONDS})"
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", run],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a panic writes its message there too
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, message: bytes, seconds: float) -> dict[str, Any]:
        """Sends a job and returns its reply. Raises _LimitExceeded if the job exceeds a limit or ends the process."""
        end = time.monotonic() + seconds
        pieces: list[bytes] = []
        size = 0
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(message)
            while not pieces or not pieces[-1].endswith(b"\n"):
                self._socket.settimeout(max(0.001, end - time.monotonic()))
                pieces.append(self._socket.recv(_PIECE))
                if not pieces[-1]:
                    raise ConnectionResetError
                size += len(pieces[-1])
                if size > MAX_REPLY_BYTES:
                    raise _LimitExceeded(f"made more than {MAX_REPLY_BYTES // 2**20} MiB of text")
        except TimeoutError:
            raise _LimitExceeded(f"took longer than {seconds:g} s") from None
        except ConnectionError:
            raise _LimitExceeded(f"needed more than {MAX_BYTES // 2**20} MiB of memory, or ended its process") from None
        reply: dict[str, Any] = orjson.loads(b"".join(pieces))
        if "exceeded" in reply:
            raise _LimitExceeded(reply["exceeded"])
        return reply

    def stop(self) -> None:
        self._process.kill()
        self._socket.close()
        self._process.wait()


def _line(message: list[Any]) -> bytes:
    # Conversations may have megabytes, and all streams wait while one is encoded, for which json takes several times as
    # long.
    return orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE)


def _stop_all(processes: deque[_Process]) -> None:
    while processes:
        processes.pop().stop()


class _LimitExceeded(Exception):
    """Raised if a job exceeded a limit. The text of the error is a predicate; its subject is the job."""
