"""Makes one result of the results of an object's chunks, which arrive in the order of the chunks.

Knows nothing of models: it joins the lists of predictions in the answers, within a bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlserver_torch_stream.cloud.rows import Chunk, Failure, Outcome, Result

PREDICTIONS = "predictions"  # the list in the body of an answer
MOST_ANSWER_BYTES = 64 * 2**20


class ChunkJoin:
    """Results of rows that are not joined chunks pass through. The first chunk that fails fails its object's row."""

    def __init__(self, most_bytes: int = MOST_ANSWER_BYTES) -> None:
        self._most = most_bytes
        self._object = _JoinedAnswer()

    def add(self, result: Result) -> Result | None:
        """The result of the whole object once its last chunk has a result; None before that."""
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
    """The answers to the chunks of one object so far. ``size``: bytes of the chunks."""

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
            self._fail(Failure("too_large", f"{key}: its answers are more than {most} bytes up to chunk {chunk.index}"))
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
    """The failure, with the number of the chunk in its message."""
    message = f"chunk {chunk.index}: {failure.message}"
    error = None if failure.error is None else {**failure.error, "message": message}
    return replace(failure, message=message, error=error)
