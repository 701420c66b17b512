"""The room's vocabulary: a row, what became of it, and the callable that infers a batch of them.

Knows neither where rows come from nor what infers them.
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
    """How an object is read: row by row, or whole as one row."""

    JSONL = "jsonl"
    TEXT = "text"
    BYTES = "bytes"
    IMAGE = "image"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a row has no answer. ``code`` is for programs, ``message`` for people.

    ``status`` and ``error``: of a row that a model was asked and that was refused, as OpenAI's API tells it.
    """

    code: str
    message: str
    status: int | None = None
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One input: ``body`` of a JSONL line, or ``data``, a whole object of ``kind``; or neither and a ``failure``.

    ``index``: its place among all rows of the run; ``line``: its line in the object, from 1, None for a whole object.
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
    """What inferring one row gave: a ``response``, which is the body of the answer, or a ``failure``, and the tokens it
    took. ``span``: when the model was at work on it, by the monotonic clock; None: as long as its batch was inferred.
    """

    response: Mapping[str, Any] | None = None
    failure: Failure | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    span: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What the ids of output rows are made of, and the time that they all bear, in seconds since the epoch."""

    id: str
    created: int


@dataclass(frozen=True, slots=True)
class Result:
    """One row's outcome, to be delivered in the order of the rows."""

    row: Row
    outcome: Outcome

    def record(self, run: RunIdentity) -> dict[str, Any]:
        """The output row, as a line of OpenAI's batches, and beside that the row's place in the input."""
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
    """A row's failure by an error that has a status."""
    status, described = describe(error)
    code = described["code"] or ("invalid_request" if status < 500 else "generation_failed")
    return Failure(code, error.message, status, described)


Infer = Callable[[Sequence[Row]], Awaitable[Sequence[Outcome]]]
"""Infers a batch: as many outcomes as rows, in their order. What it raises as CloudError ends the run; any other
exception fails the batch's rows."""
