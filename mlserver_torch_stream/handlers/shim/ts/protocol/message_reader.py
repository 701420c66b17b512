"""Reads the binary messages of TorchServe's frontend from a socket.

Integers are big-endian 32-bit; a length of -1 ends a list.
"""

from __future__ import annotations

import struct
from typing import Any

from mlserver_torch_stream.handlers.worker import values

LOAD_MSG, PREDICT_MSG = b"L", b"I"


def retrieve_msg(conn: Any) -> tuple[bytearray, Any]:
    """The command and its arguments. Raises ValueError, or EOFError if the connection ends."""
    reader = _MessageReader(conn)
    command = reader.take(1)
    if command == LOAD_MSG:
        return command, reader.load()
    if command == PREDICT_MSG:
        return command, reader.items(reader.request)
    raise ValueError(f"Invalid command: {command!r}")


class _MessageReader:
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def load(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "modelName": self.text(),
            "modelPath": self.text(),
            "batchSize": self.integer(),
            "handler": self.text(),
        }
        gpu = self.integer()
        if gpu >= 0:
            found["gpu"] = gpu
        return {**found, "envelope": self.text(), "limitMaxImagePixels": self.take(1) != b"\x00"}

    def request(self, length: int) -> dict[str, Any]:
        return {
            "requestId": self.take(length),
            "headers": self.items(self.header),
            "parameters": self.items(self.part),
        }

    def header(self, length: int) -> dict[str, Any]:
        return {"name": self.take(length), "value": self.text()}

    def part(self, length: int) -> dict[str, Any]:
        name, content_type = self.take(length).decode(), self.text().decode()
        return {"name": name, "contentType": content_type, "value": values.decode(bytes(self.text()), content_type)}

    def items(self, read: Any) -> list[dict[str, Any]]:
        found = []
        while (length := self.integer()) != -1:
            found.append(read(length))
        return found

    def integer(self) -> int:
        return int(struct.unpack("!i", self.take(4))[0])

    def text(self) -> bytearray:
        return self.take(self.integer())

    def take(self, length: int) -> bytearray:
        taken = bytearray()
        while len(taken) < length:
            chunk = self._connection.recv(length - len(taken))
            if not chunk:
                raise EOFError("the connection has ended")
            taken += chunk
        return taken
