"""The main program of a worker: one thread reads the server's messages, the main thread runs the handler.

When the server's end of the connection closes, the process ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from functools import partial
from typing import Any, Callable

from mlserver_torch_stream.handlers.frames import BrokenFrame
from mlserver_torch_stream.handlers.worker import handler as handlers
from mlserver_torch_stream.handlers.worker.cancellation import NeverStop, StopAlone, StopTogether
from mlserver_torch_stream.handlers.worker.channel import Channel


def main(descriptor: int) -> None:
    """Runs a worker on the connection ``descriptor``: loads the handler, then calls it until the connection ends."""
    logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    worker = HandlerHost(Channel(connection, lost=_end))
    worker.load()
    worker.run()


class HandlerHost:
    """Loads a handler and runs requests with it.

    Call ``load`` once, then ``run``, which reports that the worker is ready and never returns.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._tasks: Any = None  # a Tasks if the model sets asyncCommunication
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = NeverStop()

    def load(self) -> None:
        """Loads the handler that the first message names; if that fails, the process ends."""
        first = self._channel.read()
        if first is None:
            os._exit(0)
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        self._order = order = first[0]
        self._yaml = pickle.loads(first[1][0])
        if order["stops"] != "never":
            self._stop = StopAlone() if order["stops"] == "alone" else StopTogether(self._channel)
        if order["mode"] == "async":
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        try:
            handlers.provide_ts(order["ts"])
            handlers.enter(order["folder"])
            self._found = handlers.find_handler(
                order["handler"], order["folder"], order["envelope"], order["mode"] == "async"
            )
            self._context = self._make_context()
            self._initialize()
            self._serve = self._prepare()
        except handlers.HandlerRefused as error:
            self._refuse(str(error), error.__cause__)
        except Exception as error:  # not the handler's: those are HandlerRefused
            self._refuse(f"TorchServe's package cannot be used: {handlers.described(error)}", error)

    def _refuse(self, message: str, cause: BaseException | None) -> None:
        if cause is not None:
            logging.error("The handler cannot be loaded", exc_info=cause)
        self._exit_if_forked()
        self._channel.send("refused", message=message)
        _end()

    def _make_context(self) -> Any:
        from ts import __version__

        from mlserver_torch_stream.handlers.worker.handler_context import HandlerContext, Metrics

        order = self._order
        return HandlerContext(
            order["model"],
            order["folder"],
            order["manifest"],
            order["batch_size"],
            order["gpu"],
            __version__,
            order["limits_pixels"],
            Metrics(self._channel, order["model"], order["metrics"]),
            self._yaml,
        )

    def _initialize(self) -> None:
        """Calls the handler's ``initialize``. If that returns a coroutine, as a module-level ``async def handle`` does,
        runs it.
        """
        try:
            returned = self._found.initialize(self._context)
            if inspect.iscoroutine(returned) and self._loop is not None:
                self._loop.run_until_complete(returned)
        except BaseException as error:
            raise handlers.HandlerRefused(f"initialize raised {handlers.described(error)}") from error
        if inspect.iscoroutine(returned) and self._loop is None:
            returned.close()
            raise handlers.HandlerRefused("initialize is an `async def`, which needs asyncCommunication: true")
        self._exit_if_forked()

    def _prepare(self) -> Callable[[], object]:
        """Returns the function that runs requests in a loop. The ``ts`` package, if present, imports torch here."""
        mode = self._order["mode"]
        entry, context, channel = self._found.entry, self._context, self._channel
        if mode == "async":
            from mlserver_torch_stream.handlers.worker.calls import Tasks

            assert self._loop is not None
            self._tasks = Tasks(entry, context, channel, self._loop)
            return self._loop.run_forever
        if mode == "continuous":
            from mlserver_torch_stream.handlers.worker.continuous import Continuous, run_steps

            return partial(run_steps, Continuous(entry, context, channel), self._take)
        from mlserver_torch_stream.handlers.worker.calls import Caller, run_calls

        return partial(run_calls, Caller(entry, context, channel, self._order["responds"], self._stop), self._take)

    def run(self) -> None:
        """Reports that the worker is ready, and runs requests forever."""
        self._channel.send("ready")
        self._serve()

    def _take(self, wait: bool) -> list[Any]:
        """Returns the requests that have arrived; with ``wait``, waits until there is at least one."""
        self._exit_if_forked()
        requests: list[Any] = []
        try:
            requests += self._requests.get(block=wait)
            while self._order["mode"] == "continuous":
                requests += self._requests.get_nowait()
        except queue.Empty:
            pass
        return requests

    def _exit_if_forked(self) -> None:
        if self._channel.forked:
            os._exit(0)

    def _read(self) -> None:
        """Reads until the server's end of the connection closes, then ends the process."""
        try:
            while (frame := self._channel.read()) is not None:
                self._receive(*frame)
        except OSError:  # the server was killed, and the connection reset
            pass
        except BrokenFrame as error:
            logging.error("The server has sent an invalid message: %s", error)
        finally:
            _end()

    def _receive(self, header: dict[str, Any], values: list[bytes]) -> None:
        from mlserver_torch_stream.handlers.worker.handler_context import WorkerRequest

        if header["t"] == "cancel":
            self._channel.cancel(header["ids"])
            if self._tasks is not None:
                self._tasks.cancel(header["ids"])
            return
        if header["t"] != "run":
            self._stop.receive(header)
            return
        following = iter(values)
        requests = [
            WorkerRequest(
                given["id"],
                given["headers"],
                [(part["name"], part["ct"], next(following)) for part in given["parts"]],
            )
            for given in header["requests"]
        ]
        self._channel.expect(request.id for request in requests)
        if self._tasks is not None:
            self._tasks.start(requests)
        else:
            self._requests.put(requests)


def _end() -> None:
    """Ends this process group at once; the subreaper ends the other processes that the handler has started."""
    with contextlib.suppress(Exception):  # the handler may have replaced stdout, or nothing reads it now
        sys.stdout.flush()
    os.killpg(os.getpgrp(), signal.SIGKILL)
