"""Parses the bytes of a JSONL object into rows: OpenAI's batch rows and plain ones, from chunks of any size.

Knows nothing of stores. A line that cannot be read becomes a row with a failure, never an exception.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from mlserver_torch_stream.cloud.rows import Failure, Row, refusal
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.openai_batch import read_body, read_custom_id

MOST_LINE_BYTES = 16 * 2**20


class Lines:
    """Splits chunks into (number, line) pairs, numbered from 1. A line of more than ``most`` bytes is None.

    ``number``: the number of the last line.
    """

    def __init__(self, most: int = MOST_LINE_BYTES) -> None:
        self._most = most
        self._pieces: list[bytes] = []
        self._length = 0
        self.number = 0

    def feed(self, chunk: bytes) -> Iterator[tuple[int, bytes | None]]:
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            self._keep(piece)
            yield self._line()
        self._keep(rest)

    def end(self) -> Iterator[tuple[int, bytes | None]]:
        """The last line, where no newline ends it."""
        if self._length:
            yield self._line()

    def _keep(self, piece: bytes) -> None:
        self._length += len(piece)
        if self._length > self._most:
            self._pieces.clear()
        elif piece:
            self._pieces.append(piece)

    def _line(self) -> tuple[int, bytes | None]:
        line = b"".join(self._pieces) if self._length <= self._most else None
        self._pieces, self._length = [], 0
        self.number += 1
        return self.number, line


def blank(line: bytes | None) -> bool:
    """True for an empty line, which is no row."""
    return line is not None and not line.strip()


def parse_row(index: int, key: str, number: int, line: bytes | None) -> Row:
    """Reads ``{"custom_id", "body"}``, as in OpenAI's batches, or the body itself with an optional ``custom_id``."""
    custom_id = f"{key}:{number}"
    try:
        value = _object(line)
    except ValueError as error:
        return Row(index, key, number, custom_id, failure=Failure("invalid_row", f"line {number}: {error}"))
    try:
        custom_id = read_custom_id(value, custom_id)
        body = read_body(value)
    except InvalidInput as error:
        return Row(index, key, number, custom_id, failure=refusal(error))
    return Row(index, key, number, custom_id, body=body, size=len(line or b""))


def _object(line: bytes | None) -> dict[str, Any]:
    if line is None:
        raise ValueError(f"is longer than {MOST_LINE_BYTES} bytes")
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value
