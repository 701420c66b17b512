"""Defines the error table: every way in which a request can fail, with its REST status.

``server`` derives gRPC codes from the REST status.
"""

from __future__ import annotations


class RequestError(Exception):
    """The error of a request. ``status`` is the REST status that the client gets if no token has been sent yet.

    ``field`` is the part of the request that is wrong, by its name in the client's request. ``code`` is OpenAI's code
    for the error, if clients act on it. ``retry_after`` is the number of whole seconds after which the client should
    try again. ``shared`` means that another request of the batch may be the cause.
    """

    status: int = 500
    field: str | None = None
    code: str | None = None
    retry_after: int | None = None
    shared: bool = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidInput(RequestError):
    """Bad input: a value is wrong, or a parameter is unknown. The message names the field as it is called in the
    client's request.
    """

    status = 422

    field: str

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.reason = message


class ContextLengthExceeded(InvalidInput):
    """The prompt has more tokens than the model's context can hold.

    Clients recognise it by the code or by OpenAI's wording.
    """

    code = "context_length_exceeded"

    def __init__(self, field: str, tokens: int, context: int, *, at_least: bool = False) -> None:
        most = f"this model's maximum context length is {context} tokens"
        super().__init__(field, f"the prompt has {'at least ' if at_least else ''}{tokens} tokens, {most}")


class UnknownModel(RequestError):
    """The request names a model that this server does not have."""

    status = 404
    field = "model"
    code = "model_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"the model {name!r} does not exist here")


class Unauthorized(RequestError):
    """The server requires a key, and the request has sent none or a wrong one.

    The message quotes no key.
    """

    status = 401
    code = "invalid_api_key"

    def __init__(self) -> None:
        super().__init__(
            "this request needs a key: send the header 'Authorization: Bearer KEY' with one of the server's keys, or "
            "x-api-key"
        )


class QueueFull(RequestError):
    """More requests wait than the settings allow.

    ``retry_after`` is the number of whole seconds until there should be room.
    """

    status = 429
    code = "rate_limit_exceeded"
    retry_after = 1

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NotServing(RequestError):
    """The model has no engine that takes requests: it is loading, draining, unloading, or dead."""

    status = 503
    retry_after = 1


class TimedOut(RequestError):
    """The request's time limit passed before its first token."""

    status = 504


class GenerationFailed(RequestError):
    """The model raised an exception while this request was running."""

    status = 500


class ConstraintTooComplex(GenerationFailed):
    """The request's constraint compiled, but exceeds a limit of the grammar's library while an answer is generated.

    The client is at fault: before the first token it gets the status of bad input.
    """

    status = 422

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: is too complex: the answer cannot be constrained: {reason}")
        self.field = field


def as_request_error(error: Exception) -> RequestError:
    """Returns the RequestError for an exception that ended a sequence."""
    return error if isinstance(error, RequestError) else GenerationFailed(str(error) or type(error).__name__)


class SettingsError(Exception):
    """A model's settings are wrong; the message names the key. Raised by ``load``, never by a request."""


class LoadFailed(Exception):
    """A model could not be loaded; the message says why in one line."""
