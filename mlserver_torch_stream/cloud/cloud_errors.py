"""The errors around a row: of objects, of the output, of a run.

Knows no store's exceptions; ``store`` turns them into these. An error's ``code`` stands in output rows and messages.
"""

from __future__ import annotations


class CloudError(Exception):
    """A run cannot go on, or an object cannot be read. ``retriable``: the same call may succeed later."""

    code = "failed"
    retriable = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class StoreUnavailable(CloudError):
    """A store or server does not answer, breaks off, stalls, or asks for a later attempt. ``retry_after``: the seconds
    that it asked for."""

    code = "unavailable"
    retriable = True

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ObjectMissing(CloudError):
    """There is no object under the key."""

    code = "missing"


class AccessDenied(CloudError):
    """The credentials do not allow the call."""

    code = "denied"


class ObjectChanged(CloudError):
    """The object is not the version that was listed."""

    code = "changed"


class ObjectExists(CloudError):
    """A conditional create found an object under the key."""

    code = "exists"


class StorageFull(CloudError):
    """The output's storage has no room left."""

    code = "full"


class RunRefused(CloudError):
    """A run may not start with these options. The message names the option."""

    code = "refused"


class InUse(RunRefused):
    """Another command writes to the output."""

    code = "in_use"


class TooManyFailures(CloudError):
    """More rows failed than the run allows."""

    code = "too_many_failures"
