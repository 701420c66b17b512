"""A batch as it is stored and as OpenAI's API shows it, the request that creates it, and the ids of objects.

Ids sort in the order in which they were made. They hold hexadecimal digits only, so they are safe in keys and paths.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from mlserver_torch_stream.cloud.rows import RunRefused
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_SPELLINGS
from mlserver_torch_stream.protocol.values import is_text, refuse, shown

FILE = "file-"
BATCH = "batch_"
_TIME_DIGITS = 12  # of milliseconds since the epoch
_DIGITS = 32
_ID = re.compile(rf"(?:{FILE}|{BATCH})[0-9a-f]{{{_DIGITS}}}")


def is_id(prefix: str, text: object) -> bool:
    return isinstance(text, str) and text.startswith(prefix) and _ID.fullmatch(text) is not None


class IdMaker:
    """Makes ids, each larger than the one before."""

    def __init__(self) -> None:
        self._last = 0

    def make(self, prefix: str) -> str:
        self._last = max(self._last + 1, int(time.time() * 1000))
        return f"{prefix}{self._last:0{_TIME_DIGITS}x}{secrets.token_hex((_DIGITS - _TIME_DIGITS) // 2)}"


def output_file_id(batch_id: str, kind: str) -> str:
    """The id of a file that a batch writes: the same whenever it is written."""
    made = batch_id.removeprefix(BATCH)[:_TIME_DIGITS]
    rest = hashlib.sha256(f"{batch_id}/{kind}".encode()).hexdigest()[: _DIGITS - _TIME_DIGITS]
    return f"{FILE}{made}{rest}"


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


_KEYS = ("input_file_id", "endpoint", "completion_window", "metadata")
_UNIMPLEMENTED = ("output_expires_after",)
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512  # OpenAI's bounds of metadata


@dataclass(frozen=True, slots=True)
class BatchRequest:
    input_file_id: str
    endpoint: str
    metadata: Mapping[str, str] | None


def read_batch_request(body: Mapping[str, Any]) -> BatchRequest:
    """Raises InvalidInput, which names the field."""
    for key, value in body.items():
        if key in _UNIMPLEMENTED and value is not None:
            raise InvalidInput(key, "is not implemented: files stay until they are deleted")
        if key not in (*_KEYS, *_UNIMPLEMENTED):
            refuse(key, value, _KEYS)
    _one_of(body, "endpoint", tuple(OPENAI_SPELLINGS))
    _one_of(body, "completion_window", (WINDOW,))
    name = body.get("input_file_id")
    if not is_id(FILE, name):
        raise InvalidInput("input_file_id", f"must be the id of a file, got {shown(name)}")
    return BatchRequest(str(name), str(body["endpoint"]), _metadata(body.get("metadata")))


def _one_of(body: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> None:
    value = body.get(name)
    if not isinstance(value, str) or value not in allowed:
        raise InvalidInput(name, f"must be {' or '.join(allowed)}, got {shown(value)}")


def _metadata(given: Any) -> Mapping[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidInput("metadata", f"must be an object, got {shown(given)}")
    if len(given) > _MAX_PAIRS:
        raise InvalidInput("metadata", f"holds {len(given)} pairs, more than {_MAX_PAIRS}")
    for key, value in given.items():
        if not is_text(key) or len(key) > _MAX_KEY:
            raise InvalidInput("metadata", f"a key must be a string of at most {_MAX_KEY} characters")
        if not is_text(value) or len(value) > _MAX_VALUE:
            raise InvalidInput("metadata", f"{shown(key)} must be a string of at most {_MAX_VALUE} characters")
    return given
