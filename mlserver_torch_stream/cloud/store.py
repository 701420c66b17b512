"""Lists, reads and writes objects below one URL. It can read ranges of a fixed version, and create an object only if it
does not exist.

No other module imports the object-store library. Each call is a single attempt; the caller retries, because only the
caller knows how much of a body has arrived.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from mlserver_torch_stream.cloud.backoff import Retry, within
from mlserver_torch_stream.cloud.rows import (
    AccessDenied,
    CloudError,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    RunRefused,
    StorageFull,
    StoreUnavailable,
)
from mlserver_torch_stream.file_lock import take_lock


class _OpenFile(Protocol):
    def write(self, data: bytes) -> Awaitable[int]: ...

    def close(self) -> Awaitable[None]: ...


class ObjectUpload:
    """Writes one object in pieces. ``size`` is the number of bytes written so far. Both methods raise CloudError.

    An upload that is dropped before ``close`` may leave parts behind. The store has to delete these parts. For buckets,
    set a lifecycle rule for incomplete multipart uploads.
    """

    def __init__(self, file: _OpenFile, call: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self._file = file
        self._call = call
        self.size = 0

    async def write(self, data: bytes) -> None:
        await self._call(lambda: self._file.write(data))
        self.size += len(data)

    async def close(self) -> None:
        await self._call(self._file.close)


# A process that ends right after an awaited call of obstore 0.12 may abort at its exit: a thread of the library enters
# an interpreter that is shutting down. With this pause before the loop ends 0 of 75 runs aborted, without it up to 18
# of 25.
_GRACE_S = 0.05
_MEMORY = "memory://"
DATED = "modified:"  # marks a version without ETag
_UNMATCHED = (DATED, "W/")  # versions compared here: a weak ETag never matches If-Match (RFC 9110)
_CHUNK = 64 * 1024
_UPLOAD_PART = 5 * 2**20  # S3 does not accept smaller parts
_BEING_WRITTEN = re.compile(r"#[0-9]+$")  # how the library names a file that is not complete yet
_LISTED_AT_ONCE = 1000
_UNNAMED = "the object-store library cannot name it"
_UNNAMEABLE = re.compile(r"(^|/)\.{0,2}(/|$)|[\x00-\x1f\x7f]")  # a key for which the library has no name
_AS_KEY = {ord(each): quote(each) for each in "%?#"}
_LOCK_LOOK_S = 0.01
_SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "azure": "az", "abfs": "az", "abfss": "az"}
SCHEMES = ("s3", "gs", "az", "http", "https", "file")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One version of an object. ``etag`` identifies the version; if the store has no ETags, it is the time of the last
    change.

    ``etag`` is empty if the object cannot be read; ``trouble`` is the reason.
    """

    key: str
    size: int
    etag: str
    trouble: str = ""


class ReadableStore(Protocol):
    """Something from which the objects of a run can be read: a ``Store``, or a list of URLs."""

    async def head(self, key: str) -> ObjectInfo: ...

    def read(self, info: ObjectInfo, start: int, end: int) -> AsyncGenerator[bytes, None]: ...

    def connected(self) -> AbstractAsyncContextManager[None]:
        """Returns the context in which objects can be read."""
        ...


async def settle() -> None:
    """Gives the library's threads time to end. It must be awaited before the end of an event loop that used stores,
    also after errors.
    """
    await asyncio.sleep(_GRACE_S)


class Store:
    """The objects below one URL; keys are relative to it. ``stall_s`` is the longest silence in seconds within one
    answer; ``options`` are passed to the object-store library.
    """

    def __init__(
        self,
        backend: Any,
        url: str,
        stall_s: float = 30.0,
        listable: bool = True,
        options: Mapping[str, str] | None = None,
    ) -> None:
        import obstore

        self._library: Any = obstore
        self._backend = backend
        self.url = url
        self.stall_s = stall_s
        self.listable = listable
        self.options = options or {}

    @classmethod
    def open(
        cls, url: str, options: Mapping[str, str] | None = None, stall_s: float = 30.0, *, make: bool = True
    ) -> Store:
        """Opens a store at ``s3://``, ``gs://``, ``az://``, ``http(s)://``, ``file://`` or a folder. Raises RunRefused
        if it cannot be opened. If ``make`` is false, a missing folder is not created, but treated as an empty store.
        """
        scheme = url.partition("://")[0] if "://" in url else "file"
        if scheme not in (*_SCHEMES, "http", "https", "file"):
            raise RunRefused(f"{url}: unknown scheme {scheme!r}; use {', '.join(SCHEMES)} or a plain folder")
        try:
            import obstore.store
        except ImportError:
            raise RunRefused("objects need the extra [cloud]: pip install 'mlserver-torch-stream[cloud]'") from None
        try:
            if scheme == "file":
                folder = Path(url.removeprefix("file://")).expanduser().absolute()
                if not make and not folder.is_dir():
                    return cls(obstore.store.MemoryStore(), str(folder), stall_s)
                return cls(obstore.store.LocalStore(folder, mkdir=True), str(folder), stall_s)
            place = url.partition("://")[2].strip("/")
            if scheme in _SCHEMES and place and _UNNAMEABLE.search(place):
                raise RunRefused(f"{url}: {_UNNAMED}")
            backend = _remote(url, scheme, dict(options or {}))
            return cls(backend, url.rstrip("/"), stall_s, scheme in _SCHEMES, options)
        except CloudError:
            raise
        except Exception as error:
            raise RunRefused(f"{url}: {_first_line(error)}") from None
        except BaseException as error:
            if type(error).__name__ == "PanicException":  # the library panics at options of another kind of store
                raise RunRefused(f"{url}: --storage: {_first_line(error)}") from None
            raise

    @classmethod
    def memory(cls) -> Store:
        """Returns a store in this process's memory."""
        import obstore.store

        return cls(obstore.store.MemoryStore(), _MEMORY)

    async def list(self, after: str | None = None) -> AsyncGenerator[ObjectInfo, None]:
        """Yields all objects; a cloud store yields them in the order of their keys. Keys up to and including ``after``
        are left out.

        The library stops listing at an object that it cannot name, for example because the key contains a newline or an
        empty level, and at a cycle of links in a folder. The other objects are then listed without the library. Raises
        RunRefused if this is not possible.
        """
        if not self.listable:
            raise RunRefused(f"{self.url}: an HTTP server cannot list objects; name them with --manifest")
        from obstore.exceptions import InvalidPathError

        seen: set[str] = set()  # the keys of a folder that were listed
        last = after
        try:
            batches = self._library.list(self._backend, offset=after, chunk_size=_LISTED_AT_ONCE)
            while True:
                try:
                    batch = await within(batches.__anext__(), self.stall_s)
                except StopAsyncIteration:
                    return
                for meta in batch:
                    if self._local:
                        seen.add(meta["path"])
                    last = meta["path"]
                    yield ObjectInfo(meta["path"], meta["size"], self._version(meta))
        except Exception as error:
            if not self._local and not isinstance(error, InvalidPathError):
                raise self._as_cloud_error(error, "") from error
            why = self._as_cloud_error(error, "")
            unnamed = _first_line(error)
        if not self._local:
            async for info in self._list_s3(last, unnamed):
                yield info
            return
        for info in await asyncio.to_thread(_files, Path(self.url)):
            if not info.key:  # the folder itself cannot be read
                raise why
            if info.key not in seen and (after is None or info.key > after):
                yield info if info.trouble else await self._look_at(info)

    async def _look_at(self, info: ObjectInfo) -> ObjectInfo:
        """Returns the current version of an object; if it cannot be read, returns it with the reason."""
        try:
            return await self.head(info.key)
        except RunRefused:
            return replace(info, trouble=_UNNAMED)
        except CloudError as error:  # it has gone meanwhile, for example
            return replace(info, trouble=error.message)

    async def _list_s3(self, after: str | None, unnamed: str) -> AsyncGenerator[ObjectInfo, None]:
        """Lists a bucket of S3 without the library. ``unnamed`` is the library's message about the key that it cannot
        name.
        """
        from mlserver_torch_stream.cloud.aws import S3Listing  # whose boto3 takes time and memory

        listing = S3Listing.find(self.url, self.options, self.stall_s)
        if listing is None:
            raise RunRefused(
                f"{self.url}: cannot be listed, because the object-store library cannot represent one of its keys "
                f"({unnamed}); name the other objects with --manifest"
            )
        async for key, size, etag in listing.objects(after):
            key = key.removesuffix("/")  # as the library lists them
            if _UNNAMEABLE.search(key):
                yield ObjectInfo(key, size, "", _UNNAMED)
            else:
                yield ObjectInfo(key, size, etag)

    @property
    def _local(self) -> bool:
        return "://" not in self.url

    def connected(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()  # the library keeps the connections

    async def head(self, key: str) -> ObjectInfo:
        """Returns the current version of an object."""
        meta = await self._call(key, lambda: self._library.head_async(self._backend, key))
        return ObjectInfo(key, meta["size"], self._version(meta))

    async def read(self, info: ObjectInfo, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """Yields bytes ``start`` to ``end`` (exclusive) of this version.

        Raises ObjectChanged if the object has another version.
        """
        options: Any = {} if info.etag.startswith(_UNMATCHED) else {"if_match": info.etag}
        if (start, end) != (0, info.size):
            options["range"] = (start, end)
        answer = await self._call(info.key, lambda: self._library.get_async(self._backend, info.key, options=options))
        meta = answer.meta
        if meta["size"] != info.size or self._version(meta) != info.etag:
            raise ObjectChanged(f"{info.key}: is no longer the version that was listed")
        if end - start <= _CHUNK:
            yield bytes(await self._call(info.key, lambda: answer.bytes_async()))
            return
        chunks = answer.stream(min_chunk_size=_CHUNK)
        while True:
            try:
                chunk = await self._call(info.key, lambda: chunks.__anext__())
            except StopAsyncIteration:
                return
            yield bytes(chunk)

    async def get(self, key: str) -> bytes:
        """Returns a whole small object."""
        answer = await self._call(key, lambda: self._library.get_async(self._backend, key))
        return bytes(await self._call(key, lambda: answer.bytes_async()))

    async def look(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        """Returns a whole small object, and the marks of its version, which can be passed to ``replace``."""
        answer = await self._call(key, lambda: self._library.get_async(self._backend, key))
        meta = answer.meta
        marks = {name: str(meta[name]) for name in ("e_tag", "version") if meta.get(name)}
        return bytes(await self._call(key, lambda: answer.bytes_async())), marks

    async def replace(self, key: str, data: bytes, marks: Mapping[str, str]) -> None:
        """Replaces the version with these ``marks``, as a whole or not at all. Raises ObjectChanged if this version no
        longer exists.

        A folder has no conditional write. Instead the file is locked from the comparison to the write, if the file
        system has locks, so that no other replacement can happen in between.
        """
        if not self._local:
            await self._put(key, data, dict(marks))
            return
        async with self._locked_file(key):
            if (await self.head(key)).etag != marks.get("e_tag"):
                raise ObjectChanged(f"{self.url}/{key}: changed since it was read")
            await self.put(key, data)

    @asynccontextmanager
    async def _locked_file(self, key: str) -> AsyncGenerator[None, None]:
        """Holds the file's lock. Raises StoreUnavailable if the file cannot be locked, or if another process does not
        release it.

        If this file is replaced by another, the new file has a separate lock.
        """
        path = Path(self.url, key)
        try:
            try:
                file = os.open(path, os.O_RDWR)  # over NFS, only a file that is open for writing can be locked alone
            except OSError:  # a read-only file, or a bucket mounted as a folder
                file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise self._as_cloud_error(error, key) from error
        try:
            end = time.monotonic() + self.stall_s
            while not self._take_lock(file, key):
                if time.monotonic() > end:
                    problem = f"another process has held its lock for {self.stall_s:g} s"
                    raise StoreUnavailable(f"{self.url}/{key}: {problem}")
                await asyncio.sleep(_LOCK_LOOK_S)
            yield
        finally:
            os.close(file)

    def _take_lock(self, file: int, key: str) -> bool:
        try:
            return take_lock(file)
        except OSError as error:
            raise StoreUnavailable(f"{self.url}/{key}: cannot be locked: {error.strerror}") from error

    async def create(self, key: str, data: bytes) -> None:
        """Writes an object as a whole or not at all. Raises ObjectExists if the object exists already."""
        await self._put(key, data, "create")

    async def put(self, key: str, data: bytes) -> None:
        """Writes an object as a whole, and overwrites an existing one."""
        await self._put(key, data, "overwrite")

    async def _put(self, key: str, data: bytes, mode: Any) -> None:
        options = {"mode": mode, "use_multipart": False}
        await self._call(key, lambda: self._library.put_async(self._backend, key, data, **options))

    def upload(self, key: str) -> ObjectUpload:
        """Writes an object in pieces. At most two parts of ``_UPLOAD_PART`` bytes are in memory."""
        file = self._library.open_writer_async(self._backend, key, buffer_size=_UPLOAD_PART, max_concurrency=1)
        return ObjectUpload(file, lambda call: self._call(key, call))

    async def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects. Raises ObjectMissing if a key is missing and the store reports that."""
        await self._call(next(iter(keys), ""), lambda: self._library.delete_async(self._backend, keys))

    async def _call(self, key: str, call: Callable[[], Any]) -> Any:
        try:
            return await within(call(), self.stall_s)
        except StopAsyncIteration:
            raise
        except Exception as error:
            raise self._as_cloud_error(error, key) from error

    def _version(self, meta: Any) -> str:
        """Returns the version's ETag in the form that If-Match needs: Azure lists ETags without their quotes."""
        etag = meta.get("e_tag")
        if not etag:
            return f"{DATED}{meta['last_modified'].isoformat()}"
        return f'"{etag}"' if "://" in self.url and '"' not in etag and self.url != _MEMORY else str(etag)

    def _as_cloud_error(self, error: Exception, key: str) -> CloudError:
        """Returns the library's exception as a CloudError."""
        from obstore import exceptions

        if isinstance(error, CloudError):
            return error
        where = f"{self.url.rstrip('/')}/{key}"
        if isinstance(error, asyncio.TimeoutError | TimeoutError):
            return StoreUnavailable(f"{where}: no data arrived for {self.stall_s:g} s")
        text = _first_line(error)
        if isinstance(error, ValueError):  # a key that the library cannot name, such as one with an empty level
            return RunRefused(f"{where}: {text}")
        for kinds, translated in (
            ((exceptions.NotFoundError, FileNotFoundError), ObjectMissing(f"{where}: does not exist")),
            (
                (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError),
                AccessDenied(f"{where}: no permission"),
            ),
            (
                (exceptions.PreconditionError, exceptions.NotModifiedError),
                ObjectChanged(f"{where}: changed since it was listed"),
            ),
            ((exceptions.AlreadyExistsError, FileExistsError), ObjectExists(f"{where}: already exists")),
            ((exceptions.InvalidPathError, exceptions.NotSupportedError), RunRefused(f"{where}: {text}")),
        ):
            if isinstance(error, kinds):
                return translated
        return _by_text(where, str(error), text)


async def get_or_none(store: Store, key: str, retry: Retry) -> bytes | None:
    """Returns a whole small object; None if it is missing."""
    try:
        return await retry.run(store.get, key)
    except ObjectMissing:
        return None


def _files(folder: Path) -> list[ObjectInfo]:
    """Returns the files below a folder as the library lists them, without their versions.

    Links are followed, and files that are being written are left out. A folder that cannot be read, or a link to a
    folder above it, is in the list with the reason in ``trouble``. The key of ``folder`` itself is empty.
    """
    found: list[ObjectInfo] = []

    def add(path: Path, size: int, trouble: str = "") -> None:
        key = path.relative_to(folder).as_posix()
        found.append(ObjectInfo("" if key == "." else key, size, "", trouble))

    above = {str(folder): {os.path.realpath(folder)}}

    def add_unread(error: OSError) -> None:
        add(Path(error.filename), 0, f"is a folder that cannot be read: {error.strerror}")

    for place, folders, names in os.walk(folder, onerror=add_unread, followlinks=True):
        for name in list(folders):
            below = os.path.join(place, name)
            real = os.path.realpath(below)
            if real in above[place]:
                add(Path(below), 0, "is a link to a folder that contains the link")
                folders.remove(name)
            above[below] = above[place] | {real}
        for name in names:
            path = Path(place, name)
            with suppress(FileNotFoundError):  # it has gone meanwhile
                if path.is_file() and not _BEING_WRITTEN.search(name):
                    add(path, path.stat().st_size)
    return found


def _by_text(where: str, whole: str, text: str) -> CloudError:
    """Returns the CloudError for an exception of the library whose meaning can only be found from its text."""
    for code in ("os error 28", "os error 122", "os error 27"):  # ENOSPC, EDQUOT, EFBIG
        if code in whole:
            return StorageFull(f"{where}: no space left to write: {text}")
    if any(sign in whole for sign in ("os error 13", "os error 30", "403 Forbidden", "401 Unauthorized")):
        return AccessDenied(f"{where}: no permission: {text}")
    if "404 Not Found" in whole:  # the listed bucket is missing
        return ObjectMissing(f"{where}: does not exist")
    return StoreUnavailable(f"{where}: {text}")


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _remote(url: str, scheme: str, options: dict[str, str]) -> Any:
    import obstore.store

    if scheme in _SCHEMES:  # the rest is a key: the library would decode %41 and drop what follows ? or #
        url = url.translate(_AS_KEY)
    # ``within`` watches for silence and the caller retries: both keep the bytes that are received already.
    client: dict[str, Any] = {"timeout": "1h", "connect_timeout": "10s"}
    if scheme == "http" or _endpoint(options).startswith("http://"):
        client["allow_http"] = True
    retry: Any = {"max_retries": 0}
    return obstore.store.from_url(url, client_options=client, retry_config=retry, **options)  # type: ignore[call-overload]


def storage_account(options: Mapping[str, str]) -> str:
    """Returns the name of Azure's storage account; an empty text if neither an option nor a variable names it."""
    names = ("account_name", "azure_storage_account_name")
    given = next((value for name, value in options.items() if name.lower() in names), None)
    return given or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")


def _endpoint(options: Mapping[str, str]) -> str:
    given = next((value for name, value in options.items() if name.lower().endswith(("endpoint", "base_url"))), None)
    return given or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
