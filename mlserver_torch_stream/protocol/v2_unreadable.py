"""A message that could not be read as a V2 request, in the place of that request.

Knows nothing of why: it is refused where every other bad request is, alone and with the same bookkeeping.
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
