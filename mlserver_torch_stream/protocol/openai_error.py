"""Builds OpenAI's error object, and says which status an error has in OpenAI's API.

Knows nothing of how it is transported.
"""

from __future__ import annotations

from typing import Any

from mlserver_torch_stream.errors import InvalidInput, RequestError

BAD_REQUEST = 400


def openai_status(status: int) -> int:
    """Bad input is 400 in OpenAI's API, 422 in V2."""
    return BAD_REQUEST if status == InvalidInput.status else status


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The value of ``error`` in a body."""
    return {"message": message, "type": _kind(status), "param": param, "code": code}


def describe(error: RequestError) -> tuple[int, dict[str, Any]]:
    """The status and the error object."""
    status = openai_status(error.status)
    return status, error_object(status, error.message, error.field, error.code)


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
