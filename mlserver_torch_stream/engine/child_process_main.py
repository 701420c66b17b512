"""The process that ``child_process`` starts: it calls one function.

It reads the function and its arguments as a pickle from stdin, and sends log lines and the result to its parent as
pickles over a pipe. It ends when its parent ends.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Sequence

from mlserver_torch_stream.engine.child_process import LOG, PACKAGE, RAISED, RETURNED, die_with
from mlserver_torch_stream.errors import LoadFailed


class ParentChannel(logging.Handler):
    """Sends messages to the parent over a pipe, from any thread."""

    def __init__(self, pipe: int) -> None:
        super().__init__()
        self._file = os.fdopen(pipe, "wb")
        self._sending = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.send(LOG, record.name, record.levelno, self.format(record))
        except Exception:
            self.handleError(record)

    def send(self, kind: int, *message: object) -> None:
        pickled = pickle.dumps((kind, *message))
        with self._sending:
            self._file.write(pickled)
            self._file.flush()


def main(argv: Sequence[str]) -> None:
    """Runs the process.

    ``argv`` contains the pipe to the parent, the parent's process id and the parent's log level.
    """
    pipe, parent, level = argv
    # The parent gets these signals too, and this process ends with it.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    os.dup2(2, 1)  # what libraries print does not belong to the server's output
    channel = ParentChannel(int(pipe))
    logging.basicConfig(handlers=[channel], format="%(message)s")
    logging.getLogger(PACKAGE).setLevel(int(level))
    try:
        gc.disable()  # a collection of the half a million objects that the import makes takes most of a second
        try:
            function, args = pickle.load(sys.stdin.buffer)
        except EOFError:  # the parent has ended
            os._exit(1)
        gc.freeze()
        gc.enable()
        die_with(int(parent))  # it reads stdin from now on
        channel.send(RETURNED, function(*args))
    except Exception as error:
        trace = [] if isinstance(error, LoadFailed) else ["".join(traceback.format_exception(error))]
        channel.send(RAISED, _as_it_arrives(error), *trace)
    os._exit(0)  # the interpreter would free everything first


def _as_it_arrives(error: Exception) -> Exception:
    """Returns the error, or, if it cannot be pickled, another error with the same text."""
    try:
        arrives: Exception = pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return arrives
