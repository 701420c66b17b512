"""How an MLServer with models of ours ends: not ready first, then no new work, then aborts, then MLServer's own stop.

Knows nothing of engines. A server without our models ends as it always did.
"""

from __future__ import annotations

import atexit
import functools
import gc
import signal
import threading
from typing import Any

import uvicorn
from mlserver.logging import logger
from mlserver.server import HANDLED_SIGNALS, MLServer

from mlserver_torch_stream.server.life.lifecycle import LIFECYCLE
from mlserver_torch_stream.server.life.threads import exit_from_work
from mlserver_torch_stream.server.options import read_options

_MARK = "_torch_stream_ending"
_WHY = "the server is shutting down"
# Seconds after the aborts, for clients that do not read their last response, where only models of ours are served.
_GRPC_TAIL = 0.5
_REST_TAIL = 0.5


class EngineLost(Exception):
    """Ends the process with an error, once every client has its answer."""


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
        if LIFECYCLE.members():
            atexit.register(lambda: exit_from_work(0 if LIFECYCLE.failure is None else 1))
            if sig is not None:
                LIFECYCLE.ending = True
                await _end(server, signal.Signals(sig).name)
        await original(server, sig)

    setattr(stop, _MARK, True)
    MLServer.stop = stop


def take_signals() -> None:
    """Takes SIGINT and SIGTERM from uvicorn, which would close the REST listener at once.

    Only Python's handlers are replaced: MLServer hears of signals through the event loop's wake-up descriptor.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for each in HANDLED_SIGNALS:
        if isinstance(getattr(signal.getsignal(each), "__self__", None), uvicorn.Server):
            signal.signal(each, _leave_it_to_the_loop)


def _leave_it_to_the_loop(*_: object) -> None:
    pass


async def _end(server: MLServer, why: str) -> None:
    options = read_options()
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
    _see_to_shutdown(rest)


async def _only_ours(server: MLServer) -> bool:
    models = await server._model_registry.get_models()
    return all(getattr(model, "streams_tokens", False) for model in models)


def _see_to_shutdown(listener: Any) -> None:
    """Loads that were interrupted fail when nobody can ask for their models any more.

    MLServer's main task waits for this listener and raises what it raises: so the process ends with an error.
    """
    shutdown = listener.shutdown

    async def shutdown_and_fail(*args: Any, **options: Any) -> None:
        LIFECYCLE.close()
        await shutdown(*args, **options)
        if LIFECYCLE.failure is not None:
            raise EngineLost(LIFECYCLE.failure)

    listener.shutdown = shutdown_and_fail
