"""Divides objects into rows: lines of JSON Lines, whole objects, or chunks. The results of chunks are joined again.

A line that cannot be read becomes a row with a failure, never an exception.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlserver_torch_stream.cloud.rows import Chunk, Failure, Outcome, Result, Row, refusal
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.openai_batch import read_body, read_custom_id

MAX_LINE_BYTES = 16 * 2**20


class Lines:
    """Splits chunks of bytes into pairs of a line and its number, which begins at 1. For a line of more than ``most``
    bytes, None is yielded instead of the line.

    ``number`` is the number of the last line.
    """

    def __init__(self, most: int = MAX_LINE_BYTES) -> None:
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
        """Yields the last line if it does not end with a newline."""
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
    """True for an empty line, which is not a row."""
    return line is not None and not line.strip()


def parse_row(index: int, key: str, number: int, line: bytes | None, fallback: str | None = None) -> Row:
    """Reads ``{"custom_id", "body"}``, as in OpenAI's batches, or only the body, with an optional ``custom_id``.

    ``fallback`` is the ``custom_id`` of a line without one.
    """
    custom_id = fallback or f"{key}:{number}"
    try:
        value = parse_object(line)
    except ValueError as error:
        return Row(index, key, number, custom_id, failure=Failure("invalid_row", f"line {number}: {error}"))
    try:
        custom_id = read_custom_id(value, custom_id)
        body = read_body(value)
    except InvalidInput as error:
        return Row(index, key, number, custom_id, failure=refusal(error))
    return Row(index, key, number, custom_id, body=body, size=len(line or b""))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant)  # Python's json also reads NaN and Infinity


def parse_object(line: bytes | None) -> dict[str, Any]:
    """Returns the JSON object of a line. Raises ValueError if the line is anything else."""
    if line is None:
        raise ValueError(f"is longer than {MAX_LINE_BYTES} bytes")
    try:
        value = _STRICT.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


WHOLE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Chunking:
    """Says how objects become chunks.

    ``chunk_bytes`` is the maximum number of bytes of a chunk; None means that an object is one row. ``joined`` means
    that the answers to the chunks of an object are joined into one output row. ``whole_bytes`` is the maximum number of
    bytes of an object that is one row. ``sequences`` means that the chunks of an object are the requests of a sequence;
    their answers are joined.
    """

    chunk_bytes: int | None = None
    joined: bool = True
    whole_bytes: int = WHOLE_BYTES
    sequences: bool = False

    @property
    def each(self) -> bool:
        """True if each chunk is an output row."""
        return self.chunk_bytes is not None and not self.joined

    def refuses(self, size: int) -> bool:
        """True for an object that is one row and is larger than ``whole_bytes``."""
        return self.chunk_bytes is None and size > self.whole_bytes

    def rows(self, size: int) -> int:
        """Returns the number of output rows of an object of ``size`` bytes."""
        return self.count(size) if self.each else 1

    def block(self, block: int) -> int:
        """Returns how many bytes to fetch in one range: the size of whole chunks that together have about ``block``
        bytes.
        """
        return block if self.chunk_bytes is None else self.chunk_bytes * max(1, block // self.chunk_bytes)

    def chunks(self, start: int, end: int, size: int) -> Iterator[Chunk]:
        """Yields the chunks that begin in bytes ``start`` to ``end`` of an object of ``size`` bytes."""
        assert self.chunk_bytes is not None and start % self.chunk_bytes == 0
        last = self.count(size) - 1
        first = start // self.chunk_bytes
        for index in range(first, first + self.count(end - start)):
            yield Chunk(index, index * self.chunk_bytes, index == last, self.joined)

    def config(self) -> dict[str, Any]:
        """Returns these settings for a run's configuration; empty if all of them have their defaults."""
        if self.chunk_bytes is not None:
            rows = "object" if self.joined else "chunk"
            return {"chunk_bytes": self.chunk_bytes, "rows": rows, **({"sequences": True} if self.sequences else {})}
        return {} if self.whole_bytes == WHOLE_BYTES else {"whole_bytes": self.whole_bytes}

    def count(self, size: int) -> int:
        """Returns the number of chunks of an object of ``size`` bytes; an empty object is one chunk."""
        assert self.chunk_bytes is not None
        return max(1, -(-size // self.chunk_bytes))


PREDICTIONS = "predictions"  # the list in the body of an answer
MAX_ANSWER_BYTES = 64 * 2**20


class ChunkJoin:
    """Joins the results of an object's chunks. Other results pass through.

    If one chunk fails, its object's row fails.
    """

    def __init__(self, most_bytes: int = MAX_ANSWER_BYTES) -> None:
        self._most = most_bytes
        self._object = _JoinedAnswer()

    def add(self, result: Result) -> Result | None:
        """Returns the result of the whole object once its last chunk has a result; None before that."""
        row, chunk = result.row, result.row.chunk
        if chunk is None or not chunk.joined:
            return result
        answer = self._object
        answer.add(row.key, chunk, row.size, result.outcome, self._most)
        if not chunk.last:
            return None
        self._object = _JoinedAnswer()
        return Result(replace(row, chunk=None, data=b"", size=answer.size), answer.outcome())


@dataclass
class _JoinedAnswer:
    """The answers to the chunks of one object so far. ``size`` is the number of bytes of the chunks."""

    size: int = 0
    body: Mapping[str, Any] = field(default_factory=dict)
    predictions: list[Any] = field(default_factory=list)
    nbytes: int = 0
    failure: Failure | None = None

    def add(self, key: str, chunk: Chunk, size: int, outcome: Outcome, most: int) -> None:
        self.size += size
        if self.failure is not None:
            return
        if outcome.failure is not None:
            self._fail(_of_chunk(outcome.failure, chunk))
            return
        self.body = outcome.response or {}
        found = self.body.get(PREDICTIONS)
        if not isinstance(found, list):
            self._fail(Failure("inference_failed", f"{key}: the answer to chunk {chunk.index} has no {PREDICTIONS!r}"))
            return
        self.nbytes += len(json.dumps(found))
        if self.nbytes > most:
            message = f"{key}: the answers up to chunk {chunk.index} are larger than {most} bytes"
            self._fail(Failure("too_large", message))
        else:
            self.predictions += found

    def outcome(self) -> Outcome:
        if self.failure is not None:
            return Outcome(failure=self.failure)
        return Outcome({**self.body, PREDICTIONS: self.predictions})

    def _fail(self, failure: Failure) -> None:
        self.failure = failure
        self.predictions = []


def _of_chunk(failure: Failure, chunk: Chunk) -> Failure:
    """Returns the failure with the number of the chunk in its message."""
    message = f"chunk {chunk.index}: {failure.message}"
    error = None if failure.error is None else {**failure.error, "message": message}
    return replace(failure, message=message, error=error)
