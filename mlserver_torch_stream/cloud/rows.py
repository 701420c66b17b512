"""The room's vocabulary: a row, what became of it, and the callable that infers a batch of them.

Knows neither where rows come from nor what infers them.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(str, Enum):
    """How an object is read: row by row, or whole as one row."""

    JSONL = "jsonl"
    TEXT = "text"
    BYTES = "bytes"
    IMAGE = "image"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a row has no response. ``code`` is for programs, ``message`` for people."""

    code: str
    message: str


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
    """What inferring one row gave: a ``response`` or a ``failure``, and the tokens it took."""

    response: Mapping[str, Any] | None = None
    failure: Failure | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """One row's outcome, to be delivered in the order of the rows."""

    row: Row
    outcome: Outcome

    def record(self) -> dict[str, Any]:
        """The output row: exactly one of ``response`` and ``error`` is not null; nothing in it depends on the time."""
        failure = self.outcome.failure
        return {
            "index": self.row.index,
            "custom_id": self.row.custom_id,
            "key": self.row.key,
            "line": self.row.line,
            "response": self.outcome.response,
            "error": None if failure is None else {"code": failure.code, "message": failure.message},
        }

    def encode(self) -> bytes:
        return json.dumps(self.record(), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


Infer = Callable[[Sequence[Row]], Awaitable[Sequence[Outcome]]]
"""Infers a batch: as many outcomes as rows, in their order. What it raises as CloudError ends the run; any other
exception fails the batch's rows."""
