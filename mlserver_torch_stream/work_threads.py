"""Runs blocking work in a thread that never keeps the process from ending.

Knows nothing of the work. The event loop joins its own threads at exit, even while they load a model for minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs ``work`` in a thread, with the caller's context variables, and returns its result as a future."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            settle = partial(future.set_result, context.run(work))
        except BaseException as error:
            settle = partial(future.set_exception, _as_exception(error))
        thread.at_work = False  # before anything that awaits the future can look
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task awaits the future
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())

    thread = _WorkThread(target=run, name="mlserver-torch-stream work", daemon=True)
    thread.start()
    return future


class _WorkThread(threading.Thread):
    at_work = True  # until its result is known


def _as_exception(error: BaseException) -> Exception:
    """A future takes no SystemExit, and the panic of a Rust library is no Exception either."""
    if isinstance(error, Exception):
        return error
    shown = RuntimeError(repr(error))
    shown.__cause__ = error
    return shown


def at_work() -> bool:
    """True while a thread of ``in_thread`` runs its work."""
    return any(isinstance(thread, _WorkThread) and thread.at_work for thread in threading.enumerate())


def exit_from_work(status: int) -> None:
    """Ends the process at once if such a thread still runs; for ``atexit``.

    A thread that returns from torch while the interpreter shuts down aborts the whole process (SIGABRT).
    """
    if any(isinstance(thread, _WorkThread) for thread in threading.enumerate()):
        exit_now(status)


def exit_now(status: int) -> NoReturn:
    """Ends the process after its logs and output are flushed, without the interpreter's own shutdown."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
