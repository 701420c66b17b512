"""The errors of requests for files and batches, and a store's errors as errors of a request.

Knows nothing of statuses beyond the error table.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mlserver_torch_stream.cloud.cloud_errors import CloudError, StorageFull
from mlserver_torch_stream.errors import NotServing, RequestError

logger = logging.getLogger(__name__)


class BatchesOff(RequestError):
    """The server has no store for files and batches."""

    status = 404


class NoSuchObject(RequestError):
    """No file or batch has this id."""

    status = 404

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"no {kind} has the id {name[:100]!r}")


class StoreFull(RequestError):
    """The store has no room left."""

    status = 507


class FileTooLarge(RequestError):
    """A file is larger than the settings allow."""

    status = 413


@contextmanager
def translating_store_errors() -> Iterator[None]:
    """Raises a store's error as the error of a request. The log gets the details; the client does not."""
    try:
        yield
    except StorageFull as error:
        logger.error("The store of files and batches is full: %s", error.message)
        raise StoreFull("the store of files and batches is full") from None
    except CloudError as error:
        logger.error("The store of files and batches failed: %s", error.message)
        raise NotServing(f"the store of files and batches does not answer ({error.code})") from None
