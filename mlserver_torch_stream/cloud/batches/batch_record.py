"""Defines the record of a batch, as it is stored and as OpenAI's API shows it, and makes ids that sort by the time at
which they were made.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, field, replace
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mlserver_torch_stream.cloud.rows import RunRefused
from mlserver_torch_stream.protocol.openai_batch_models import BATCH, FILE, ID_DIGITS, STATUSES, WINDOW, Status

_TIME_DIGITS = 12  # hexadecimal digits of the milliseconds since the epoch
WINDOW_S = 24 * 3600
_STORED = ConfigDict(extra="forbid")


class IdMaker:
    """Makes ids, each of which is greater than the previous one."""

    def __init__(self) -> None:
        self._last = 0

    def make(self, prefix: str) -> str:
        self._last = max(self._last + 1, int(time.time() * 1000))
        return f"{prefix}{self._last:0{_TIME_DIGITS}x}{secrets.token_hex((ID_DIGITS - _TIME_DIGITS) // 2)}"


def output_file_id(batch_id: str, kind: str) -> str:
    """Returns the id of a file that a batch writes; the id is the same each time the file is written."""
    made = batch_id.removeprefix(BATCH)[:_TIME_DIGITS]
    rest = hashlib.sha256(f"{batch_id}/{kind}".encode()).hexdigest()[: ID_DIGITS - _TIME_DIGITS]
    return f"{FILE}{made}{rest}"


@dataclass(frozen=True, slots=True, config=_STORED)
class BatchProblem:
    """Why a batch failed as a whole. ``param`` and ``line`` are the field and the line of the input file that caused
    the problem, if there is one.
    """

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True, config=_STORED)
class BatchRecord:
    """A batch as it is stored.

    ``models`` are the models that the batch's items name and that were loaded when the input was validated. ``times``
    maps each status to the time when the batch reached it. ``total`` is the number of items of a valid input; 0 before
    it is validated.
    """

    id: str
    input_file_id: str
    endpoint: str
    created_at: int
    metadata: Mapping[str, str] | None = None
    status: Status = "validating"
    times: Mapping[str, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    models: tuple[str, ...] = ()
    problems: tuple[BatchProblem, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def expires_at(self) -> int:
        """When the batch expires, in seconds since the epoch."""
        return self.created_at + WINDOW_S

    @property
    def ended(self) -> bool:
        return self.status in ("failed", "completed", "expired", "cancelled")

    def moved(self, status: Status, **changes: Any) -> BatchRecord:
        """Returns the record with a new status that begins now."""
        return replace(self, status=status, times={**self.times, status: int(time.time())}, **changes)

    def dumps(self) -> bytes:
        """Returns the record as one line of JSON."""
        return _RECORD.dump_json(self) + b"\n"

    @classmethod
    def loads(cls, data: bytes) -> BatchRecord:
        """Reads a stored record. Raises RunRefused if it is damaged."""
        try:
            return _RECORD.validate_json(data)
        except ValidationError:
            raise RunRefused("the record of a batch was not written by this program") from None

    def shown(self) -> dict[str, Any]:
        """Returns the batch as OpenAI's object, which has a time for each status except ``validating``."""
        errors = [asdict(problem) for problem in self.problems]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": WINDOW,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in STATUSES[1:]},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


_RECORD = TypeAdapter(BatchRecord)
