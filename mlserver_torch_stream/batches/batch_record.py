"""A batch as it is stored and as OpenAI's API shows it: its request, its status with times, its counts, its files.

Knows no store and no clock: the caller passes ``now``, in seconds since the epoch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from mlserver_torch_stream.cloud.cloud_errors import RunRefused

WINDOW = "24h"
WINDOW_S = 24 * 3600


class BatchStatus(str, Enum):
    """OpenAI's statuses. Each but ``validating`` has a time of its own in the object, ``<status>_at``."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class BatchProblem:
    """Why a batch failed as a whole. ``param`` and ``line``: the field and the line of the input file, if one is
    to blame."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """``models``: the models that rows name and that were loaded when the input was validated. ``times``: status ->
    when the batch got it. ``total``: the rows of a valid input; 0 until it was validated."""

    id: str
    input_file_id: str
    endpoint: str
    created_at: int
    metadata: Mapping[str, str] | None = None
    status: BatchStatus = BatchStatus.VALIDATING
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
        return self.created_at + WINDOW_S

    def moved(self, status: BatchStatus, now: int) -> BatchRecord:
        return replace(self, status=status, times={**self.times, status.value: now})

    def counted(self, rows: int, failed: int) -> BatchRecord:
        """Returns the record with the counts of delivered rows, ``failed`` of which have an error for an answer."""
        return replace(self, completed=rows - failed, failed=failed)

    def dumps(self) -> bytes:
        return json.dumps({**asdict(self), "status": self.status.value}).encode() + b"\n"

    @classmethod
    def loads(cls, data: bytes) -> BatchRecord:
        """Raises RunRefused."""
        try:
            stored = json.loads(data)
            problems = tuple(BatchProblem(**each) for each in stored["problems"])
            status, models = BatchStatus(stored["status"]), tuple(stored["models"])
            return cls(**{**stored, "status": status, "problems": problems, "models": models})
        except (ValueError, TypeError, KeyError):
            raise RunRefused("the record of a batch was not written by this program") from None

    def shown(self) -> dict[str, Any]:
        """OpenAI's object."""
        times = {f"{each.value}_at": self.times.get(each.value) for each in BatchStatus if each != "validating"}
        errors = [asdict(each) for each in self.problems]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": WINDOW,
            "status": self.status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **times,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": None if self.metadata is None else dict(self.metadata),
        }
