"""Runs what a model's files do with text in other processes: chat templates, and tokenizers that may be slow.

Both are programs of a model's author that run on a client's text. A process has a limit of time for each job and a
limit of memory; a job that exceeds one ends with its process. The first job takes half a second more, in which a
process starts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from mlserver_torch_stream.errors import GenerationFailed, NotServing

logger = logging.getLogger(__name__)

MODULE = "mlserver_torch_stream.engine.text.text_process_main"
MAX_SECONDS = 5.0  # for one job
MAX_BYTES = 2**30  # of address space, beside what the process needs for its imports
MAX_REPLY_BYTES = 2**27
_MAX_START_S = 60.0
_MAX_IDLE = 2  # processes that wait for a job, of some 60 MB each
_NO_PROCESS = "no process can be started for what the model's files do with text"
_PIECE = 2**16


class JobRefused(Exception):
    """The job raised: the template refuses the messages, or the tokenizer's library panics. The text is its reason."""


class TextProcesses:
    """Processes for jobs of one kind. Its method may be called from several threads, and each job has its own process.

    ``tokenizer`` returns the JSON text of the ``tokenizers`` library for processes that tokenize; those without it
    render.
    """

    def __init__(self, tokenizer: Callable[[], str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._idle: deque[subprocess.Popen[bytes]] = deque()
        weakref.finalize(self, _stop_all, self._idle)

    def run(self, job: str, **arguments: Any) -> Any:
        """Returns what the job returns. Blocks for at most ``MAX_SECONDS``, and while a process starts.

        Raises JobRefused, GenerationFailed if the job exceeds a limit, or NotServing if no process can be started.
        """
        message = _line([job, arguments])
        process = self._living() or self._started()
        try:
            reply = _reply(process, message, MAX_SECONDS)
        except _LimitExceeded as exceeded:
            _stop(process)
            logger.warning("a %s job of a model was exceeded: it %s", job, exceeded)
            raise GenerationFailed(str(exceeded)) from None
        except BaseException:
            _stop(process)
            raise
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(process)
        else:
            _stop(process)
        if "error" in reply:
            raise JobRefused(reply["error"])
        return reply["result"]

    def _living(self) -> subprocess.Popen[bytes] | None:
        """Takes a process that has no job; None if there is none."""
        with contextlib.suppress(IndexError):
            while True:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                _stop(process)
        return None

    def _started(self) -> subprocess.Popen[bytes]:
        path = [str(each) for each in sys.path]
        run = f"import sys; sys.path[:] = {path}; from {MODULE} import main; main({MAX_BYTES}, {MAX_SECONDS})"
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", run],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # a panic writes there what its job raises
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
            )
        except OSError as error:
            raise NotServing(f"{_NO_PROCESS}: {error}") from error
        tokenizer = None if self._tokenizer is None else self._tokenizer()
        try:
            _reply(process, _line(["start", {"tokenizer": tokenizer}]), _MAX_START_S)
        except _LimitExceeded as exceeded:
            _stop(process)
            raise NotServing(f"{_NO_PROCESS}: it {exceeded}") from None
        return process


def _line(message: list[Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _reply(process: subprocess.Popen[bytes], message: bytes, seconds: float) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    end = time.monotonic() + seconds
    with contextlib.suppress(BrokenPipeError):  # it has ended, which reading shows
        process.stdin.write(message)
        process.stdin.flush()
    waiting = select.poll()
    waiting.register(process.stdout, select.POLLIN)
    pieces: list[bytes] = []
    size = 0
    while not pieces or not pieces[-1].endswith(b"\n"):
        if not waiting.poll(max(0.0, 1000 * (end - time.monotonic()))):
            raise _LimitExceeded(f"took longer than {seconds:g} s")
        pieces.append(os.read(process.stdout.fileno(), _PIECE))
        if not pieces[-1]:
            raise _LimitExceeded(f"needed more than {MAX_BYTES // 2**20} MiB of memory, or ended its process")
        size += len(pieces[-1])
        if size > MAX_REPLY_BYTES:
            raise _LimitExceeded(f"made more than {MAX_REPLY_BYTES // 2**20} MiB of text")
    reply: dict[str, Any] = json.loads(b"".join(pieces))
    if "exceeded" in reply:
        raise _LimitExceeded(reply["exceeded"])
    return reply


def _stop_all(processes: deque[subprocess.Popen[bytes]]) -> None:
    while processes:
        _stop(processes.pop())


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError), process:  # a message that it has not read
        pass


class _LimitExceeded(Exception):
    """A job exceeds a limit. The text ends a sentence about it."""
