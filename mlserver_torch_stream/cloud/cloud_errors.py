"""What can go wrong around a row: with objects, with the output, with a run.

Knows no store's exceptions; ``store`` turns them into these. ``code`` is what an output row or a message bears.
"""

from __future__ import annotations


class CloudError(Exception):
    """A run that cannot go on, or an object that cannot be had. ``retriable``: the same may succeed later."""

    code = "failed"
    retriable = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class StoreUnavailable(CloudError):
    """No answer, a broken or stalled one, or one that says: later. ``retry_after``: seconds the server asked for."""

    code = "unavailable"
    retriable = True

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ObjectMissing(CloudError):
    code = "missing"


class AccessDenied(CloudError):
    code = "denied"


class ObjectChanged(CloudError):
    """The object is not the one that was listed."""

    code = "changed"


class ObjectExists(CloudError):
    """A conditional create that found something there."""

    code = "exists"


class StorageFull(CloudError):
    """No room where the output goes."""

    code = "full"


class RunRefused(CloudError):
    """A run that may not start, or not as it was asked for: the option is named."""

    code = "refused"


class InUse(RunRefused):
    """Another command is writing to the output."""

    code = "in_use"


class TooManyFailures(CloudError):
    """More rows failed than the run was told to bear."""

    code = "too_many_failures"
