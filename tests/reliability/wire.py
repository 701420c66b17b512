"""A TCP relay between client and server that a test can cut or stop, like the machine of a killed or stalled client.

Knows nothing of the data.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from tests.server.harness import HOST, Server

_RESET = struct.pack("ii", 1, 0)
_BUFFER = 8192  # on the server's side, so that little is under way when nobody reads


class Wire:
    """Listens on ``port`` and relays each connection to ``target`` in two threads."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self._start(self._accept)

    def cut(self) -> None:
        """Cuts the connections, which both sides notice at once."""
        for end in self._ends:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
            end.close()
        self._ends.clear()

    def stop_reading(self) -> None:
        """Stops reading from the server; data from the client still arrives."""
        self._flowing.clear()

    def read_on(self) -> None:
        self._flowing.set()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._flowing.set()
        self.cut()

    def _start(self, work: object, *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()  # type: ignore[arg-type]

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.socket()
                server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
                server.connect((HOST, self._target))
                self._ends += [client, server]
                self._start(self._carry, client, server, None)
                self._start(self._carry, server, client, self._flowing)

    def _carry(self, source: socket.socket, sink: socket.socket, gate: threading.Event | None) -> None:
        with suppress(OSError):
            while True:
                if gate is not None:
                    gate.wait()
                data = source.recv(4096)
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)


@contextmanager
def wired(server: Server) -> Iterator[tuple[Server, Wire, Wire]]:
    """The server through two relays, one for REST and one for gRPC."""
    rest, grpc = Wire(server.http_port), Wire(server.grpc_port)
    try:
        yield replace(server, http_port=rest.port, grpc_port=grpc.port), rest, grpc
    finally:
        rest.close()
        grpc.close()
