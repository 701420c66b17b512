"""Stands for a message that could not be read as a V2 request.

Knows nothing of the reason. Decoding it raises the error, so that it is refused and recorded like any bad request.
"""

from __future__ import annotations

from mlserver.types import InferenceRequest
from pydantic import PrivateAttr

from mlserver_torch_stream.errors import InvalidInput


class Unreadable(InferenceRequest):  # type: ignore[misc]
    """A request that cannot be read: decoding it raises the error."""

    _error: InvalidInput = PrivateAttr()

    @classmethod
    def because(cls, error: InvalidInput, request_id: str) -> Unreadable:
        unreadable = cls(id=request_id, inputs=[])
        unreadable._error = error
        return unreadable


def refuse_unreadable(payload: InferenceRequest) -> None:
    """Raises InvalidInput."""
    if isinstance(payload, Unreadable):
        raise payload._error
