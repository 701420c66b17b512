"""The vocabulary of the room: a row, its outcome, and the callable that infers a batch of rows.

Knows neither the source of the rows nor the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.protocol.openai_batch import answer_line, lost_line, refused_line
from mlserver_torch_stream.protocol.openai_error import describe


class Kind(str, Enum):
    """How an object is read: JSONL row by row, any other kind as one row."""

    JSONL = "jsonl"
    TEXT = "text"
    BYTES = "bytes"
    IMAGE = "image"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a row has no answer. ``code`` is for programs, ``message`` for people.

    ``status`` and ``error``: the answer of OpenAI's API, where a model refused the row or failed at it.
    """

    code: str
    message: str
    status: int | None = None
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One input: ``body`` of a JSONL line, or ``data``, a whole object of ``kind``; or a ``failure`` instead of both.

    ``index``: the row's position in the run; ``line``: its line in the object, from 1, or None for a whole object.
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one row: a ``response``, which is the body of the answer, or a ``failure``, and the token counts.

    ``span``: start and end of the row's inference, by the monotonic clock; None: the span of its batch.
    """

    response: Mapping[str, Any] | None = None
    failure: Failure | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    span: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The prefix of the ids of output rows, and the time that all of them bear, in seconds since the epoch."""

    id: str
    created: int


@dataclass(frozen=True, slots=True)
class Result:
    """A row and its outcome."""

    row: Row
    outcome: Outcome

    def record(self, run: RunIdentity) -> dict[str, Any]:
        """The output row: a line of OpenAI's batches, with the row's place in the input."""
        row, failure = self.row, self.outcome.failure
        name = hashlib.sha256(f"{run.id}/{row.key}/{row.index}".encode("utf-8", "replace")).hexdigest()[:32]
        place = {"index": row.index, "key": row.key, "line": row.line}
        if failure is None:
            return answer_line(name, row.custom_id, self.outcome.response or {}, run.created, place)
        if failure.status is None or failure.error is None:
            return lost_line(name, row.custom_id, failure.code, failure.message, place)
        return refused_line(name, row.custom_id, failure.status, failure.error, place)

    def encode(self, run: RunIdentity) -> bytes:
        text = json.dumps(self.record(run), ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace") + b"\n"


def refusal(error: RequestError) -> Failure:
    """The failure of a row whose request raised ``error``."""
    status, described = describe(error)
    code = described["code"] or ("invalid_request" if status < 500 else "generation_failed")
    return Failure(code, error.message, status, described)


Infer = Callable[[Sequence[Row]], Awaitable[Sequence[Outcome]]]
"""Infers a batch: returns as many outcomes as rows, in their order. A CloudError that it raises ends the run; any other
exception fails the rows of the batch."""
