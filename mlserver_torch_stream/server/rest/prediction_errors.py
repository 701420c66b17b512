"""An error as a client of TorchServe sees it: its status, and a JSON object with ``code``, ``type`` and ``message``.

The types are the names of TorchServe's exceptions.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from mlserver_torch_stream.errors import InvalidInput, NotServing, QueueFull, RequestError, Unauthorized
from mlserver_torch_stream.server.rest.connection import BodyTooLarge, UnknownCoding

_SPELLED = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE  # TorchServe's spelling of JSON


class NoSuchModel(RequestError):
    status = 404

    def __init__(self, name: str) -> None:
        super().__init__(f"Model not found: {name}")


class NoSuchVersion(RequestError):
    status = 404

    def __init__(self, name: str, version: str) -> None:
        super().__init__(f"Model version: {version} does not exist for model: {name}")


class NoSuchPath(RequestError):
    status = 404

    def __init__(self, rest: str, paths: Sequence[str]) -> None:
        super().__init__(f"Unknown API endpoint: {rest}; there are {', '.join(paths)}")


class WrongMethod(RequestError):
    status = 405

    def __init__(self) -> None:
        super().__init__("Requested method is not allowed, use POST or PUT.")


class MissingParameter(InvalidInput):
    def __init__(self, name: str) -> None:
        super().__init__(name, "is required")
        self.message = f"Parameter {name} is required."


# The first row whose class an error has; None: the error's own status.
_TYPES: tuple[tuple[type[RequestError], str, int | None], ...] = (
    (NoSuchModel, "ModelNotFoundException", None),
    (NoSuchVersion, "ModelVersionNotFoundException", None),
    (NoSuchPath, "ResourceNotFoundException", None),
    (WrongMethod, "MethodNotAllowedException", None),
    (Unauthorized, "InvalidKeyException", None),
    (InvalidInput, "BadRequestException", 400),
    (UnknownCoding, "BadRequestException", None),
    (BodyTooLarge, "TooLongFrameException", None),
    (QueueFull, "ServiceUnavailableException", 503),
    (NotServing, "ServiceUnavailableException", None),
    (RequestError, "InternalServerException", None),
)


def status_and_body(error: RequestError) -> tuple[int, bytes]:
    kind, status = next((kind, status) for each, kind, status in _TYPES if isinstance(error, each))
    code = error.status if status is None else status
    return code, as_json({"code": code, "type": kind, "message": error.message})


def as_json(body: dict[str, object]) -> bytes:
    return orjson.dumps(body, option=_SPELLED)
