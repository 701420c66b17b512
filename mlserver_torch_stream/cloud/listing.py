"""Lists the objects of a run: all objects below a URL, all objects that match a glob, the entries of a manifest, or a
single object.

The list is made once and stored with the run's output, so that a resumed run reads the same versions.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.naming import glob_pattern
from mlserver_torch_stream.cloud.rows import AccessDenied, CloudError, Failure, ObjectMissing, RunRefused
from mlserver_torch_stream.cloud.source import Listed
from mlserver_torch_stream.cloud.store import ObjectInfo, ReadableStore, Store

MAX_OBJECTS = 1_000_000
_HEADS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class InputLocation:
    """A store and, if the run reads a single object, the object's key."""

    store: Store
    only: str | None = None


async def open_input(
    url: str, options: Mapping[str, str], retry: Retry, *, manifest: bool, stall_s: float
) -> InputLocation:
    """Opens the input of a run.

    If the last part of a URL looks like a file name, the URL names that object if it exists, else a prefix.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    web = url.startswith(("http://", "https://"))
    if web and not manifest:
        return InputLocation(Store.open(parent, options, stall_s), name)
    if "://" not in url or url.startswith("file://"):
        path = Path(url.removeprefix("file://")).expanduser()
        if path.is_file():
            return InputLocation(Store.open(str(path.parent), options, stall_s), path.name)
        if not path.is_dir():
            raise RunRefused(f"--input: no such file or folder: {path}")
    elif "." in name and not web and not parent.endswith("//") and parent.count("/") >= 2:
        store = Store.open(parent, options, stall_s)
        try:
            await retry.run(store.head, name)
            return InputLocation(store, name)
        except (ObjectMissing, AccessDenied):
            pass  # the URL is a prefix; listing reports it if that is denied too
    return InputLocation(Store.open(url, options, stall_s))


async def list_objects(place: InputLocation, glob: str | None, manifest: bytes | None, retry: Retry) -> list[Listed]:
    """Returns the objects, sorted by key or in the order of the manifest. Raises CloudError if listing fails."""
    if manifest is not None:
        return await heads(place.store, list(manifest_entries(manifest, _key_entry)), retry)
    if place.only is not None:
        if glob is not None:
            raise RunRefused(f"--glob: cannot be used, because --input names a single object: {place.only}")
        return await heads(place.store, [place.only], retry)
    pattern = glob_pattern(glob or "**")
    found = await _without_folders(place.store, await retry.run(_listed, place.store, pattern), retry)
    return sorted(found, key=lambda listed: listed.info.key)


async def _listed(store: Store, pattern: re.Pattern[str]) -> list[Listed]:
    found: list[Listed] = []
    async for info in store.list():
        if pattern.fullmatch(info.key):
            unreadable = Failure(RunRefused.code, f"{info.key!r}: {info.trouble}")
            found.append(Listed(info, unreadable if info.trouble else None))
            if len(found) > MAX_OBJECTS:
                raise RunRefused(f"--input: has more than {MAX_OBJECTS} objects; select some of them with --glob")
    return found


async def _without_folders(store: Store, found: list[Listed], retry: Retry) -> list[Listed]:
    """Returns the objects without the empty objects that only represent folders.

    For a folder, web consoles create an empty object ``name/``. The library lists it as ``name``, even if there is also
    an object ``name``.
    """
    empty = [each.info.key for each in found if each.info.key and not each.info.size and each.failure is None]
    now = {each.info.key: each for each in await heads(store, empty, retry)}
    objects: dict[str, Listed] = {}
    for each in found:
        is_now = each if each.info.size else now.get(each.info.key, each)
        missing = is_now.failure is not None and is_now.failure.code == ObjectMissing.code
        if each.info.key and not missing and is_now.info.size == each.info.size:
            objects[each.info.key] = each
    return list(objects.values())


def manifest_entries(data: bytes, read: Callable[[str, int], tuple[str, str]]) -> dict[str, str]:
    """Returns the entries of a manifest. ``read`` gets a line and its number, and returns a key and its value.

    Raises RunRefused, which names the line, if a line is invalid or repeats a key.
    """
    entries: dict[str, str] = {}
    numbers: dict[str, int] = {}
    try:
        lines = data.decode("utf-8-sig").split("\n")  # not splitlines: a key may contain other Unicode line ends
    except UnicodeDecodeError as error:
        raise RunRefused(f"--manifest: is not UTF-8: byte {error.start}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        key, value = read(line.strip(), number)
        if key in entries:
            raise RunRefused(f"--manifest: line {number} repeats {key}, which is already on line {numbers[key]}")
        entries[key], numbers[key] = value, number
    if len(entries) > MAX_OBJECTS:
        raise RunRefused(f"--manifest: names more than {MAX_OBJECTS} objects")
    return entries


def _key_entry(line: str, number: int) -> tuple[str, str]:
    """Parses a line with one key, plain or as ``{"key": …}``."""
    if not line.startswith("{"):
        return line, line
    try:
        key = json.loads(line)["key"]
    except (ValueError, KeyError, TypeError):
        key = None
    if not isinstance(key, str) or not key:
        raise RunRefused(f'--manifest: line {number} is neither a key nor {{"key": "…"}}')
    return key, key


async def heads(store: ReadableStore, keys: Sequence[str], retry: Retry) -> list[Listed]:
    """Returns the current versions of these objects. An object that is missing is in the list, with the reason."""
    gate = asyncio.Semaphore(_HEADS_AT_ONCE)

    async def head(key: str) -> Listed:
        async with gate:
            try:
                return Listed(await retry.run(store.head, key))
            except CloudError as error:
                return Listed(ObjectInfo(key, 0, ""), Failure(error.code, error.message))

    async with store.connected():
        return list(await asyncio.gather(*(head(key) for key in keys)))


def encode_inputs(objects: Sequence[Listed]) -> bytes:
    """Returns the list of a run's objects as JSON Lines: key, size, version, and the error of a missing object."""
    lines = []
    for listed in objects:
        info, failure = listed.info, listed.failure
        line = {"key": info.key, "size": info.size, "etag": info.etag}
        if failure is not None:
            line["error"] = [failure.code, failure.message]
        lines.append(json.dumps(line, separators=(",", ":")))
    return "".join(f"{line}\n" for line in lines).encode()


def decode_inputs(data: bytes) -> list[Listed]:
    """Reads the list that ``encode_inputs`` has written. Raises RunRefused if it is not such a list."""
    try:
        found = []
        for line in data.splitlines():
            value = json.loads(line)
            failure = Failure(*value["error"]) if "error" in value else None
            found.append(Listed(ObjectInfo(value["key"], value["size"], value["etag"]), failure))
        return found
    except (ValueError, KeyError, TypeError):
        raise RunRefused("--output: its inputs.jsonl was not written by this program") from None
