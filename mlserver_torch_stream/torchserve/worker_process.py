"""Starts and ends one worker: a process, or one for each rank of a parallel handler, each with its own connection.

Knows nothing of what messages mean, nor of when a worker is started again. It reads their messages on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlserver_torch_stream import version
from mlserver_torch_stream.torchserve.frames import BrokenFrame, FrameBuffer, encode_frame
from mlserver_torch_stream.torchserve.handler_request import HandlerJob
from mlserver_torch_stream.torchserve.interpreter import environment_of
from mlserver_torch_stream.torchserve.log_drain import drain

logger = logging.getLogger(__name__)
_PACKAGE = Path(version.__file__).parent
# The worker imports this package from its folder, so that an interpreter with packages of its own sees no other package
# of the server. Nothing of the server's working directory is imported.
_PROGRAM = """
import importlib.util, sys
sys.path[:] = [path for path in sys.path if path]
spec = importlib.util.spec_from_file_location({name!r}, {file!r}, submodule_search_locations=[{folder!r}])
package = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from mlserver_torch_stream.torchserve.worker.subreaper import supervise
supervise({descriptor})  # before anything else is imported, so that the subreaper stays small
from mlserver_torch_stream.torchserve.worker.main import main
main({descriptor})
"""
_MOST_READ = 1 << 18  # bytes, at once
_MOST_AT_ONCE = 64  # messages that are passed on before others on the event loop have their turn
_STOP_S = 5.0
_OF_ALL_RANKS = ("ready", "refused", "sends", "next", "meets")  # messages that all ranks send, not only the first
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Receive = Callable[[dict[str, Any], bytes], None]


@dataclass(frozen=True)
class WorkerOrder:
    """What a worker loads: the first message to it. ``environment`` has one mapping per rank.

    ``python``: the interpreter that runs the worker, None for the server's own. ``hidden``: matches the whole names of
    the server's variables that the worker does not see.
    """

    message: Mapping[str, Any]
    body: bytes
    environment: Sequence[Mapping[str, str]]
    python: str | None
    hidden: re.Pattern[str] | None = None


class WorkerEnded(Exception):
    """Why a worker has ended."""


class WorkerProcess:
    """Calls ``receive`` with each message and its ``rank``, and ``lost`` once, with the reason of the end.

    It is made on the event loop, which calls both. ``post`` calls there from any thread; False: the loop is closed.
    """

    def __init__(
        self,
        name: str,
        order: WorkerOrder,
        post: Callable[..., bool],
        receive: Receive,
        lost: Callable[[WorkerEnded], None],
    ) -> None:
        self.name = name
        self._loop = asyncio.get_running_loop()
        self._post = post
        self._receive = receive
        self._lost = lost
        self._ranks: list[_Rank] = []
        self._reapers: list[threading.Thread] = []
        self._flowing = True
        self._ending = threading.Lock()
        self._end_posted = False
        for number, environment in enumerate(order.environment):
            shown = name if len(order.environment) == 1 else f"{name} rank {number}"
            try:
                self._ranks.append(_Rank(number, shown, environment, order))
            except BaseException:  # the ranks that have started have no reaper yet that would end them
                for rank in self._ranks:
                    rank.kill()
                    rank.wait()
                    rank.close()
                raise
        for rank in self._ranks:
            rank.send({**order.message, "responds": rank.number == 0}, order.body)
            reaper = threading.Thread(target=self._reap, args=(rank,), name=f"reaper of {rank.name}", daemon=True)
            self._reapers.append(reaper)
            reaper.start()
            self._set_reading(rank, True)

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def send(self, header: Mapping[str, Any], body: bytes, all_ranks: bool) -> None:
        """Does not wait for the worker to read."""
        for rank in self._ranks if all_ranks else self._ranks[:1]:
            rank.send(header, body)

    def pause(self) -> None:
        """Reads no more messages until ``resume``, so that the worker waits at its next one."""
        self._flowing = False

    def resume(self) -> None:
        self._flowing = True
        for rank in self._ranks:
            self._loop.call_soon(self._pass_on, rank)

    def kill(self, why: str | None = None) -> None:
        """Ends the worker with all processes that it has started. ``why`` is the reason that ``lost`` gets."""
        for rank in self._ranks:
            rank.kill()
        if why is not None:
            self._post_end(WorkerEnded(why))

    def wait(self) -> None:
        """Blocks until no process is left."""
        for reaper in self._reapers:
            reaper.join(2 * _STOP_S)

    def _read(self, rank: _Rank) -> None:
        """Takes what has arrived. The connection ends with the process, or after ``kill``."""
        try:
            data = rank.connection.recv(_MOST_READ)
        except BlockingIOError:
            return
        except OSError as error:
            self._end_reading(rank, f": {error}")
            return
        if data:
            rank.frames.feed(data)
            self._pass_on(rank)
        else:
            self._end_reading(rank)

    def _pass_on(self, rank: _Rank) -> None:
        """Passes on the messages that are complete; others on the event loop have their turn between many of them."""
        left = _MOST_AT_ONCE
        while left and self._flowing and (frame := self._next(rank)) is not None:
            self._receive(*frame)
            left -= 1
        if not left and self._flowing:
            self._loop.call_soon(self._pass_on, rank)
        self._set_reading(rank, self._flowing and left > 0)

    def _next(self, rank: _Rank) -> tuple[dict[str, Any], bytes] | None:
        """The next complete message that is not for nothing: most are those of the first rank alone."""
        try:
            while (frame := rank.frames.take()) is not None:
                if rank.number == 0 or frame[0]["t"] in _OF_ALL_RANKS:
                    frame[0]["rank"] = rank.number
                    return frame
        except BrokenFrame as error:
            rank.frames = FrameBuffer()
            self._end_reading(rank, f": {error}")
        return None

    def _set_reading(self, rank: _Rank, reading: bool) -> None:
        if rank.ended or rank.reading == reading:
            return
        rank.reading = reading
        if reading:
            self._loop.add_reader(rank.connection, self._read, rank)
        else:
            self._loop.remove_reader(rank.connection)

    def _end_reading(self, rank: _Rank, why: str = "") -> None:
        rank.trouble = why
        rank.end()
        rank.kill()

    def _reap(self, rank: _Rank) -> None:
        """Waits, in a thread, for ``kill`` or the end of the connection, and then for the end of the process."""
        rank.killed.wait()
        how = rank.wait()
        if not self._post(self._reaped, rank, how):
            rank.close()

    def _reaped(self, rank: _Rank, how: str) -> None:
        """The process has ended."""
        self._read_rest(rank)
        rank.close()
        self._post_end(WorkerEnded(f"{rank.name} {how}{rank.trouble}"))
        self.kill()  # the other ranks, which would wait for this one

    def _read_rest(self, rank: _Rank) -> None:
        """Passes on what a rank that was killed had sent before."""
        while not rank.ended:
            self._read(rank)
        while (frame := self._next(rank)) is not None:
            self._receive(*frame)

    def _report_end(self, ended: WorkerEnded) -> None:
        for rank in self._ranks:
            self._read_rest(rank)
        self._lost(ended)

    def _post_end(self, ended: WorkerEnded) -> None:
        with self._ending:
            if self._end_posted:
                return
            self._end_posted = True
        self._post(self._report_end, ended)


class _Rank:
    """One worker process and the subreaper above it, which is the child of this process.

    When the connection closes, also because this process ends, the subreaper ends the worker and all processes that the
    worker has started.
    """

    def __init__(self, number: int, name: str, environment: Mapping[str, str], order: WorkerOrder) -> None:
        self.number = number
        self.name = name
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self.frames = FrameBuffer()
        self.reading = False  # the event loop watches the connection
        self.ended = False  # nothing more is read of the connection
        self.trouble = ""  # why it ended, other than with the process
        self.killed = threading.Event()
        self._unsent: deque[memoryview] = deque()  # what the connection did not take yet
        self._reading, writing = os.pipe()
        inherited = {
            key: value
            for key, value in environment_of(order.python).items()
            if key not in _RANK_VARIABLES and not (order.hidden and order.hidden.fullmatch(key))
        }
        try:
            self.process = subprocess.Popen(
                [order.python or sys.executable, "-c", _program(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env={**inherited, "PYTHONUNBUFFERED": "1", **environment},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            self.connection.close()
            os.close(self._reading)
            raise
        finally:
            os.close(writing)
            theirs.close()
        drain(self._reading, name)

    def send(self, header: Mapping[str, Any], body: bytes) -> None:
        """Sends what the connection takes at once, and the rest as soon as it takes more."""
        if self.ended:
            return
        frame = memoryview(encode_frame(header, body))
        if not self._unsent:
            frame = self._left_of(frame)
            if frame:
                self._loop.add_writer(self.connection, self._send_on)
        if frame:
            self._unsent.append(frame)

    def _left_of(self, frame: memoryview) -> memoryview:
        try:
            return frame[self.connection.send(frame) :]
        except BlockingIOError:
            return frame
        except OSError:  # the event loop reads the end of the connection
            return frame[:0]

    def _send_on(self) -> None:
        self._unsent[0] = self._left_of(self._unsent[0])
        if not self._unsent[0]:
            self._unsent.popleft()
        if not self._unsent:
            self._loop.remove_writer(self.connection)

    def end(self) -> None:
        """The connection has ended. Called on the event loop; idempotent."""
        if not self.ended:
            self.ended = True
            self._loop.remove_reader(self.connection)
            self._loop.remove_writer(self.connection)

    def kill(self) -> None:
        self.killed.set()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def wait(self) -> str:
        """How the process ended. One in uninterruptible sleep may outlive the wait."""
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:  # the subreaper hangs; the worker ends with it
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_S)
        code = self.process.returncode
        if code is None:
            return "does not end"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def close(self) -> None:
        """Called after the end of the process."""
        self.connection.close()


def _program(descriptor: int) -> str:
    return _PROGRAM.format(
        name=_PACKAGE.name, file=str(_PACKAGE / "__init__.py"), folder=str(_PACKAGE), descriptor=descriptor
    )


def batch_message(jobs: Sequence[HandlerJob]) -> tuple[dict[str, Any], bytes]:
    """The message that makes a worker run these jobs as one batch."""
    requests = [
        {
            "id": job.key,
            "headers": dict(job.request.headers),
            "parts": [{"name": part.name, "ct": part.content_type, "n": len(part.value)} for part in job.request.parts],
        }
        for job in jobs
    ]
    body = b"".join(part.value for job in jobs for part in job.request.parts)
    return {"t": "run", "requests": requests}, body
