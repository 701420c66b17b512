"""Reads JSON objects of a store: one by its id, or a page of them in the order of their ids, as OpenAI's API does.

Knows nothing of what the objects hold.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from mlserver_torch_stream.batches.object_ids import is_id
from mlserver_torch_stream.batches.store_errors import NoSuchObject, translating_store_errors
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.cloud_errors import ObjectMissing, RunRefused
from mlserver_torch_stream.cloud.store import Store
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.unsupported import refuse
from mlserver_torch_stream.protocol.values import shown

logger = logging.getLogger(__name__)

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
