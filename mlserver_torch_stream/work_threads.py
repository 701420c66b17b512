"""Runs blocking work that can be cancelled, in a thread that never keeps the process from ending.

The event loop joins its own threads at exit, even while they load a model for minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn, TypeVar

T = TypeVar("T")


class WorkCancelled(BaseException):
    """The work of this thread is cancelled. It does not derive from Exception, so that error handlers do not go on with
    the work.
    """


class Cancellation:
    """Ends the work of another thread, at its next ``raise_if_cancelled`` or by an interrupt."""

    def __init__(self) -> None:
        self.cancelled = False
        self._lock = threading.Lock()
        self._interrupts: list[Callable[[], object]] = []

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            for interrupt in self._interrupts:
                interrupt()

    @contextlib.contextmanager
    def interrupted_by(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """While the block runs, ``cancel`` calls ``interrupt``, which must end what the block waits for. Raises
        WorkCancelled before or after the block if the work is cancelled.
        """
        with self._lock:
            self._interrupts.append(interrupt)
        try:
            self.check()
            yield
        finally:
            with self._lock:
                self._interrupts.remove(interrupt)
            self.check()

    def check(self) -> None:
        if self.cancelled:
            raise WorkCancelled


# The cancellation of the work that a thread does; it is not set for work that cannot be cancelled.
_CANCELLATION: contextvars.ContextVar[Cancellation] = contextvars.ContextVar("cancellation")


def cancellation() -> Cancellation:
    """Returns the cancellation of the work that this thread does."""
    return _CANCELLATION.get(None) or Cancellation()


def raise_if_cancelled() -> None:
    """Raises WorkCancelled if the work of this thread is cancelled."""
    if (own := _CANCELLATION.get(None)) is not None:
        own.check()


def in_thread(work: Callable[[], T], cancellation: Cancellation | None = None) -> asyncio.Future[T]:
    """Runs ``work`` in a thread, with the caller's context variables, and returns its result as a future.

    ``cancellation`` can end the work, and the future is then cancelled.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()
    if cancellation is not None:
        context.run(_CANCELLATION.set, cancellation)

    def run() -> None:
        try:
            settle: Callable[[], object] = partial(future.set_result, context.run(work))
        except WorkCancelled:
            settle = future.cancel
        except BaseException as error:
            settle = partial(future.set_exception, _as_exception(error))
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task awaits the future
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())

    thread = _WorkThread(target=run, name="mlserver-torch-stream work", daemon=True)
    thread.start()
    return future


class _WorkThread(threading.Thread):
    """A thread of ``in_thread``."""


def _as_exception(error: BaseException) -> Exception:
    """Wraps an error that a future cannot store: SystemExit, or the panic of a Rust library, which is not an
    Exception.
    """
    if isinstance(error, Exception):
        return error
    shown = RuntimeError(repr(error))
    shown.__cause__ = error
    return shown


def exit_from_work(status: int) -> None:
    """Ends the process at once if a thread of ``in_thread`` still runs; for ``atexit``.

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
