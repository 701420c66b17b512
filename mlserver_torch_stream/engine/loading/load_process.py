"""Runs a function of a load in a process of its own, whose imports and memory end with it.

Knows nothing of models. transformers' code of models takes 105 MB, which a server that computes with our kernels alone
needs only while it loads.
"""

from __future__ import annotations

import base64
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from mlserver_torch_stream.engine.tensor_parallel.rank_processes import how_it_ended
from mlserver_torch_stream.errors import LoadFailed

MODULE = "mlserver_torch_stream.engine.loading.load_process_main"
PACKAGE = "mlserver_torch_stream"
LOG, RETURNED, RAISED = range(3)  # the kinds of messages that the process sends

T = TypeVar("T")


def in_process(function: Callable[..., T], *args: object) -> T:
    """Returns what ``function(*args)`` returns in a new process, or raises what it raises there. Blocks.

    The function, its arguments and its result can be pickled. The package's log lines of that process are logged here.
    Raises LoadFailed if the process cannot be started or ends early, for example because it is killed.
    """
    job = base64.b64encode(pickle.dumps((function, args))).decode()
    level = logging.getLogger(PACKAGE).getEffectiveLevel()
    command = [sys.executable, "-m", MODULE, str(os.getpid()), str(level), job]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        raise LoadFailed(f"cannot start a process that loads the model: {error}") from error
    with process:
        try:
            kind, value = _last_message(process)
        except BaseException:
            process.kill()
            raise
    if kind == RAISED:
        raise value
    result: T = value
    return result


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
