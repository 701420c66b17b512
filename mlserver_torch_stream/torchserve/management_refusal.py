"""The error of a management request, as TorchServe spells it: a status, the name of its exception, and a message.

Knows nothing of requests.
"""

from __future__ import annotations

from mlserver_torch_stream.errors import RequestError


class ManagementRefusal(RequestError):
    """``kind``: the name of TorchServe's exception."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


def bad_request(message: str) -> ManagementRefusal:
    return ManagementRefusal(400, "BadRequestException", message)


def no_model(message: str) -> ManagementRefusal:
    return ManagementRefusal(404, "ModelNotFoundException", message)


def internal(message: str) -> ManagementRefusal:
    return ManagementRefusal(500, "InternalServerException", message)
