"""The server that ``--model`` and ``--handler`` start for a run. It is a child process on loopback with a separate API
key.

The server ends when the command ends, even if the command is killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlserver_torch_stream.cli.interruptible import LoadInterrupted
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.free_port import free_port

NAME = "model"  # the model's name in the child server
_ENGINE_VARIABLES = ("CACHE", "FAULTS", "KERNEL", "VLLM_PYTHON")
_HOST = "127.0.0.1"
_POLL_S = 0.05
_END_S = 5.0  # seconds that the server has to end its workers
_KEPT_BYTES = 1 << 16  # the last bytes of the server's output are kept for an error
_CANNOT_LOAD = re.compile(rb"Cannot load model '%s': (.*)" % NAME.encode())
_RUN = f"from {__name__} import main; main()"


class LoadRefused(Exception):
    """The model cannot be loaded. The message is the reason that the server gave."""


@dataclass(frozen=True)
class ChildServer:
    """The running server."""

    url: str
    key: str
    process: asyncio.subprocess.Process

    def ended(self) -> str | None:
        """Returns the reason why the server has ended; None while it runs."""
        from mlserver_torch_stream.engine.child_process import how_it_ended

        status = self.process.returncode
        return None if status is None else f"the process of the model {how_it_ended(status)}"


@asynccontextmanager
async def child_server(
    implementation: str, uri: str, extra: Mapping[str, Any], metrics: RunMetrics
) -> AsyncIterator[ChildServer]:
    """Starts a server with one model, and ends it after the ``async with`` block.

    Raises LoadRefused if the model cannot be loaded, and LoadInterrupted if the task is cancelled during the load.
    """
    began = time.monotonic()
    ports = [free_port(_HOST)]
    while len(ports) < 3:
        ports.append(free_port(_HOST, ports))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _RUN, str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environment(implementation, uri, extra, ports),
        start_new_session=True,  # Ctrl-C reaches only the command, which then ends the server
    )
    server = ChildServer(f"http://{_HOST}:{ports[0]}", secrets.token_urlsafe(32), process)
    printed = bytearray()
    printing = asyncio.create_task(_pass_on(process, printed))
    try:
        await _load(server, printing, printed)
        metrics.load_model_latency_milli_secs.update(round((time.monotonic() - began) * 1e3))
        metrics.model_byte_size.update(_peak_bytes(process.pid))
        yield server
    finally:
        await _end(process)
        await printing


def _environment(implementation: str, uri: str, extra: Mapping[str, Any], ports: list[int]) -> dict[str, str]:
    """Returns the child's environment: that of this process, without variables that would configure the child's
    MLServer.
    """
    from mlserver_torch_stream.handlers.frames import MAX_BYTES

    kept = [f"MLSERVER_TORCH_STREAM_{name}" for name in _ENGINE_VARIABLES]
    environ = {name: text for name, text in os.environ.items() if name in kept or not name.startswith("MLSERVER_")}
    settings = {
        **{"HOST": _HOST, "HTTP_PORT": ports[0], "GRPC_PORT": ports[1], "METRICS_PORT": ports[2]},
        **{"DEBUG": "false", "PARALLEL_WORKERS": 0, "GZIP_ENABLED": "false"},
        "MODEL_REPOSITORY_IMPLEMENTATION": "mlserver_torch_stream.GuardedModelRepository",
        **{"MODEL_NAME": NAME, "MODEL_IMPLEMENTATION": f"mlserver_torch_stream.{implementation}"},
        **{"MODEL_URI": uri, "MODEL_EXTRA": json.dumps(extra)},
        "TORCH_STREAM_MAX_BODY_BYTES": MAX_BYTES,  # as large as an object of the run may be
        **{"TORCH_STREAM_PIECE_TIMEOUT": 0, "TORCH_STREAM_STALLED_READER_TIMEOUT": 0},
        "TORCH_STREAM_REPOSITORY_WITHOUT_KEY": "false",
        "TORCH_STREAM_METRICS_WITHOUT_KEY": "false",
    }
    return {**environ, **{f"MLSERVER_{name}": str(value) for name, value in settings.items()}}


async def _load(server: ChildServer, printing: asyncio.Task[None], printed: bytearray) -> None:
    process = server.process
    assert process.stdin is not None
    try:
        with suppress(ConnectionError):  # the server has ended, and its output says why
            process.stdin.write(f"{server.key}\n".encode())
            await process.stdin.drain()
        while not await _is_ready(server.url):
            if process.returncode is not None:
                await printing
                raise LoadRefused(_reason(bytes(printed), process.returncode))
            await asyncio.sleep(_POLL_S)
    except asyncio.CancelledError:
        _kill(process)
        raise LoadInterrupted from None


async def _is_ready(url: str) -> bool:
    host, _, port = url.rpartition("/")[2].partition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    try:
        writer.write(b"GET /v2/health/ready HTTP/1.1\r\nHost: model\r\nConnection: close\r\n\r\n")
        return b" 200 " in await reader.readline() and is_own_listener(int(port))
    except OSError:
        return False
    finally:
        writer.close()


def is_own_listener(port: int) -> bool:
    """Returns whether only processes of this user listen on an IPv4 port; True on systems without /proc.

    A process of another user that had taken the port would receive the key and the data.
    """
    try:
        sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    except OSError:
        return True
    return {int(uid) for _, local, _, state, _, _, _, uid, *_ in sockets if _listens(local, state, port)} <= {
        os.getuid()
    }


def _listens(local: str, state: str, port: int) -> bool:
    return state == "0A" and int(local.rpartition(":")[2], 16) == port


def _reason(printed: bytes, status: int) -> str:
    from mlserver_torch_stream.engine.child_process import how_it_ended

    found = _CANNOT_LOAD.findall(printed)
    if found:
        return bytes(found[-1]).decode(errors="replace")
    last = printed.decode(errors="replace").strip().rpartition("\n")[2]
    return f"its process {how_it_ended(status)}" + (f": {last}" if last else "")


async def _pass_on(process: asyncio.subprocess.Process, printed: bytearray) -> None:
    """Prints the server's output and keeps its last bytes. An error of the load is left out, because the command
    reports it.
    """
    assert process.stderr is not None
    while data := await process.stderr.read(_KEPT_BYTES):
        printed += data
        del printed[:-_KEPT_BYTES]
        if not _CANNOT_LOAD.search(data):
            sys.stderr.write(data.decode(errors="replace"))
            sys.stderr.flush()


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(asyncio.shield(process.wait()), _END_S)
    except (asyncio.TimeoutError, asyncio.CancelledError):
        _kill(process)
        await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kills the process and its descendants, even descendants in other sessions, such as a compiler."""
    for pid in (process.pid, *_descendants(process.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Returns the pids of all descendants of a process; an empty list on systems without /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(pid, ()))
    for each in found:  # the list grows in this loop
        found.extend(children.get(each, ()))
    return found


def _peak_bytes(pid: int) -> int:
    """Returns the peak resident memory of a process; 0 on systems without /proc."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    """Runs in the child process: reads the key from stdin, and serves until it is stopped or the command ends."""
    from mlserver_torch_stream.cli.serve import start_mlserver
    from mlserver_torch_stream.engine.child_process import die_with
    from mlserver_torch_stream.handlers.config.unpacking import OwnFolder

    key = sys.stdin.buffer.readline().strip()
    die_with(int(sys.argv[1]))
    os.dup2(2, 1)  # the server's output must not mix with the command's results on stdout
    logging.disable(logging.INFO)
    folder = OwnFolder()
    try:
        keys = folder.path / "keys"
        keys.touch(mode=0o600)
        keys.write_bytes(key)
        os.environ["MLSERVER_TORCH_STREAM_API_KEYS_FILE"] = str(keys)
        start_mlserver(str(folder.path))
    finally:
        folder.remove()
