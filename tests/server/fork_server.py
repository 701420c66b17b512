"""Starts scripts of this environment, such as ``mlserver``, by forking a process that has imported their modules.

The imports take some seconds of CPU time, a fork some hundredths; all processes of a test run share one that forks. The
child has the script's working directory, variables, output and arguments, and runs the script as Python does. It cannot
have other values of variables that a library reads while it is imported: ``ForkServer.suits`` tells which environments
need a separate Python. The process that forks runs no thread of ours, no event loop, no channel and no OpenMP region.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

_IMPORTED = (
    "mlserver.cli",
    "mlserver.server",
    "mlserver_torch_stream.runtime",
    "mlserver_torch_stream.engine.own_engine",
    "transformers.models.llama.modeling_llama",
)
# Variables that no import reads. The child puts PYTHONPATH into sys.path. The last two are in the tests' own process as
# soon as it has loaded a model.
_READ_LATE = (
    *("AWS_", "MLSERVER_", "OTEL_BSP_", "PROTOCOL_VERSION", "PYTEST_", "PYTHONPATH", "TS_SERVICE_ENVELOPE"),
    *("DISABLE_SAFETENSORS_CONVERSION", "TORCHINDUCTOR_CACHE_DIR"),
)
_MESSAGE_BYTES = 2**17
_START_S = 120.0
_ROOT = Path(__file__).parents[2]


class ForkedProcess:
    """A child of the fork server, with what tests use of ``subprocess.Popen``."""

    def __init__(self, reports: int) -> None:
        self._reports = os.fdopen(reports, "rb", buffering=0)
        self.pid = int(self._reports.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._reports], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self.returncode = int(self._reports.readline())
            self._reports.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A connection to the process that forks, which ends with the last process that is connected to it."""

    def __init__(self) -> None:
        self._name = f"mlserver-torch-stream-tests-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
        self._process: subprocess.Popen[bytes] | None = None
        end = time.monotonic() + _START_S
        while (connected := self._connect()) is None:
            assert time.monotonic() < end, "the fork server does not start"
            if self._process is None or self._process.poll() is not None:  # it ends where another has the name
                command = [sys.executable, "-m", "tests.server.fork_server", self._name]
                known = dict(os.environ)  # not what a library has set beside it, as readline sets COLUMNS
                self._process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.DEVNULL, env=known)
            time.sleep(0.02)
        self._socket, self._environment = connected

    def _connect(self) -> tuple[socket.socket, dict[str, str]] | None:
        """Connects to the process. Returns the connection and that process's variables; None if it does not run.

        The process sends its variables once it has imported all modules.
        """
        connection = _socket()
        with contextlib.suppress(OSError):
            connection.connect(f"\0{self._name}")
            if told := connection.recv(_MESSAGE_BYTES):
                return connection, json.loads(told)
        connection.close()
        return None

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Returns whether a script runs the same in a fork as in a separate Python."""
        changed = {name for name, _ in environment.items() ^ self._environment.items()}
        folders = [Path(each) for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
        early = any((folder / "sitecustomize.py").exists() for folder in folders)
        return not early and all(name.startswith(_READ_LATE) for name in changed)

    def start(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], output: IO[bytes]
    ) -> ForkedProcess:
        """Runs a script in ``folder``.

        ``command`` is its path and its arguments; ``output`` gets its stdout and stderr.
        """
        message = json.dumps([list(command), str(folder), dict(environment)]).encode()
        assert len(message) < _MESSAGE_BYTES
        reports, theirs = os.pipe()
        socket.send_fds(self._socket, [message], [output.fileno(), theirs])
        os.close(theirs)
        return ForkedProcess(reports)

    def close(self) -> None:
        self._socket.close()
        if self._process is not None:
            self._process.wait(_START_S)


def can_fork() -> bool:
    """Returns whether a server's imports are installed, as some tests run without torch.

    Only Linux has ``pidfd_open``.
    """
    return importlib.util.find_spec("torch") is not None and hasattr(os, "pidfd_open")


@cache
def fork_server() -> ForkServer:
    """The fork server of this process."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _serve(listener: socket.socket, environment: bytes) -> list[str] | None:
    """Returns the command in each child, and None in the parent once nobody is connected any more."""
    children: dict[int, tuple[int, int]] = {}  # by pidfd: the pid, and the pipe for its status
    connections: dict[int, socket.socket] = {}
    ready = select.poll()
    ready.register(listener, select.POLLIN)
    while events := ready.poll(None if connections else 1000 * _START_S):
        for descriptor, _ in events:
            if descriptor in children:
                ready.unregister(descriptor)
                _report_end(descriptor, *children.pop(descriptor))
                continue
            if descriptor == listener.fileno():
                connection, _ = listener.accept()
                if _is_ours(connection):
                    connection.send(environment)
                    connections[connection.fileno()] = connection
                    ready.register(connection, select.POLLIN)
                continue
            message, passed, _, _ = socket.recv_fds(connections[descriptor], _MESSAGE_BYTES, 2)
            if not message:
                ready.unregister(descriptor)
                connections.pop(descriptor).close()
                if not connections:
                    return None
                continue
            pid = os.fork()
            if pid == 0:
                for each in (listener, *connections.values()):
                    each.detach()
                return _become(*json.loads(message), output=passed[0])
            os.close(passed[0])
            os.write(passed[1], b"%d\n" % pid)
            child = os.pidfd_open(pid)
            children[child] = pid, passed[1]
            ready.register(child, select.POLLIN)
    return None


def _is_ours(connection: socket.socket) -> bool:
    """Returns whether the client is the same user, as connected clients have scripts run by this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.getuid()


def _report_end(child: int, pid: int, reports: int) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(reports, b"%d\n" % status)
    os.close(reports)
    os.close(child)


def _become(command: list[str], folder: str, environment: dict[str, str], output: int) -> list[str]:
    """Changes this process as ``exec`` would."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 1024)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.import_module("numpy").random.seed()  # Python's own generator does so at a fork
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    theirs = environment.get("PYTHONPATH", "").split(os.pathsep)
    rest = [path for path in sys.path[1:] if path not in own]
    sys.path[:] = [str(Path(command[0]).parent), *filter(None, theirs), *rest]
    os.environ.clear()
    os.environ.update(environment)
    return command


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the tests' process stops its servers
    listener = _socket()
    try:
        listener.bind(f"\0{sys.argv[1]}")
    except OSError:  # another process of the run was faster
        return
    listener.listen()
    environment = json.dumps(dict(os.environ)).encode()  # before the imports, which set some
    gc.disable()
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # as the package does where it imports them itself
    gc.enable()
    command = _serve(listener, environment)
    if command is not None:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    _main()
