"""``python -m …loading.load_process_main PARENT LEVEL MODULE…``: calls a function that ``load_process`` sends.

It imports the modules, then reads the function and its arguments, a pickle, from stdin. It sends log lines and the
result to its parent, as pickles on stdout. Its process ends when its parent ends.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Sequence

from mlserver_torch_stream.engine.loading.load_process import LOG, PACKAGE, RAISED, RETURNED
from mlserver_torch_stream.engine.tensor_parallel.rank_main import die_with


class ParentChannel(logging.Handler):
    """Sends messages to the parent, from any thread. Other output to stdout goes to stderr from now on."""

    def __init__(self) -> None:
        super().__init__()
        self._file = os.fdopen(os.dup(1), "wb")
        self._sending = threading.Lock()
        os.dup2(2, 1)

    def emit(self, record: logging.LogRecord) -> None:
        self.send(LOG, record.name, record.levelno, record.getMessage())

    def send(self, kind: int, *message: object) -> None:
        pickled = pickle.dumps((kind, *message))
        with self._sending:
            self._file.write(pickled)
            self._file.flush()


def main(argv: Sequence[str]) -> None:
    parent, level, *modules = argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, with which this process ends
    channel = ParentChannel()
    logging.basicConfig(handlers=[channel])
    logging.getLogger(PACKAGE).setLevel(int(level))
    try:
        gc.disable()  # walking the half a million objects that the import makes takes most of a second
        for module in modules:
            importlib.import_module(module)
        gc.freeze()
        gc.enable()
        try:
            function, args = pickle.load(sys.stdin.buffer)
        except EOFError:  # the parent has ended
            os._exit(1)
        die_with(int(parent))  # which reads stdin too
        channel.send(RETURNED, function(*args))
    except Exception as error:
        channel.send(RAISED, _as_it_arrives(error))
    os._exit(0)  # the interpreter would free everything first


def _as_it_arrives(error: Exception) -> Exception:
    """Returns an error that can be pickled. Its traceback stays here, in the log."""
    try:
        arrives: Exception = pickle.loads(pickle.dumps(error))
    except Exception:
        traceback.print_exception(error)
        return RuntimeError(f"{type(error).__name__}: {error}")
    return arrives


if __name__ == "__main__":
    main(sys.argv[1:])
