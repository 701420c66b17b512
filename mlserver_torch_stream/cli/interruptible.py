"""Runs a command's work so that a signal cancels it in an orderly way."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from mlserver_torch_stream.cloud.store import settle

T = TypeVar("T")


class Interrupted(Exception):
    """A signal ended the command."""


class LoadInterrupted(Exception):
    """A signal ended the command while its model was loading."""


def run_to_end(work: Awaitable[T]) -> T:
    """Runs ``work`` on a new event loop, and returns its result; SIGINT and SIGTERM cancel it.

    Raises Interrupted after a signal, and passes on every exception that ``work`` raises.
    """

    async def guarded() -> T:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        for number in signals:
            loop.add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            raise Interrupted from None
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
            await settle()

    run: Callable[[Coroutine[object, object, T]], T] = asyncio.run
    if sys.platform != "win32":
        from uvloop import run  # needs less processor time for each row
    return run(guarded())
