"""Reads JSON objects of a store, one or a page of them, and turns its errors into errors of a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from mlserver_torch_stream.batches.batch_record import is_id
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.rows import CloudError, ObjectMissing, RunRefused, StorageFull
from mlserver_torch_stream.cloud.store import Store
from mlserver_torch_stream.errors import InvalidInput, NotServing, RequestError
from mlserver_torch_stream.protocol.values import refuse, shown

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


SUFFIX = ".json"
_AT_ONCE = 32  # objects that are read at a time

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PageQuery:
    """``after``: only objects after this id, in the page's order. ``purpose``: only files of this purpose."""

    limit: int
    after: str | None = None
    newest_first: bool = True
    purpose: str | None = None


def read_query(given: Mapping[str, str], prefix: str, allowed: tuple[str, ...], most: int, default: int) -> PageQuery:
    """Reads the parameters of a list. Raises InvalidInput, which names the parameter."""
    for name in given:
        if name not in allowed:
            refuse(name, ..., allowed)
    limit, after, order = given.get("limit", str(default)), given.get("after"), given.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= most):
        raise InvalidInput("limit", f"must be from 1 to {most}, got {shown(limit)}")
    if after is not None and not is_id(prefix, after):
        raise InvalidInput("after", f"must be an id that begins with {prefix}, got {shown(after)}")
    if order not in ("asc", "desc"):
        raise InvalidInput("order", f"must be asc or desc, got {shown(order)}")
    return PageQuery(int(limit), after, order == "desc", given.get("purpose"))


async def read_object(
    store: Store, prefix: str, kind: str, object_id: str, retry: Retry, load: Callable[[bytes], _T]
) -> _T:
    """``kind``: what the id is of, for the error. Raises NoSuchObject, also for a text that is not an id."""
    if not is_id(prefix, object_id):
        raise NoSuchObject(kind, object_id)
    with translating_store_errors():
        try:
            return load(await retry.run(store.get, object_id + SUFFIX))
        except ObjectMissing:
            raise NoSuchObject(kind, object_id) from None


async def read_page(
    store: Store, prefix: str, query: PageQuery, retry: Retry, load: Callable[[bytes], dict[str, Any]]
) -> dict[str, Any]:
    """OpenAI's object of a page, with the stored objects as ``load`` shows them. Raises RequestError.

    ``load`` raises RunRefused for a damaged object, which is left out so that the other objects are listed.
    """
    found: list[dict[str, Any]] = []
    with translating_store_errors():
        ids = await retry.run(stored_ids, store, prefix)
        ids.sort(reverse=query.newest_first)
        if query.after is not None:
            after = query.after
            ids = [each for each in ids if (each < after if query.newest_first else each > after)]
        for start in range(0, len(ids), _AT_ONCE):
            if len(found) > query.limit:
                break
            read = await asyncio.gather(*(_read(store, each, retry, load) for each in ids[start : start + _AT_ONCE]))
            found += [each for each in read if each is not None and query.purpose in (None, each.get("purpose"))]
    data = found[: query.limit]
    ends = [each["id"] for each in data] or [None]
    return {
        "object": "list",
        "data": data,
        "first_id": ends[0],
        "last_id": ends[-1],
        "has_more": len(found) > query.limit,
    }


async def stored_ids(store: Store, prefix: str) -> list[str]:
    names = [info.key.removesuffix(SUFFIX) async for info in store.list() if info.key.endswith(SUFFIX)]
    return [name for name in names if is_id(prefix, name)]


async def _read(store: Store, name: str, retry: Retry, load: Callable[[bytes], _T]) -> _T | None:
    try:
        return load(await retry.run(store.get, name + SUFFIX))
    except ObjectMissing:
        return None  # it was deleted meanwhile
    except RunRefused as error:
        logger.error("%s is not listed: %s", name, error.message)
        return None
