"""The error table: every way a request can fail, with its REST status.

Knows nothing of who raises or who answers; gRPC codes are derived from the REST status by ``server``.
"""

from __future__ import annotations


class RequestError(Exception):
    """A request that fails, with the status that its client sees before the first token."""

    status = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidInput(RequestError):
    """Bad input: the field is named, in the client's own spelling."""

    status = 422

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.reason = message


class UnknownModel(RequestError):
    """The request names a model that is not served here."""

    status = 404

    def __init__(self, name: str) -> None:
        super().__init__(f"the model {name!r} does not exist here")


class QueueFull(RequestError):
    """More is waiting than the settings allow. ``retry_after``: whole seconds until some of it should be gone."""

    status = 429

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NotServing(RequestError):
    """The engine is not there: loading, draining, unloading, or dead."""

    status = 503
    retry_after = 1


class TimedOut(RequestError):
    """The request's time was over before its first token."""

    status = 504


class GenerationFailed(RequestError):
    """The model raised while this request was running."""

    status = 500


class SettingsError(Exception):
    """A model's settings are wrong: the key is named. Raised by ``load``, never by a request."""


class LoadFailed(Exception):
    """A model could not be loaded: one line that says why."""
