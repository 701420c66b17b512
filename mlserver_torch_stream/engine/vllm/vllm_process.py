"""Starts vLLM's worker in an interpreter of its own, exchanges messages with it, and ends it together with its
descendants.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlserver_torch_stream import version
from mlserver_torch_stream.engine.child_process import how_it_ended
from mlserver_torch_stream.engine.failures import VllmLost
from mlserver_torch_stream.engine.vllm.messages import (
    MAX_MESSAGE,
    PROTOCOL,
    Output,
    Ready,
    StartOrder,
    WorkerStats,
    decode_outputs,
    in_line,
)
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.handlers.frames import BrokenFrame, FrameReader
from mlserver_torch_stream.process_output import drain

logger = logging.getLogger(__name__)
_PACKAGE = Path(version.__file__).parent
# The worker imports this package from its folder, and nothing of the server's working directory.
_PROGRAM = """
import importlib.util, sys
sys.path[:] = [path for path in sys.path if path]
spec = importlib.util.spec_from_file_location({name!r}, {file!r}, submodule_search_locations=[{folder!r}])
package = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from mlserver_torch_stream.handlers.worker.subreaper import supervise
supervise({descriptor}, {own!r})  # before anything else is imported, so that the subreaper stays small
from mlserver_torch_stream.engine.vllm.worker import main
main({descriptor}, {own!r})
"""
_TELL_S = 10.0  # seconds for the end of the killed processes, after which clients are told of the end all the same
_STOP_S = 120.0  # further seconds: the kernel frees tens of gigabytes of a killed process before it has ended
_OURS = "MLSERVER_"  # variables of the server, among them the file of its keys
_OF_OUR_PYTHON = ("PYTHONHOME", "PYTHONPATH", "__PYVENV_LAUNCHER__", "VIRTUAL_ENV", "LD_PRELOAD")
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SILENT = {
    **{name: "1" for name in ("VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "DO_NOT_TRACK")},
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
_PREFIX = "vllm-"
_MAX_PLACE = 107 - len(f"/{_PREFIX}01234567/") - 36  # a socket's path has at most 107 bytes; vLLM names it by a UUID
_MALLOC = "libtcmalloc_minimal.so.4"
_OPENMP = "libiomp5.so"
_LIBRARIES = tuple(map(Path, ("/usr/lib", "/usr/lib64", "/usr/local/lib")))


@dataclass(frozen=True)
class WorkerCommand:
    """How a worker is started. ``cores`` are the cores on this machine that all ranks of the worker share."""

    python: str
    order: StartOrder
    name: str
    cores: Sequence[int] = ()
    ranks: int = 1  # the number of ranks on this machine
    several_machines: bool = False

    def environment(self, folder: str) -> dict[str, str]:
        """Returns the worker's environment variables.

        These are the server's variables without the server's own settings, plus ``folder`` as the place for files.
        """
        hidden = (*_OF_OUR_PYTHON, *_RANK_VARIABLES)
        kept = {key: value for key, value in os.environ.items() if key not in hidden and not key.startswith(_OURS)}
        chosen = {
            **_SILENT,
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": folder,
            "VLLM_RPC_BASE_PATH": folder,
            "PATH": os.pathsep.join([str(Path(self.python).parent), os.environ.get("PATH", "")]),
        }
        defaults = {
            **({} if self.several_machines else _LOOPBACK),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_OMP_THREADS_BIND": bound_cores(self.cores, self.ranks),
        }
        if preloaded := _preloaded(self.python):
            defaults["LD_PRELOAD"] = preloaded
        return {**defaults, **kept, **chosen}


def bound_cores(cores: Sequence[int], ranks: int) -> str:
    """Returns the cores of each rank in vLLM's format, such as ``0,1|2,3``, or ``nobind`` if there are fewer cores than
    ranks.

    Without this, vLLM would use all cores of the machine, even cores outside the container's share.
    """
    share = len(cores) // ranks
    if not share:
        return "nobind"
    return "|".join(",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(ranks))


def _preloaded(python: str) -> str:
    """Returns the libraries that make vLLM fast on CPUs when preloaded, as found in vLLM's environment and in the
    system.
    """
    own = Path(python).parent.parent / "lib"
    openmp = own / _OPENMP
    if not openmp.is_file():
        return ""
    places = [own, *(folder for place in _LIBRARIES for folder in (place, *sorted(place.glob("*-linux-gnu"))))]
    mallocs = [str(place / _MALLOC) for place in places if (place / _MALLOC).is_file()]
    return ":".join([*mallocs[:1], str(openmp)])


@dataclass(frozen=True)
class Outputs:
    """The contents of an ``outputs`` message of the worker."""

    outputs: Sequence[Output]
    stats: WorkerStats | None


class VllmProcess:
    """A running worker. Any thread may call its methods; ``listen``'s callback runs on its reading thread.

    The child of this process is a subreaper, and the worker is a child of the subreaper. When the connection closes,
    even because this process is killed, the subreaper ends the worker and its descendants, and removes what they leave
    behind.
    """

    def __init__(self, command: WorkerCommand) -> None:
        """Raises LoadFailed if the interpreter cannot be started."""
        self.name = command.name
        self.ready: Future[Ready] = Future()
        self.ending = False  # it is being killed, or has ended
        self.lost: VllmLost | None = None
        self._received: deque[Outputs] = deque()
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._calls: dict[int, Future[None]] = {}
        self._calling = threading.Lock()
        self._last_call = 0
        self._wake: Callable[[], object] = lambda: None
        self._why: str | None = None  # why it was killed
        self._folder = _own_folder()
        self._connection, workers_end = socket.socketpair()
        output, writing = os.pipe()
        try:
            self.process = subprocess.Popen(
                [command.python, "-c", _program(workers_end.fileno(), self._folder)],
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env=command.environment(self._folder),
                pass_fds=(workers_end.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            self._connection.close()
            os.close(output)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise LoadFailed(f"parameters.extra.vllm_python: {command.python} cannot be started: {error}") from error
        finally:
            os.close(writing)
            workers_end.close()
        drain(output, self.name)
        self._threads = [
            threading.Thread(target=self._write, name=f"{self.name}: writes", daemon=True),
            threading.Thread(target=self._read, args=(command.order,), name=f"{self.name}: reads", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def listen(self, wake: Callable[[], object]) -> None:
        """Calls ``wake`` after each message from now on, and when the worker has ended."""
        self._wake = wake
        wake()

    def send(self, frame: bytes) -> None:
        """Sends a frame without waiting until the worker reads it."""
        self._unsent.put(frame)

    def call(self, message: Callable[[int], bytes]) -> Future[None]:
        """Sends a message that the worker answers. ``message`` makes this message from the number of the call.

        The future raises LoadFailed with the worker's reason, or VllmLost.
        """
        answer: Future[None] = Future()
        answer.set_running_or_notify_cancel()  # the waiting caller may leave; the answer still comes
        with self._calling:
            if self.lost is not None:
                answer.set_exception(self.lost)
                return answer
            self._last_call += 1
            number = self._last_call
            self._calls[number] = answer
        self.send(message(number))
        return answer

    def take(self) -> list[Outputs]:
        """Returns the outputs since the last call."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._received.popleft())
        return taken

    def kill(self, why: str | None = None) -> None:
        """Ends the worker and all its descendants. ``why`` is the reason that is reported to waiting callers."""
        self._why = self._why or why
        self.ending = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def wait(self) -> None:
        """Kills the worker if it is running, and blocks until none of its processes is left, for two minutes or so."""
        self.kill()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _write(self) -> None:
        while (frame := self._unsent.get()) is not None:
            try:
                self._connection.sendall(frame)
            except OSError:  # the worker may have closed this direction alone
                self.kill()
                return

    def _read(self, order: StartOrder) -> None:
        why = None
        try:
            why = self._receive_all(order)
        except Exception as error:  # includes the errors that a message with wrong types or a second ``ready`` raises
            why = f"sent something that is not a message: {in_line(error)}"
        finally:
            self._end(why)

    def _receive_all(self, order: StartOrder) -> str | None:
        """Reads messages until the connection ends. Returns the worker's reason for ending, if it has sent one."""
        reader = FrameReader(self._connection, MAX_MESSAGE)
        if (first := reader.read()) is None:
            return None
        vllm = _checked_hello(first[0])
        self.send(order.encode())
        while (frame := reader.read()) is not None:
            header = frame[0]
            kind = header.get("t")
            if kind in ("ready", "refused") and self.ready.done():
                raise BrokenFrame(f"a second answer to the start: {kind!r}")
            if kind == "ready":
                self.ready.set_result(Ready.of(header, vllm))
            elif kind == "refused":
                self.ready.set_exception(_refusal(header))
            elif kind == "outputs":
                self._received.append(Outputs(*decode_outputs(header)))
            elif kind == "answered":
                self._answer(header)
            elif kind == "died":
                return f"has died: {in_line(header.get('why'))}"
            else:
                raise BrokenFrame(f"an unknown message {str(kind)[:50]!r}")
            self._wake()
        return None

    def _answer(self, header: Mapping[str, Any]) -> None:
        with self._calling:
            answer = self._calls.pop(header.get("call", 0), None)
        if answer is None:
            raise BrokenFrame("an answer to an unknown call")
        if header.get("error") is None:
            answer.set_result(None)
        else:
            answer.set_exception(LoadFailed(in_line(header["error"])))

    def _end(self, why: str | None) -> None:
        """Ends the worker and all its descendants, and wakes all waiting callers."""
        self.kill()
        ended = self._ended(_TELL_S)
        how = how_it_ended(self.process.returncode) if ended else "has ended"
        self._unsent.put(None)
        with self._calling:
            self.lost = VllmLost(f"vLLM's worker {self._why or why or how}")
            calls, self._calls = list(self._calls.values()), {}
        for answer in calls:
            answer.set_exception(self.lost)
        if not self.ready.done():
            self.ready.set_exception(LoadFailed(f"{self.lost} before it was ready; the log has its output"))
        self._wake()
        if not ended:
            logger.warning("%s has processes that were killed %g s ago and have not ended", self.name, _TELL_S)
        if not ended and not self._ended(_STOP_S):
            logger.error("%s is no longer waited for; processes of it may be left", self.name)
            self.process.kill()  # then the kernel kills the worker, if the subreaper has not done so
            self.process.wait()
        self._connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)  # the subreaper has done so, unless it was killed

    def _ended(self, seconds: float) -> bool:
        """Waits for the subreaper, which ends when no process below it is left. Returns False if that takes longer."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None


def _own_folder() -> str:
    """Makes the worker's folder.

    If the paths of vLLM's sockets would be too long in ``TMPDIR``, the folder is in ``/tmp``.
    """
    place = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix=_PREFIX, dir=place if len(os.fsencode(place)) <= _MAX_PLACE else "/tmp")


def _program(descriptor: int, own: str) -> str:
    return _PROGRAM.format(
        name=_PACKAGE.name,
        file=str(_PACKAGE / "__init__.py"),
        folder=str(_PACKAGE),
        descriptor=descriptor,
        own=own,
    )


def _checked_hello(header: Mapping[str, Any]) -> str:
    if header.get("t") != "hello" or header.get("protocol") != PROTOCOL:
        raise BrokenFrame(f"a worker of protocol {header.get('protocol')!r}, not {PROTOCOL}")
    return in_line(header.get("vllm", ""))


def _refusal(header: Mapping[str, Any]) -> LoadFailed:
    if header.get("field") is not None:
        return LoadFailed(f"parameters.extra.vllm: {in_line(header.get('why'))}")
    return LoadFailed(f"vLLM: {in_line(header.get('why'))}; the log has vLLM's own output above")


def cores_of_this_process(count: int) -> list[int]:
    """Returns the first ``count`` of this process's cores; an empty list if the system does not report them."""
    if sys.platform != "linux":
        return []
    return sorted(os.sched_getaffinity(0))[:count]
