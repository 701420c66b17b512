"""Checks the server's ports before any model is loaded, and logs one line for a port that cannot be used.

Without this check, a busy port would end the process with tracebacks; for a gRPC port, this would happen only after all
models are loaded.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

from mlserver.logging import logger
from mlserver.settings import Settings

from mlserver_torch_stream.server.host import ServerHost
from mlserver_torch_stream.server.options import PREFIX, ServerOptions
from mlserver_torch_stream.server.server_settings import MAX_PORT
from mlserver_torch_stream.work_threads import exit_now

_MANAGEMENT_PORT = "management_port_torchserve"  # it has its own address; all other ports are on MLServer's host
_OUR_PORTS = ("grpc_port_triton", "grpc_port_torchserve", _MANAGEMENT_PORT)
_OWN_FILES = "/proc/self/fd"


def check(host: ServerHost, options: ServerOptions) -> None:
    """Ends the process with status 1 if the server is starting and cannot listen on one of its ports.

    The process is ended at once, because uvicorn would print a traceback for each listener, and no request runs yet.
    """
    problem = port_problem(host.settings, options) if host.is_starting else None
    if problem is not None:
        logger.error(f"The server cannot start: {problem}")
        end_process()


def end_process() -> NoReturn:
    """Ends a starting server and its inference workers with status 1."""
    for worker in multiprocessing.active_children():
        worker.terminate()
    exit_now(1)


def port_problem(settings: Settings, options: ServerOptions) -> str | None:
    """Returns why MLServer cannot listen on all its ports; None if it can. At this time only its gRPC port is open."""
    host = settings.host
    template = "cannot listen on port {} ({}) at {}: {}"
    ports = {"http_port": settings.http_port}
    if settings.metrics_endpoint:
        ports["metrics_port"] = settings.metrics_port
    addresses = {}
    for option in _OUR_PORTS:
        if port := getattr(options, option):
            name = f"{PREFIX}{option.upper()}"
            addresses[name] = options.management_address if option == _MANAGEMENT_PORT else host
            if port in (*ports.values(), settings.grpc_port):
                return template.format(port, name, addresses[name], "it is another port of this server")
            ports[name] = port
    for name, port in {**ports, "grpc_port": settings.grpc_port}.items():
        if not 0 <= port <= MAX_PORT:
            return template.format(port, name, addresses.get(name, host), f"a port must be from 0 to {MAX_PORT}")
    for name, port in ports.items():
        address = addresses.get(name, host)
        try:
            _try(address, port)
        except OSError as error:
            return template.format(port, name, address, os.strerror(error.errno) if error.errno else error)
    if settings.grpc_port and os.path.isdir(_OWN_FILES) and settings.grpc_port not in _own_ports():
        return template.format(settings.grpc_port, "grpc_port", host, "it is in use, or not allowed")
    return None


def _try(host: str, port: int) -> None:
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)


def _own_ports() -> Iterator[int]:
    """Yields the ports on which this process listens."""
    for name in os.listdir(_OWN_FILES):
        with suppress(OSError):  # the socket has just been closed
            number = int(name)
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as own:
                    if own.family in (socket.AF_INET, socket.AF_INET6):
                        yield int(own.getsockname()[1])
