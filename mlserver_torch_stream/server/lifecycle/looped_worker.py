"""MLServer's inference workers, which other runtimes' models run in, with an event loop that uvloop 0.22 does not make.

MLServer 1.7.1's worker asks asyncio for the current loop before it runs one. Up to 0.21 uvloop's policy makes a loop
when asked; from 0.22 on it raises RuntimeError, and every worker ends as soon as it has started. In MLServer's main
branch the worker makes its loop itself, and passes it on.
"""

from __future__ import annotations

import asyncio
from multiprocessing import Queue
from typing import Any

from mlserver import Settings
from mlserver.parallel import pool
from mlserver.parallel.worker import Worker


class LoopedWorker(Worker):  # type: ignore[misc]
    """A worker is a new interpreter, which is told the name of this class and imports it from here."""

    def _ignore_signals(self, *loop: asyncio.AbstractEventLoop) -> None:
        if not loop:
            asyncio.set_event_loop(asyncio.new_event_loop())
        super()._ignore_signals(*loop)


def install() -> None:
    """Makes MLServer start looped workers from now on. Idempotent."""
    pool.Worker = _create


def _create(settings: Settings, responses: Queue[Any], env: Any = None) -> Worker:
    """A worker with another Python environment stays MLServer's: this package may be missing there."""
    return (LoopedWorker if env is None else Worker)(settings, responses, env)
