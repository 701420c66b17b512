"""Reads the body of a request that creates a batch.

Knows nothing of files: whether the named file exists is the caller's to check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlserver_torch_stream.batches.batch_record import WINDOW
from mlserver_torch_stream.batches.object_ids import FILE, is_id
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_SPELLINGS
from mlserver_torch_stream.protocol.unsupported import refuse
from mlserver_torch_stream.protocol.values import is_text, shown

_KEYS = ("input_file_id", "endpoint", "completion_window", "metadata")
_UNIMPLEMENTED = ("output_expires_after",)
_MOST_PAIRS, _MOST_KEY, _MOST_VALUE = 16, 64, 512  # OpenAI's bounds of metadata


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
    if len(given) > _MOST_PAIRS:
        raise InvalidInput("metadata", f"holds {len(given)} pairs, more than {_MOST_PAIRS}")
    for key, value in given.items():
        if not is_text(key) or len(key) > _MOST_KEY:
            raise InvalidInput("metadata", f"a key must be a string of at most {_MOST_KEY} characters")
        if not is_text(value) or len(value) > _MOST_VALUE:
            raise InvalidInput("metadata", f"{shown(key)} must be a string of at most {_MOST_VALUE} characters")
    return given
