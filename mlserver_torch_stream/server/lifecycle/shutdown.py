"""How an MLServer with models of ours ends: not ready first, then no new work, then aborts, then MLServer's own stop.

Knows nothing of engines. A server without our models ends as it always did.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
import logging
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import uvicorn
from click.exceptions import Exit
from mlserver.logging import logger
from mlserver.server import HANDLED_SIGNALS, MLServer

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.server.lifecycle.lifecycle import LIFECYCLE
from mlserver_torch_stream.server.lifecycle.threads import exit_from_work
from mlserver_torch_stream.server.options import read_options
from mlserver_torch_stream.server.status import ModelNotLoaded

_MARK = "_torch_stream_ending"
_WHY = "the server is shutting down"
# Seconds after the aborts, for clients that do not read their last response, where only models of ours are served.
_GRPC_TAIL = 0.5
_REST_TAIL = 0.5


class EndedWithError(Exit):
    """Ends ``mlserver start`` with status 1, once every client has its answer, and no traceback: the log says why."""

    def __init__(self) -> None:
        super().__init__(1)


def install() -> None:
    """Wraps MLServer's stop. Idempotent."""
    original = MLServer.stop
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    async def stop(server: MLServer, sig: int | None = None) -> None:
        if LIFECYCLE.ending:
            if sig is not None:
                LIFECYCLE.hurry()
            return
        why = None if sig is None else signal.Signals(sig).name
        if isinstance(failure := sys.exc_info()[1], ModelNotLoaded):  # MLServer's start handles it, and ends
            LIFECYCLE.failure = str(failure)
            why, sig = "A model could not be loaded", signal.SIGTERM
        if LIFECYCLE.members() or LIFECYCLE.failure is not None:
            atexit.register(lambda: exit_from_work(0 if LIFECYCLE.failure is None else 1))
            if why is not None:
                LIFECYCLE.ending = True
                await _end(server, why)
        await original(server, sig)

    setattr(stop, _MARK, True)
    MLServer.stop = stop
    logger.addFilter(_without_our_traceback)


def _without_our_traceback(record: logging.LogRecord) -> bool:
    """MLServer logs a failed load at its start with where it was raised, which is nothing that a user can mend."""
    if record.exc_info and isinstance(record.exc_info[1], ModelNotLoaded):
        record.exc_info = None
    return True


def take_signals() -> None:
    """Takes SIGINT and SIGTERM from uvicorn, which would close the REST listener at once, and SIGHUP as SIGTERM.

    Only Python's handlers are replaced: MLServer hears of signals through the event loop's wake-up descriptor.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # else nohup, or somebody who knows better
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, signal.raise_signal, signal.SIGTERM)
    for each in HANDLED_SIGNALS:
        if isinstance(getattr(signal.getsignal(each), "__self__", None), uvicorn.Server):
            signal.signal(each, _leave_it_to_the_loop)


def _leave_it_to_the_loop(*_: object) -> None:
    pass


async def _end(server: MLServer, why: str) -> None:
    try:
        options = read_options()
    except SettingsError:  # what the start has failed of
        options = read_options({})
    members = LIFECYCLE.members()
    LIFECYCLE.leave(_WHY)
    logger.info(f"{why}: streams in flight have up to {options.drain_grace:g} s to finish")
    await LIFECYCLE.linger(options.drain_delay)
    await LIFECYCLE.see_off(members, options.drain_grace, _WHY)
    await LIFECYCLE.silence(members)
    logger.info("Every stream has ended: closing the listeners")
    rest = server._rest_server._server
    if await _only_ours(server):
        await server._grpc_server._server.stop(_GRPC_TAIL)
        rest.config.timeout_graceful_shutdown = _REST_TAIL
    gc.freeze()  # else the interpreter's last collections walk all of torch and transformers: seconds on a busy host
    metrics = server._metrics_server
    _see_to_shutdown(rest, [] if metrics is None else [metrics._server])


async def _only_ours(server: MLServer) -> bool:
    models = await server._model_registry.get_models()
    return all(getattr(model, "streams_tokens", False) for model in models)


def _see_to_shutdown(rest: Any, others: Sequence[Any]) -> None:
    """Loads that were interrupted fail when nobody can ask for their models any more, which is over REST.

    MLServer's main task waits for the listeners and raises what one of them raises: so the process ends with an error,
    which the last one to close raises, so that none of them is cut off.
    """
    open_listeners = [rest, *others]

    def seen_to(listener: Any) -> Callable[..., Awaitable[None]]:
        shutdown = listener.shutdown

        async def shut_down(*args: Any, **options: Any) -> None:
            if listener is rest:
                LIFECYCLE.close()
            await shutdown(*args, **options)
            open_listeners.remove(listener)
            if LIFECYCLE.failure is not None and not open_listeners:
                raise EndedWithError

        return shut_down

    for listener in [rest, *others]:
        listener.shutdown = seen_to(listener)
