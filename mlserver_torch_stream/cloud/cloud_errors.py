"""The errors around a row: of objects, of the output, of a run.

Knows no store's exceptions; ``store`` turns them into these. An error's ``code`` stands in output rows and messages.
"""

from __future__ import annotations


class CloudError(Exception):
    """A run cannot go on, or an object cannot be read. ``retriable``: the same call may succeed later."""

    code = "failed"
    retriable = False

    def __init_subclass__(cls, *, code: str = "failed", retriable: bool = False) -> None:
        cls.code, cls.retriable = code, retriable

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class StoreUnavailable(CloudError, code="unavailable", retriable=True):
    """A store or server does not answer, breaks off, stalls, or asks for a later attempt. ``retry_after``: the seconds
    that it asked for."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ObjectMissing(CloudError, code="missing"):
    """There is no object under the key."""


class AccessDenied(CloudError, code="denied"):
    """The credentials do not allow the call."""


class ObjectChanged(CloudError, code="changed"):
    """The object is not the version that was listed."""


class ObjectExists(CloudError, code="exists"):
    """A conditional create found an object under the key."""


class StorageFull(CloudError, code="full"):
    """The output's storage has no room left."""


class RunRefused(CloudError, code="refused"):
    """A run may not start with these options. The message names the option."""


class InUse(RunRefused, code="in_use"):
    """Another command writes to the output."""


class TooManyFailures(CloudError, code="too_many_failures"):
    """More rows failed than the run allows."""
