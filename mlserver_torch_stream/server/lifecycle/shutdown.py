"""Shuts down an MLServer with models of this package.

First the server reports that it is not ready, then it refuses new requests, then it aborts the remaining ones, and
finally MLServer's own stop runs. A server that has neither a model nor a port of this package ends like an unmodified
MLServer.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import uvicorn
from click.exceptions import Exit
from mlserver.logging import logger
from mlserver.server import HANDLED_SIGNALS, MLServer

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.server.host import Hook, listeners_of, registry_of, wrap
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.options import ServerOptions, read_options
from mlserver_torch_stream.server.request import is_ours
from mlserver_torch_stream.server.status import ModelNotLoaded
from mlserver_torch_stream.work_threads import exit_from_work

_WHY = "the server is shutting down"
# Seconds after the aborts for clients that do not read their last response, if the server has only our models.
_GRPC_GRACE = 5.0  # MLServer's grace for gRPC
_GRPC_STOP_TIMEOUT = 0.5
_REST_STOP_TIMEOUT = 0.5


class EndedWithError(Exit):
    """Ends ``mlserver start`` with status 1 after every client has its answer. The log has the reason."""

    def __init__(self) -> None:
        super().__init__(1)


def install(lifecycle: Lifecycle) -> None:
    """Wraps MLServer's stop. Called once."""
    wrap(Hook.STOP, partial(_stopping, lifecycle))
    logger.addFilter(_without_our_traceback)


def _stopping(lifecycle: Lifecycle, original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def stop(server: MLServer, sig: int | None = None) -> None:
        if lifecycle.draining:
            if sig is not None:
                lifecycle.skip_grace()
            return
        why = None if sig is None else signal.Signals(sig).name
        # uvicorn raises the signal again when its first listener ends, and a second SIGINT would cut the other
        # listeners off.
        sig = signal.SIGTERM if sig == signal.SIGINT else sig
        if isinstance(failure := sys.exc_info()[1], ModelNotLoaded):  # MLServer stops if a load fails at its start
            if _options().skip_failed_models:
                return
            lifecycle.failure = str(failure)
            why, sig = "A model could not be loaded", signal.SIGTERM
        if lifecycle.members() or lifecycle.listeners or lifecycle.failure is not None:
            atexit.register(lambda: exit_from_work(0 if lifecycle.failure is None else 1))
            if why is not None:
                lifecycle.draining = True
                await _drain(server, lifecycle, why)
        await asyncio.gather(original(server, sig), lifecycle.stop_listeners(_GRPC_GRACE))

    return stop


def _without_our_traceback(record: logging.LogRecord) -> bool:
    """Drops the traceback that MLServer logs if a load fails at its start; our line says what to do."""
    if record.exc_info and isinstance(record.exc_info[1], ModelNotLoaded):
        record.exc_info = None
    return True


def take_signals() -> None:
    """Prevents uvicorn from handling SIGINT and SIGTERM, at which it would close the REST listener at once. Treats
    SIGHUP as SIGTERM.

    Only Python's handlers are replaced. MLServer gets signals through the event loop's wake-up descriptor.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup, or an embedding program, may have set another
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, signal.raise_signal, signal.SIGTERM)
    for each in HANDLED_SIGNALS:
        if isinstance(getattr(signal.getsignal(each), "__self__", None), uvicorn.Server):
            signal.signal(each, _handled_by_the_loop)


def _handled_by_the_loop(*_: object) -> None:
    pass


def _options() -> ServerOptions:
    try:
        return read_options()
    except SettingsError:  # the start failed because of it, and the log names it
        return read_options({})


async def _drain(server: MLServer, lifecycle: Lifecycle, why: str) -> None:
    options = _options()
    members = lifecycle.members()
    lifecycle.begin_shutdown(_WHY)
    logger.info(f"{why}: streams in flight have up to {options.drain_grace:g} s to finish")
    await lifecycle.delay(options.drain_delay)
    lifecycle.refusing.set()
    await lifecycle.drain(members, options.drain_grace, _WHY)
    await lifecycle.stop_engines(members)
    logger.info("Every stream has ended: closing the listeners")
    listeners = listeners_of(server)
    rest = listeners.rest
    if all(map(is_ours, await registry_of(server).get_models())):
        await lifecycle.stop_listeners(_GRPC_STOP_TIMEOUT)
        await listeners.grpc.stop(_GRPC_STOP_TIMEOUT)
        # Longer than our own cut-off of connections: uvicorn cancels the remaining tasks, with a traceback for each.
        rest.config.timeout_graceful_shutdown = 2 * _REST_STOP_TIMEOUT
    gc.freeze()  # saves seconds: the last garbage collections would visit all objects of torch
    _wrap_listeners(lifecycle, rest, [rest] if listeners.metrics is None else [rest, listeners.metrics])


def _wrap_listeners(lifecycle: Lifecycle, rest: Any, listeners: Sequence[Any]) -> None:
    """Makes interrupted loads fail only when the REST listener is closed, so that no client gets 404 for their models.

    MLServer's main task waits for the listeners, and raises the exception of any of them. After a failure only the
    listener that closes last raises, so that the process ends with an error but no other listener is cut off.
    """
    open_listeners = list(listeners)

    def wrapped(listener: Any) -> Callable[..., Awaitable[None]]:
        shutdown = listener.shutdown

        async def shut_down(*args: Any, **options: Any) -> None:
            if listener is rest:
                lifecycle.listeners_closed.set()
                if rest.config.timeout_graceful_shutdown is not None:
                    asyncio.get_running_loop().call_later(_REST_STOP_TIMEOUT, _cut_off, rest)
            await shutdown(*args, **options)
            open_listeners.remove(listener)
            if lifecycle.failure is not None and not open_listeners:
                raise EndedWithError

        return shut_down

    for listener in listeners:
        listener.shutdown = wrapped(listener)


def _cut_off(listener: Any) -> None:
    """Drops the remaining connections, whose clients do not read or have sent an incomplete request."""
    for connection in list(listener.server_state.connections):
        connection.transport.abort()
