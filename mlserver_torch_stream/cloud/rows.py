"""Defines the types that cloud runs share: a row, its outcome, the callable that infers a batch of rows, and the
errors.

The ``code`` of an error appears in output rows and messages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.protocol.openai_batch import answer_line, lost_line, refused_line
from mlserver_torch_stream.protocol.openai_stream import describe


class Kind(str, Enum):
    """How an object is read. JSONL, CSV, TSV and Parquet are read row by row, other kinds as one row or in chunks. The
    members of an archive may have different kinds.
    """

    JSONL = "jsonl"
    CSV = "csv"
    TSV = "tsv"
    PARQUET = "parquet"
    TEXT = "text"
    BYTES = "bytes"
    IMAGE = "image"
    AUDIO = "audio"
    ARCHIVE = "archive"

    @property
    def table(self) -> bool:
        """True if each line or record of an object is a row, and the object is read from beginning to end."""
        return self in (Kind.JSONL, Kind.CSV, Kind.TSV)

    @property
    def many(self) -> bool:
        """True if the number of rows of an object is known only when it has been read to its end."""
        return self.table or self in (Kind.ARCHIVE, Kind.PARQUET)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a row has no answer. ``code`` is for programs, ``message`` for people.

    If a model refused the row or failed at it, ``status`` and ``error`` are the answer of OpenAI's API. ``shared``
    means that another row of the batch may be the cause.
    """

    code: str
    message: str
    status: int | None = None
    error: Mapping[str, Any] | None = None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of an object that a row contains: the number of the part, from 0, and its offset in the object in bytes.

    ``joined`` means that the answers to all chunks of the object are joined into one output row.
    """

    index: int
    offset: int
    last: bool
    joined: bool


@dataclass(frozen=True, slots=True)
class MemberPlace:
    """A member of an archive: its number, from 0, and its name."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Row:
    """One input. It has either the ``body`` of a JSONL line, or ``data``, which is an object of ``kind`` or a ``chunk``
    of one, or a ``failure``.

    ``index`` is the position of the output row in the run; joined chunks of an object share it. ``line`` is the row's
    first line in the object or in its ``member``, counted from 1; None means that the row is the whole object or
    member. ``whole`` is the size of the object in bytes, unless it is JSONL. ``content_type`` is the type of ``data``,
    unless the key's ending tells it. ``sequence`` is the id of the sequence to which the chunk belongs.
    """

    index: int
    key: str
    line: int | None
    custom_id: str
    kind: Kind = Kind.JSONL
    body: Mapping[str, Any] | None = None
    data: bytes = b""
    size: int = 0
    failure: Failure | None = None
    chunk: Chunk | None = None
    whole: int = 0
    sequence: str | None = None
    member: MemberPlace | None = None
    content_type: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one row: a ``response``, which is the body of the answer, or a ``failure``, and the token counts.

    For an answer in pieces, ``pieces`` holds the bodies instead of ``response``; each becomes an output line. ``span``
    is the start and the end of the row's inference on the monotonic clock; None means the times of its batch.
    """

    response: Mapping[str, Any] | None = None
    failure: Failure | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    span: tuple[float, float] | None = None
    pieces: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The prefix of the ids of output rows, and the creation time that all rows contain, in seconds since the epoch."""

    id: str
    created: int


@dataclass(frozen=True, slots=True)
class Result:
    """A row and its outcome."""

    row: Row
    outcome: Outcome

    def record(self, run: RunIdentity) -> dict[str, Any]:
        """Returns the output row: a line in the format of OpenAI's batches, with the row's place in the input."""
        row, failure = self.row, self.outcome.failure
        name, place = _name(run, row), self._place()
        if failure is None:
            return answer_line(name, row.custom_id, self.outcome.response or {}, run.created, place)
        if failure.status is None or failure.error is None:
            return lost_line(name, row.custom_id, failure.code, failure.message, place)
        return refused_line(name, row.custom_id, failure.status, failure.error, place)

    def encode(self, run: RunIdentity) -> bytes:
        """Returns the output row as bytes. If the outcome has pieces, there is one line for each piece."""
        if self.outcome.pieces is None:
            return _encode(self.record(run))
        return b"".join(_encode(record) for record in self._piece_records(run, self.outcome.pieces))

    def _piece_records(self, run: RunIdentity, pieces: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        assert pieces, "the answer has no pieces"
        for number, body in enumerate(pieces):
            place = {**self._place(), "piece": {"index": number, "last": number == len(pieces) - 1}}
            name = _name(run, self.row, f"#{number}")
            yield answer_line(name, self.row.custom_id, body, run.created, place)

    def _place(self) -> dict[str, Any]:
        row, chunk = self.row, self.row.chunk
        place: dict[str, Any] = {"index": row.index, "key": row.key, "line": row.line}
        if row.member is not None:
            place["member"] = {"index": row.member.index, "name": row.member.name}
        if chunk is not None:
            place["chunk"] = {"index": chunk.index, "offset": chunk.offset, "last": chunk.last}
        return place


def _name(run: RunIdentity, row: Row, piece: str = "") -> str:
    return hashlib.sha256(f"{run.id}/{row.key}/{row.index}{piece}".encode("utf-8", "replace")).hexdigest()[:32]


def _encode(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def refusal(error: RequestError) -> Failure:
    """Returns the failure of a row whose request raised ``error``."""
    status, described = describe(error)
    code = described["code"] or ("invalid_request" if status < 500 else "generation_failed")
    return Failure(code, error.message, status, described)


Infer = Callable[[Sequence[Row]], Awaitable[Sequence[Outcome]]]
"""Infers a batch: returns as many outcomes as rows, in their order. A CloudError that it raises ends the run; any other
exception fails the batch. Each row of a failed batch, and each row with a ``shared`` failure, is inferred once
more, by itself. If the callable has a method ``end_sequence``, it is called with the id of a sequence of which no
further chunk comes, unless the model has answered the last one."""

Weigh = Callable[[Row], int | Awaitable[int]]
"""The weight of a row in its batch, or an awaitable of it."""


class CloudError(Exception):
    """A run cannot continue, or an object cannot be read. ``retriable`` means that the same call may succeed later."""

    code = "failed"
    retriable = False

    def __init_subclass__(cls, *, code: str = "failed", retriable: bool = False) -> None:
        cls.code, cls.retriable = code, retriable

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class StoreUnavailable(CloudError, code="unavailable", retriable=True):
    """A store or server does not answer, breaks off, stalls, or asks for a later attempt. ``retry_after`` is the number
    of seconds after which it asks to be called again.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ObjectMissing(CloudError, code="missing"):
    """There is no object under the key."""


class AccessDenied(CloudError, code="denied"):
    """The credentials do not allow the call."""


class ObjectChanged(CloudError, code="changed"):
    """The object is no longer the version that was listed."""


class ObjectExists(CloudError, code="exists"):
    """An object could not be created because one with this key exists."""


class StorageFull(CloudError, code="full"):
    """The output's storage has no room left."""


class SequenceLost(CloudError, code="sequence_lost"):
    """The state of an object's sequence is lost or unknown, so the object starts again from its beginning."""


class RunRefused(CloudError, code="refused"):
    """A run may not start with these options. The message names the option."""


class InUse(RunRefused, code="in_use"):
    """Another command writes to the output."""


class TooManyFailures(CloudError, code="too_many_failures"):
    """More rows failed than the run allows."""
