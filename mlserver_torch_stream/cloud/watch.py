"""Infers each new object once, as it is announced or found by polling, and writes its result as an object.

A result's name is derived from the object's key, its version and the configuration, so that an object that is announced
twice is inferred only once. The result of an archive is a folder with this name, which holds the output of a run over
only this archive. If the process is killed and the archive is announced again, the run continues after the existing
parts. Polling needs keys in increasing order, such as times and counters. It finds neither a key before its cursor nor
a new version of a known key. A queue reports both.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.lease import FORMAT, identify
from mlserver_torch_stream.cloud.listing import InputLocation
from mlserver_torch_stream.cloud.naming import digest, done_name, is_archive
from mlserver_torch_stream.cloud.parse import Chunking
from mlserver_torch_stream.cloud.pipeline import PipelineLimits, infer_rows
from mlserver_torch_stream.cloud.prefetch import PrefetchedRange
from mlserver_torch_stream.cloud.rows import (
    AccessDenied,
    CloudError,
    Failure,
    Infer,
    InUse,
    Kind,
    ObjectExists,
    ObjectMissing,
    Outcome,
    Result,
    Row,
    RunIdentity,
    RunRefused,
    Weigh,
)
from mlserver_torch_stream.cloud.run import CloudRun, RunPlan, write
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.sequences import ObjectSequences
from mlserver_torch_stream.cloud.sink import Done
from mlserver_torch_stream.cloud.source import BLOCK_BYTES, Listed, Source
from mlserver_torch_stream.cloud.store import ObjectInfo, Store, get_or_none
from mlserver_torch_stream.cloud.tables import Tables

MAX_RESULT_BYTES = 64 * 2**20
_LOOK_S = 1.0  # the time between two looks at an archive's result that another watcher writes


async def always() -> bool:
    """Says that an announcement is durable from the beginning."""
    return True


@dataclass(frozen=True, slots=True)
class Announced:
    """A new object. ``done`` is awaited when its result is durable, or when the object is found to be deleted.

    ``stands`` waits until the announcement itself is durable. If it returns False, the announcement is withdrawn: the
    object has no result, and ``done`` is awaited.
    """

    key: str
    done: Callable[[], Awaitable[None]]
    stands: Callable[[], Awaitable[bool]] = always


@dataclass
class Watcher:
    """Infers new objects. At most ``objects`` objects are inferred at a time. Each goes through the stages of a run,
    with these ``limits``.

    ``report`` is called with one line for each object that is deleted before it is read, or that fails as a whole.
    ``created`` is the creation time in the output rows, in seconds since the epoch; None means the time when the
    inference of the object began. ``part_rows`` is the number of rows in one part of an archive's result.
    """

    store: Store
    output: Store
    infer: Infer
    model: Mapping[str, Any]
    kind: Kind | None = None
    limits: PipelineLimits = field(default_factory=PipelineLimits)
    retry: Retry = field(default_factory=Retry)
    objects: int = 8
    metrics: RunMetrics = field(default_factory=RunMetrics)
    report: Callable[[str], None] = lambda message: None
    created: int | None = None
    chunking: Chunking = field(default_factory=Chunking)
    ahead: PrefetchedRange = field(default_factory=PrefetchedRange)
    weigh: Weigh = lambda row: row.size
    tables: Tables = field(default_factory=Tables)
    part_rows: int = 64
    seen: int = 0

    def __post_init__(self) -> None:
        # One lock for each result that is being made.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

        self._again = asyncio.Lock()

    def result_name(self, info: ObjectInfo) -> str:
        """Returns the name of an object's result, which depends on the object, the model and the options that shape
        rows.
        """
        kind = None if self.kind is None else self.kind.value
        model = dict(self.model)
        identity = {"format": FORMAT, "key": info.key, "etag": info.etag, "kind": kind, "model": model}
        identity |= self.chunking.config() | self.tables.config()
        return f"result-{digest(identity)[:40]}.jsonl"

    def archive_run(self, info: ObjectInfo) -> CloudRun:
        """Returns the run over the members of an archive. The output of this run is the archive's result."""
        run = CloudRun(
            f"{self.store.url}/{info.key}",
            self.model,
            kind=self.kind,
            part_rows=self.part_rows,
            limits=self.limits,
            ahead=self.ahead,
            retry=self.retry,
            stall_s=self.output.stall_s,
            storage=self.output.options,
            weigh=self.weigh,
            created=self.created,
            chunking=self.chunking,
            tables=self.tables,
        )
        name = digest({"format": FORMAT, "etag": info.etag, **run.config()})[:40]
        return replace(run, output=f"{self.output.url}/result-{name}")

    async def watch(self, announcements: AsyncGenerator[Announced, None], most: int | None = None) -> None:
        """Infers announced objects until the ``announcements`` end or ``most`` objects are done. An object whose
        announcement is withdrawn does not count.

        Raises CloudError if results cannot be written.
        """
        running: set[asyncio.Task[None]] = set()
        next_object: asyncio.Task[Announced | None] | None = None
        ended = False

        def wants_more() -> bool:
            return not ended and self.seen != most

        try:
            while running or wants_more():
                if next_object is None and wants_more() and len(running) < self.objects:
                    next_object = asyncio.create_task(_next(announcements))
                await asyncio.wait(
                    {*running, *([next_object] if next_object else [])}, return_when=asyncio.FIRST_COMPLETED
                )
                running = {task for task in running if not _ended(task)}
                if next_object is not None and next_object.done():
                    announced, next_object = next_object.result(), None
                    if announced is not None:
                        running.add(asyncio.create_task(self._object(announced)))
                        self.seen += 1
                    ended = announced is None
        finally:
            left = [*running, *([next_object] if next_object else [])]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await announcements.aclose()

    async def _object(self, announced: Announced) -> None:
        try:
            await self._write_result(announced)
        except CloudError:
            if await announced.stands():
                raise
        if not await announced.stands():
            self.seen -= 1
        await announced.done()

    async def _write_result(self, announced: Announced) -> None:
        """Writes the result of an object if it is missing. Raises CloudError."""
        try:
            listed = await self._listed(announced.key)
        except ObjectMissing:  # deleted, perhaps after an earlier announcement of it
            if await announced.stands():
                self.report(f"{announced.key}: was deleted before it was read; nothing to do")
            return
        name = self.result_name(listed.info)
        turn = self._turns.setdefault(name, asyncio.Lock())
        async with turn:  # one of several announcements of a version at a time, so that it is inferred once
            if listed.failure is None and self.tables.archives and is_archive(listed.info.key):
                if await announced.stands():
                    await self._infer_archive(listed)
                return
            there = asyncio.create_task(self._there(name))
            try:
                data = await self._inferred(listed, there)
                if not await there and await announced.stands():
                    with suppress(ObjectExists):  # another watcher has written it meanwhile
                        await self.retry.run(self.output.create, name, data)
            finally:
                there.cancel()
                await asyncio.gather(there, return_exceptions=True)

    async def _infer_archive(self, listed: Listed) -> None:
        """Writes the missing parts of an archive's result, or waits while another watcher writes them."""
        run = self.archive_run(listed.info)
        assert run.output is not None
        name = run.output.removeprefix(f"{self.output.url}/")
        identity = identify(run.config(), int(time.time()) if run.created is None else run.created)
        planned = RunPlan(run, identity, InputLocation(self.store), [listed], self.output, Done())
        waits = False
        while not await self._there(f"{name}/{done_name(1, 1)}"):
            try:
                failed = await write(planned, self.infer, self.metrics)
            except InUse:
                if not waits:
                    self.report(f"{listed.info.key}: another watcher is inferring it; waiting for that watcher")
                waits = True
                await asyncio.sleep(_LOOK_S)
                continue
            if failed:
                self.report(f"{listed.info.key}: {failed} of its rows failed; they are in {run.output}")

    async def _listed(self, key: str) -> Listed:
        """Returns the object's current version.

        If there is no permission to read the object, its result says so. The name of this result does not depend on a
        version, so that the object is inferred if it is announced again when it can be read.
        """
        try:
            return Listed(await self.retry.run(self.store.head, key))
        except (AccessDenied, RunRefused) as error:
            return Listed(ObjectInfo(key, 0, ""), Failure(error.code, error.message))

    async def _inferred(self, listed: Listed, there: asyncio.Task[bool]) -> bytes:
        """Returns the results of all rows of an object. If they exceed ``MAX_RESULT_BYTES``, returns one row that says
        so.

        ``there`` looks for an earlier result while the first bytes of the object are read. If there is one, no row is
        inferred.
        """
        info, data = listed.info, bytearray()
        if info.size > BLOCK_BYTES and await there:
            return b""
        created = int(time.time()) if self.created is None else self.created
        run = RunIdentity(self.result_name(info), created)
        infer = self.infer
        whole = Source(
            self.store,
            [listed],
            self.kind,
            retry=self.retry,
            ahead=self.ahead,
            chunking=self.chunking,
            tables=self.tables,
        )
        source: Source | ObjectSequences = whole
        if self.chunking.sequences:
            source = infer = ObjectSequences(whole, infer, self.metrics, self.objects, self._again)
        rows = _unless(there, source.rows())
        async with aclosing(infer_rows(rows, infer, self.limits, self.metrics, self.weigh)) as results:
            async for result in results:
                if result.outcome.failure is not None and result.row.line is None:
                    self.report(f"{info.key}: {result.outcome.failure.message}")
                data.extend(result.encode(run))
                if len(data) > MAX_RESULT_BYTES:
                    text = f"its results are larger than {MAX_RESULT_BYTES} bytes; infer it with cloud run"
                    failure = Failure("too_large", f"{info.key}: {text}")
                    self.report(failure.message)
                    self.metrics.failed += 1
                    return Result(Row(0, info.key, None, info.key), Outcome(failure=failure)).encode(run)
        return bytes(data)

    async def _there(self, name: str) -> bool:
        try:
            await self.retry.run(self.output.head, name)
        except ObjectMissing:
            return False
        return True


async def _unless(there: asyncio.Task[bool], rows: AsyncGenerator[Row, None]) -> AsyncGenerator[Row, None]:
    """Yields ``rows``, or nothing if there is a result already."""
    async with aclosing(rows):
        async for row in rows:
            if await there:
                return
            yield row


async def _next(announcements: AsyncGenerator[Announced, None]) -> Announced | None:
    return await anext(announcements, None)


def _ended(task: asyncio.Task[None]) -> bool:
    """Returns whether a task has ended. Raises its error."""
    if task.done():
        task.result()
        return True
    return False


CURSOR = "cursor.json"
_MAX_OPEN = 10_000


class Poller:
    """Finds new objects by listing. ``every`` is the number of seconds between two polls.

    ``check`` runs before each poll and ends the polling if it raises CloudError. The cursor is a key: all objects up to
    it are done.
    """

    def __init__(
        self,
        store: Store,
        output: Store,
        pattern: re.Pattern[str],
        every: float,
        retry: Retry,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._output = output
        self._pattern = pattern
        self._every = every
        self._retry = retry
        self._check = check
        self._open: dict[str, bool] = {}  # announced key -> whether it is done, in the order of the keys
        self._cursor: str | None = None
        self._saved: str | None = None

    async def announcements(self) -> AsyncGenerator[Announced, None]:
        """Yields new objects until the caller closes it. Raises CloudError."""
        self._cursor = self._saved = await self._load()
        while True:
            self._check()
            for key in await self._retry.run(self._new):
                self._open[key] = False
                yield Announced(key, lambda key=key: self._done(key))  # type: ignore[misc]
            await self.save()
            await asyncio.sleep(self._every)

    async def save(self) -> None:
        """Writes the key up to which all objects are done, so that the next command starts after it."""
        if self._cursor != self._saved:
            cursor = self._cursor
            await self._retry.run(self._output.put, CURSOR, json.dumps({"after": cursor}).encode() + b"\n")
            self._saved = cursor

    async def _new(self) -> list[str]:
        """Returns the first new keys, at most as many as may be open. The next poll finds the remaining keys."""
        keys: list[str] = []
        most = _MAX_OPEN - len(self._open)
        async for info in self._store.list(self._cursor):
            if self._pattern.fullmatch(info.key) and info.key not in self._open:
                keys.append(info.key)
            if len(keys) > 2 * most:  # a folder is not listed in order, so the first key may be last
                keys = sorted(keys)[:most]
        return sorted(keys)[:most]

    async def _done(self, key: str) -> None:
        self._open[key] = True
        while self._open and self._open[first := next(iter(self._open))]:
            del self._open[first]
            self._cursor = max(self._cursor or "", first)

    async def _load(self) -> str | None:
        found = await get_or_none(self._output, CURSOR, self._retry)
        try:
            return None if found is None else str(json.loads(found)["after"])
        except (ValueError, KeyError, TypeError):
            raise RunRefused(f"--output: its {CURSOR} was not written by this program") from None
