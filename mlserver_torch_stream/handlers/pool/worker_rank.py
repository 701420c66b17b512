"""Starts and ends one process of a worker, sends messages to it, and logs its output at a limited rate."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from mlserver_torch_stream import version
from mlserver_torch_stream.handlers.config.worker_settings import environment_of
from mlserver_torch_stream.handlers.frames import FrameBuffer
from mlserver_torch_stream.process_output import drain

_PACKAGE = Path(version.__file__).parent
# The worker imports this package by its folder, so that an interpreter with its own packages sees no other package of
# the server's environment. The server's working directory is not on its import path.
_PROGRAM = """
import importlib.util, sys
sys.path[:] = [path for path in sys.path if path]
spec = importlib.util.spec_from_file_location({name!r}, {file!r}, submodule_search_locations=[{folder!r}])
package = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from mlserver_torch_stream.handlers.worker.subreaper import supervise
supervise({descriptor})  # before anything else is imported, so that the subreaper stays small
from mlserver_torch_stream.handlers.worker.main import main
main({descriptor})
"""
_MAX_BUFFERS = 1024  # that one system call sends; Linux takes no more
# Bytes that a connection takes at once. With the default of about 200 KiB, a batch of large bodies would wait for
# several turns of the event loop.
_UNREAD_BYTES = 4 << 20
_STOP_S = 5.0
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MAX_STOP_S = 2 * _STOP_S  # the longest time that ``WorkerRank.wait`` takes


@dataclass(frozen=True)
class WorkerOrder:
    """The first message to a worker, which says what to load. ``environment`` has one mapping for each rank.

    ``python`` is the interpreter that runs the worker; None means the server's own. The worker does not see the
    server's environment variables whose whole names match ``hidden``.
    """

    message: Mapping[str, Any]
    body: bytes
    environment: Sequence[Mapping[str, str]]
    python: str | None
    hidden: re.Pattern[str] | None = None


class WorkerRank:
    """One worker process. Its parent is a subreaper, a child process of the server.

    When the connection closes, for example because the server ends, the subreaper kills the worker and all processes
    that the worker has started.
    """

    def __init__(self, number: int, name: str, environment: Mapping[str, str], order: WorkerOrder) -> None:
        self.number = number
        self.name = name
        self.connection, workers_end = socket.socketpair()
        self.connection.setblocking(False)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        self._loop = asyncio.get_running_loop()
        self.frames = FrameBuffer(_parse)
        self.reading = False  # True: the event loop reads the connection
        self.ended = False  # True: the connection has ended, and is no longer read
        self.trouble = ""  # the reason if the connection ended before the process
        self.killed = threading.Event()
        self._unsent: deque[memoryview] = deque()  # parts of frames that the connection has not taken yet
        self._full = False  # True: the event loop waits until the connection takes more
        output, writing = os.pipe()
        inherited = {
            key: value
            for key, value in environment_of(order.python).items()
            if key not in _RANK_VARIABLES and not (order.hidden and order.hidden.fullmatch(key))
        }
        try:
            self.process = subprocess.Popen(
                [order.python or sys.executable, "-c", _program(workers_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env={**inherited, "PYTHONUNBUFFERED": "1", **environment},
                pass_fds=(workers_end.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            self.connection.close()
            os.close(output)
            raise
        finally:
            os.close(writing)
            workers_end.close()
        drain(output, name)

    def send(self, *frame: bytes) -> None:
        """Queues a frame, given in parts. The frames of one turn of the event loop are sent together, as soon as the
        socket is writable.
        """
        if not self._unsent:
            self._loop.call_soon(self._send_on)
        self._unsent.extend(map(memoryview, frame))

    def _send_on(self) -> None:
        if self.ended:
            return
        try:
            sent = self.connection.sendmsg(list(islice(self._unsent, _MAX_BUFFERS)))
        except BlockingIOError:
            sent = 0
        except OSError:  # the connection has ended, which the next read reports
            self._unsent.clear()
            sent = 0
        while self._unsent and sent >= len(self._unsent[0]):
            sent -= len(self._unsent.popleft())
        if sent:
            self._unsent[0] = self._unsent[0][sent:]
        if self._full != bool(self._unsent):
            self._full = not self._full
            if self._full:
                self._loop.add_writer(self.connection, self._send_on)
            else:
                self._loop.remove_writer(self.connection)

    def end(self) -> None:
        """Called on the event loop when the connection has ended. Idempotent."""
        if not self.ended:
            self.ended = True
            self._loop.remove_reader(self.connection)
            self._loop.remove_writer(self.connection)

    def kill(self) -> None:
        """Closes the connection, which makes the subreaper kill the worker and its processes."""
        self.killed.set()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def wait(self) -> str:
        """Waits at most ``MAX_STOP_S`` seconds for the end of the process, and returns how it ended.

        A process in uninterruptible sleep may outlive the wait.
        """
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:  # the subreaper hangs: the worker dies with it
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_S)
        code = self.process.returncode
        if code is None:
            return "does not end"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def _parse(header: bytes) -> Any:
    """Parses with orjson, four times as fast as json. Lone surrogates, NaN and large integers are left to json."""
    try:
        return orjson.loads(header)
    except ValueError:
        return json.loads(header)


def _program(descriptor: int) -> str:
    return _PROGRAM.format(
        name=_PACKAGE.name, file=str(_PACKAGE / "__init__.py"), folder=str(_PACKAGE), descriptor=descriptor
    )
