"""Reads the objects in a list of URLs, over HTTP and HTTPS from any hosts, and from several buckets.

Over HTTP no key, cookie or storage option is sent. The query of a URL may contain a signature: it is sent only to the
URL's host, and appears in no key, message or log.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from mlserver_torch_stream.client.http_transport import retry_after_s
from mlserver_torch_stream.cloud.connections import close_session, make_connector
from mlserver_torch_stream.cloud.listing import manifest_entries
from mlserver_torch_stream.cloud.rows import (
    AccessDenied,
    CloudError,
    ObjectChanged,
    ObjectMissing,
    RunRefused,
    StoreUnavailable,
)
from mlserver_torch_stream.cloud.store import DATED, ObjectInfo, Store

MAX_REDIRECTS = 5
MAX_BYTES_WITHOUT_RANGES = 8 * 2**20  # a larger object needs a server that answers range requests
_WEB = ("http", "https")
_BUCKETS = ("s3", "gs", "az")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_AS_IT_IS = re.compile(r"[\x21-\x7e]+")  # a URL that is not encoded again, because a signature may cover its spelling
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")
_LATER = (408, 425, 429)
_CONNECT_S = 10.0


def read_url_list(data: bytes) -> dict[str, str]:
    """Returns the URL of each key. A line is a URL, ``{"key": URL}``, or ``{"key": NAME, "url": URL}``.

    If there is no name, the key is the URL; for HTTP and HTTPS without query and fragment. Raises RunRefused, which
    names the line.
    """
    return manifest_entries(data, _entry)


def _entry(line: str, number: int) -> tuple[str, str]:
    entry: Any = line
    if line.startswith("{"):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = {}
    name = entry.get("key") if isinstance(entry, dict) else None
    url = entry.get("url", name) if isinstance(entry, dict) else entry
    if not isinstance(url, str) or (isinstance(entry, dict) and not (isinstance(name, str) and name)):
        raise RunRefused(f'--manifest: line {number} is neither a URL nor {{"key": "…", "url": "…"}}')
    key = _key_of(url, f"--manifest: line {number}")
    return (key if name in (None, url) else str(name)), url


def _key_of(url: str, where: str) -> str:
    """Returns the key of a URL. Raises RunRefused, whose message contains no part of the URL that could be secret."""
    scheme, _, rest = url.partition("://")
    if scheme in _BUCKETS:
        bucket, _, key = rest.partition("/")
        if not _BUCKET.fullmatch(bucket) or not key:
            raise RunRefused(f"{where} does not name an object in a bucket")
        return url
    if scheme not in _WEB:
        raise RunRefused(f"{where} is not a URL of {', '.join((*_BUCKETS, *_WEB))}, which is required without --input")
    try:
        parts = urlsplit(url)
        named = bool(_web_url(url).host)
    except ValueError:
        named = False
    if not named:
        raise RunRefused(f"{where} is a URL without a valid host")
    if "@" in parts.netloc:
        raise RunRefused(f"{where} has a user or a password in its URL, which would be sent and written to the output")
    return re.split("[?#]", url, maxsplit=1)[0]


def _web_url(text: str) -> URL:
    """Returns the URL without its fragment. Raises ValueError if it is invalid."""
    return URL(text, encoded=_AS_IT_IS.fullmatch(text) is not None).with_fragment(None)


def redirected(url: URL, location: str) -> URL:
    """Returns the URL to which ``url`` redirects. HTTPS is allowed on any host, and HTTP only from HTTP on the same
    host and port.

    Therefore a server cannot redirect a run to services without certificates in the run's network, such as a cloud's
    metadata service. Raises RunRefused, whose message has no path and no query.
    """
    try:
        target = url.join(_web_url(location))
        own = target.scheme == url.scheme == "http" and (target.host, target.port) == (url.host, url.port)
        allowed = bool(target.host) and target.user is None and target.password is None
        place = f"{target.scheme}://{target.host}"
    except ValueError:
        raise RunRefused("redirects to an invalid URL") from None
    if not allowed or not (own or target.scheme == "https"):
        raise RunRefused(f"redirects to {place}, which is neither https nor the same host")
    return target


class UrlStore:
    """Reads the objects of ``urls``, which maps keys to URLs. The URLs may have different hosts and buckets.

    ``options`` are passed to the object-store library and apply to buckets only; if there are any, all buckets must be
    of one kind. ``stall_s`` is the longest silence within one answer, in seconds.

    Objects can be read over HTTP only while the store is ``connected``.
    """

    def __init__(
        self, urls: Mapping[str, str], options: Mapping[str, str] | None = None, stall_s: float = 30.0
    ) -> None:
        """Raises RunRefused if there are ``options`` and the buckets are of several kinds."""
        kinds = sorted({url.partition("://")[0] for url in urls.values()} & set(_BUCKETS))
        if options and len(kinds) > 1:
            raise RunRefused(
                f"--storage: the options could be for {' or '.join(kinds)}, which --manifest names; use environment "
                "variables instead"
            )
        self.urls = urls
        self._options = options
        self._stall_s = stall_s
        self._buckets: dict[str, Store] = {}
        self._session: aiohttp.ClientSession | None = None
        self._users = 0

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Keeps connections until the last such context has ended."""
        if self._session is None:
            limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=self._stall_s)
            jar = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(
                connector=make_connector(), cookie_jar=jar, timeout=limits, auto_decompress=False
            )
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                session, self._session = self._session, None
                await close_session(session)

    async def head(self, key: str) -> ObjectInfo:
        """Returns the object's current version. Over HTTP it requests the first byte, because a URL may be signed only
        for GET.
        """
        found = self._in_bucket(key)
        if found is not None:
            store, path = found
            return replace(await store.head(path), key=key)
        async with self._got(key, {"Range": "bytes=0-0"}) as answer:
            return _info(key, answer)

    async def read(self, info: ObjectInfo, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """Returns bytes ``start`` to ``end`` (exclusive) of exactly this version. Raises ObjectChanged if the object
        has another version.
        """
        found = self._in_bucket(info.key)
        if found is not None:
            store, path = found
            async for chunk in store.read(replace(info, key=path), start, end):
                yield chunk
            return
        headers = {"If-Match": info.etag} if info.etag.startswith('"') else {}
        if (start, end) != (0, info.size):
            headers["Range"] = f"bytes={start}-{end - 1}"
        async with self._got(info.key, headers) as answer:
            if _info(info.key, answer) != info:
                raise ObjectChanged(f"{info.key}: is no longer the version that was listed")
            async for chunk in _part(info, answer, start, end):
                yield chunk

    def _in_bucket(self, key: str) -> tuple[Store, str] | None:
        """Returns the store for an object in a bucket, and the object's key in this store."""
        scheme, _, rest = self.urls[key].partition("://")
        if scheme in _WEB:
            return None
        bucket, _, path = rest.partition("/")
        url = f"{scheme}://{bucket}"
        if url not in self._buckets:
            self._buckets[url] = Store.open(url, self._options, self._stall_s)
        return self._buckets[url], path

    @asynccontextmanager
    async def _got(self, key: str, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Follows redirects, and yields a response with bytes of the object. Raises CloudError."""
        assert self._session is not None, "read outside of ``connected``"
        url = _web_url(self.urls[key])
        try:
            for _ in range(MAX_REDIRECTS + 1):
                asked = {"Accept-Encoding": "identity", **headers}
                async with self._session.get(url, headers=asked, allow_redirects=False) as answer:
                    location = answer.headers.get("Location")
                    if answer.status not in (301, 302, 303, 307, 308) or location is None:
                        if (error := _refusal(key, answer)) is not None:
                            raise error
                        yield answer
                        return
                url = redirected(url, location)
            raise RunRefused(f"redirects more than {MAX_REDIRECTS} times")
        except RunRefused as error:
            raise RunRefused(f"{key}: {error.message}") from None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise StoreUnavailable(f"{key}: {self._told(error)}") from None

    def _told(self, error: Exception) -> str:
        """Returns the text of an error, without the URL that some of these errors contain."""
        if isinstance(error, asyncio.TimeoutError):
            return f"no data arrived for {self._stall_s:g} s"
        return str(error) if isinstance(error, aiohttp.ClientConnectorError) else type(error).__name__


def _refusal(key: str, answer: aiohttp.ClientResponse) -> CloudError | None:
    status = answer.status
    if status in (200, 206, 416):
        return None
    if status in (401, 403):
        return AccessDenied(f"{key}: no permission, or the URL's signature has expired ({status})")
    if status in (404, 410):
        return ObjectMissing(f"{key}: does not exist")
    if status == 412:
        return ObjectChanged(f"{key}: changed since it was listed")
    if status in _LATER or status >= 500:
        return StoreUnavailable(f"{key}: its server answered {status}", retry_after_s(answer.headers))
    return RunRefused(f"its server answered {status}")


def _info(key: str, answer: aiohttp.ClientResponse) -> ObjectInfo:
    """Returns the version of the object that a response belongs to. Raises RunRefused if the size is not stated."""
    told = answer.headers.get("Content-Range", "")
    if answer.status == 206 and (match := _RANGE.fullmatch(told)):
        size = int(match[2])
    elif answer.status == 416:  # the object is empty, so it has no first byte, or it is shorter now
        size = 0
    elif answer.status == 200 and answer.content_length is not None:
        size = answer.content_length
    else:
        raise RunRefused("its server does not state the size of the object")
    etag, modified = answer.headers.get("ETag"), answer.headers.get("Last-Modified")
    return ObjectInfo(key, size, etag or (f"{DATED}{modified}" if modified else ""))


async def _part(info: ObjectInfo, answer: aiohttp.ClientResponse, start: int, end: int) -> AsyncGenerator[bytes, None]:
    """Yields bytes ``start`` to ``end`` of the object from a response that has this range or the whole object. Raises
    RunRefused if a large object's server does not support range requests.
    """
    match = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    before = start - int(match[1]) if match else start  # bytes of the answer that were not asked for
    if before and (match or info.size > MAX_BYTES_WITHOUT_RANGES):
        raise RunRefused("its server does not support range requests, which objects larger than 8 MiB need")
    left = end - start
    async for chunk in answer.content.iter_any():
        piece = chunk[min(before, len(chunk)) :]
        before -= len(chunk) - len(piece)
        if match is None:
            piece = piece[:left]
            left -= len(piece)
        if piece:
            yield piece
        if not left:
            return
