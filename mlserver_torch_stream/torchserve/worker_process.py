"""One worker: a process, or as many as a parallel handler has ranks, each with a connection of its own.

Knows nothing of requests' meaning, nor of when a worker is started anew. What it hears it posts to the event loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlserver_torch_stream import version
from mlserver_torch_stream.torchserve.frames import BrokenFrame, FrameReader, encode_frame
from mlserver_torch_stream.torchserve.handler_request import HandlerJob
from mlserver_torch_stream.torchserve.interpreter import environment_of
from mlserver_torch_stream.torchserve.log_drain import drain

logger = logging.getLogger(__name__)
_PACKAGE = Path(version.__file__).parent
# This package is given by its folder: no other of the server's comes into an interpreter that has its own. Nothing of
# the server's working directory is imported: the handler's folder comes first, later.
_PROGRAM = """
import importlib.util, sys
sys.path[:] = [path for path in sys.path if path]
spec = importlib.util.spec_from_file_location({name!r}, {file!r}, submodule_search_locations=[{folder!r}])
package = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from mlserver_torch_stream.torchserve.worker.start import start
start({descriptor})
"""
_MOST_UNHEARD = 64  # messages that wait for the event loop; then the worker waits for it too
_STOP_S = 5.0
_OF_ALL_RANKS = ("ready", "refused", "sends", "next", "meets")  # what is heard of other ranks than the first
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Heard = Callable[[dict[str, Any], bytes], None]


@dataclass(frozen=True)
class WorkerOrder:
    """What a worker loads. ``message`` and ``body`` go to it as they are; ``environment`` has one mapping per rank.

    ``python``: the interpreter that runs it, None for the server's own.
    """

    message: Mapping[str, Any]
    body: bytes
    environment: Sequence[Mapping[str, str]]
    python: str | None


class WorkerEnded(Exception):
    """Why a worker is no more."""


class WorkerProcess:
    """``heard`` gets messages with their ``rank``, ``lost`` the reason of the end, once; both on the loop."""

    def __init__(
        self,
        name: str,
        order: WorkerOrder,
        post: Callable[..., None],
        heard: Heard,
        lost: Callable[[WorkerEnded], None],
    ) -> None:
        self.name = name
        self._post = post
        self._heard = heard
        self._lost = lost
        self._ranks: list[_Rank] = []
        self._readers: list[threading.Thread] = []
        self._room = threading.Semaphore(_MOST_UNHEARD)
        self._flowing = threading.Event()
        self._flowing.set()
        self._ending = threading.Lock()
        self._told_end = False
        for number, environment in enumerate(order.environment):
            shown = name if len(order.environment) == 1 else f"{name} rank {number}"
            try:
                self._ranks.append(_Rank(number, shown, environment, order.python))
            except BaseException:  # those that have begun have nobody to end them
                for rank in self._ranks:
                    rank.kill()
                    rank.wait()
                    rank.close()
                raise
        for rank in self._ranks:
            rank.send({**order.message, "speaks": rank.number == 0}, order.body)
            reader = threading.Thread(target=self._read, args=(rank,), name=f"reader of {rank.name}", daemon=True)
            self._readers.append(reader)
            reader.start()

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def send(self, header: Mapping[str, Any], body: bytes, everybody: bool) -> None:
        """Does not wait for the worker to read: each rank has a thread that sends."""
        for rank in self._ranks if everybody else self._ranks[:1]:
            rank.send(header, body)

    def pause(self) -> None:
        """Nothing more is heard of it, so that it has to wait, until ``resume``."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def kill(self, why: str | None = None) -> None:
        """Ends it with all that it has started. ``why`` is told to ``lost``, unless it has ended already."""
        if why is not None:
            self._tell_lost(WorkerEnded(why))
        for rank in self._ranks:
            rank.kill()
        self._flowing.set()

    def wait(self) -> None:
        """Until no process is left. Blocks."""
        for reader in self._readers:
            reader.join(2 * _STOP_S)

    def _read(self, rank: _Rank) -> None:
        why = ""
        try:
            while (frame := rank.frames.read()) is not None:
                if rank.number == 0 or frame[0]["t"] in _OF_ALL_RANKS:
                    frame[0]["rank"] = rank.number
                    self._flowing.wait()
                    self._room.acquire()
                    self._post(self._hear, *frame)
        except (OSError, BrokenFrame) as error:
            why = f": {error}"
        rank.kill()
        self._tell_lost(WorkerEnded(f"{rank.name} {rank.wait()}{why}"))
        rank.close()
        self.kill()  # the other ranks are nothing without it

    def _hear(self, header: dict[str, Any], body: bytes) -> None:
        self._room.release()
        self._heard(header, body)

    def _tell_lost(self, ended: WorkerEnded) -> None:
        with self._ending:
            if self._told_end:
                return
            self._told_end = True
        self._post(self._lost, ended)


class _Rank:
    """One worker process and its supervisor, which is the child of this process.

    The supervisor ends the worker and whatever that has started when the connection closes, also with this process.
    """

    def __init__(self, number: int, name: str, environment: Mapping[str, str], python: str | None) -> None:
        self.number = number
        self.name = name
        self.connection, theirs = socket.socketpair()
        self.frames = FrameReader(self.connection)
        self._outgoing: list[bytes] = []
        self._condition = threading.Condition()
        self._closed = False
        self._reading, writing = os.pipe()
        inherited = {key: value for key, value in environment_of(python).items() if key not in _RANK_VARIABLES}
        try:
            self.process = subprocess.Popen(
                [python or sys.executable, "-c", _program(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env={**inherited, "PYTHONUNBUFFERED": "1", **environment},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            self.connection.close()
            self.frames.close()
            os.close(self._reading)
            raise
        finally:
            os.close(writing)
            theirs.close()
        drain(self._reading, name)
        self._writer = threading.Thread(target=self._write, name=f"writer to {name}", daemon=True)
        self._writer.start()

    def send(self, header: Mapping[str, Any], body: bytes) -> None:
        frame = encode_frame(header, body)
        with self._condition:
            self._outgoing.append(frame)
            self._condition.notify()

    def kill(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def wait(self) -> str:
        """How it ended. A process in uninterruptible sleep may outlive the wait."""
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:  # the supervisor hangs; the worker ends with it
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_S)
        code = self.process.returncode
        if code is None:
            return "does not end"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def close(self) -> None:
        """After its end."""
        self._writer.join(_STOP_S)
        self.frames.close()
        self.connection.close()

    def _write(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._outgoing or self._closed)
                if self._closed:
                    return
                frames, self._outgoing = self._outgoing, []
            try:
                self.connection.sendall(b"".join(frames))
            except OSError:
                return  # the reader notices


def _program(descriptor: int) -> str:
    return _PROGRAM.format(
        name=_PACKAGE.name, file=str(_PACKAGE / "__init__.py"), folder=str(_PACKAGE), descriptor=descriptor
    )


def batch_message(jobs: Sequence[HandlerJob]) -> tuple[dict[str, Any], bytes]:
    """What a worker is asked to run."""
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
