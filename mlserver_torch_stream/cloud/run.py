"""Runs one cloud run from its input to its output: plans it, resumes it, writes its parts and records its end.

For this module the model is a callable and a description. Runs with different descriptions are different runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.lease import WriterLease, claim, identify, read_claim
from mlserver_torch_stream.cloud.listing import (
    InputLocation,
    decode_inputs,
    encode_inputs,
    heads,
    list_objects,
    open_input,
)
from mlserver_torch_stream.cloud.naming import INPUTS, done_name, is_archive, kind_of, lies_within, part_number
from mlserver_torch_stream.cloud.parse import Chunking
from mlserver_torch_stream.cloud.pipeline import PipelineLimits, infer_rows
from mlserver_torch_stream.cloud.prefetch import PrefetchedRange
from mlserver_torch_stream.cloud.retry_failed import FailedRowRetry
from mlserver_torch_stream.cloud.rows import (
    CloudError,
    Infer,
    Kind,
    ObjectExists,
    Result,
    Row,
    RunIdentity,
    RunRefused,
    TooManyFailures,
    Weigh,
)
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.sequences import ObjectSequences
from mlserver_torch_stream.cloud.sink import Done, PartSink, find_done, mend_errors
from mlserver_torch_stream.cloud.source import Cursor, Listed, Source
from mlserver_torch_stream.cloud.store import Store, get_or_none, settle
from mlserver_torch_stream.cloud.tables import Tables

if TYPE_CHECKING:
    from mlserver_torch_stream.cloud.endpoint import ServerEndpoint
    from mlserver_torch_stream.cloud.urls import UrlStore

_MAX_NAMED = 5  # the maximum number of keys in one message

Written = Callable[[int, int], Awaitable[None]]
"""Called with the number of rows in the parts of an output, and the number of failed rows among them."""


@dataclass(frozen=True, slots=True)
class CloudRun:
    """The description of one run: its input, its output, and how its rows are inferred.

    If ``input`` is None, ``manifest`` is a list of URLs, or ``urls`` are the URLs themselves, for a run without an
    output. ``model`` describes the model in plain JSON; a run with another description is another run. This worker has
    the number ``lane``, from 1 to ``lanes``, and writes the parts n with n % lanes == lane - 1. The run ends if more
    than ``max_failures`` rows fail; None means no limit. With ``retry_failed`` the failed rows of existing parts are
    inferred again before missing parts are. At most ``limit`` rows of the input are read; None means all. ``created``
    is the creation time in the output rows, in seconds since the epoch; None means the time when the run began.
    """

    input: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    output: str | None = None
    glob: str | None = None
    manifest: str | None = None
    kind: Kind | None = None
    part_rows: int = 64
    lane: int = 1
    lanes: int = 1
    max_failures: int | None = None
    retry_failed: bool = False
    limits: PipelineLimits = field(default_factory=PipelineLimits)
    ahead: PrefetchedRange = field(default_factory=PrefetchedRange)
    retry: Retry = field(default_factory=Retry)
    stall_s: float = 30.0
    storage: Mapping[str, str] = field(default_factory=dict)
    weigh: Weigh = lambda row: row.size
    created: int | None = None
    chunking: Chunking = field(default_factory=Chunking)
    tables: Tables = field(default_factory=Tables)
    limit: int | None = None
    urls: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Raises RunRefused, which names the option, if an option is wrong or contradicts another."""
        if self.limit is not None and self.limit < 1:
            raise RunRefused("--limit: must be at least 1")
        if self.part_rows < 1:
            raise RunRefused("--part-rows: must be at least 1")
        if not 1 <= self.lane <= self.lanes:
            raise RunRefused("--worker: must be I/N with I from 1 to N")
        if self.lanes > 1 and self.output is None:
            raise RunRefused("--worker: several workers need an --output that they share")
        if self.retry_failed and self.output is None:
            raise RunRefused("--retry-failed: needs the --output whose failed rows are to be tried again")
        if self.retry_failed and self.chunking.sequences:
            raise RunRefused("--retry-failed: is not supported with --sequences; use another --output and --manifest")
        if self.glob is not None and self.manifest is not None:
            raise RunRefused("--glob: cannot be combined with --manifest, which names all objects")
        if self.urls is not None and (self.input, self.manifest, self.output) != (None, None, None):
            raise RunRefused("urls: are for a run without input, manifest and output; put them into a manifest")
        if self.input is None and self.manifest is None and self.urls is None:
            raise RunRefused("--input: is missing; without it --manifest must be a list of URLs")
        for option, url in (("input", self.input), ("manifest", self.manifest)):
            if url is not None and _is_web(url) and "?" in url:
                raise RunRefused(f"--{option}: a URL with a query is allowed only in a --manifest, without --input")
        if self.output is not None:
            if _is_web(self.output):
                raise RunRefused("--output: an HTTP server can only be read; write to a folder or an s3, gs or az URL")
            if self.input is not None and lies_within(self.output, self.input):
                raise RunRefused("--output: is inside --input, so results would be read as input")

    def owns(self, part: int) -> bool:
        """True if this worker writes the part."""
        return part % self.lanes == self.lane - 1

    def kind_of(self, key: str) -> Kind:
        """Returns the kind of an object; it is ARCHIVE if the members are read."""
        return Kind.ARCHIVE if self.tables.archives and is_archive(key) else kind_of(key, self.kind)

    def rows_of(self, listed: Listed) -> int:
        """Returns the number of output rows of an object that is neither a table nor an archive."""
        return 1 if listed.failure is not None else self.chunking.rows(listed.info.size)

    def config(self) -> dict[str, Any]:
        """Returns the configuration of the run. A run with another configuration is another run."""
        return {
            "input": None if self.input is None else self.input.rstrip("/"),
            "glob": self.glob,
            "manifest": self.manifest,
            "kind": None if self.kind is None else self.kind.value,
            "part_rows": self.part_rows,
            "model": dict(self.model),
            **self.chunking.config(),
            **self.tables.config(),
            **({} if self.limit is None else {"limit": self.limit}),
        }


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The objects of a run, and the parts that its output has. ``known`` means that the output already belongs to this
    run.
    """

    run: CloudRun
    identity: RunIdentity
    source: InputLocation | UrlStore
    objects: list[Listed]
    output: Store | None
    done: Done
    known: bool = False


async def plan(run: CloudRun) -> RunPlan:
    """Lists the input, or reads the list that is stored with the output. Writes nothing.

    Raises CloudError: RunRefused if the output belongs to another run, InUse if another command writes to it. The
    caller must await ``settle`` before its event loop ends.
    """
    place = await _open(run)
    identity = identify(run.config(), int(time.time()) if run.created is None else run.created)
    if run.output is None:
        return RunPlan(run, identity, place, await _list(run, place), None, Done())
    output = Store.open(run.output, run.storage, run.stall_s, make=False)
    claimed = await read_claim(output, run.config(), run.retry)
    if claimed is None:
        await run.retry.run(_refuse_parts, output)
        return RunPlan(run, identity, place, await _list(run, place), output, Done())
    await run.retry.run(WriterLease(output, run.lane, run.lanes, run.retry).check)
    objects = await _kept(output, run, place) or await _list(run, place)
    return RunPlan(run, claimed, place, objects, output, await find_done(output, run.part_rows, run.retry), True)


async def _refuse_parts(output: Store) -> None:
    async for info in output.list():
        if part_number(info.key) is not None:
            raise RunRefused(f"--output: {output.url} has parts but no manifest; choose an empty folder or prefix")


async def _begin(planned: RunPlan, output: Store) -> RunPlan:
    """Claims the output for the run and stores the list of objects.

    If another worker has stored a list before, that list is used.
    """
    run, objects = planned.run, planned.objects
    identity = await claim(output, run.config(), planned.identity.created, run.retry)
    try:
        await run.retry.run(output.create, INPUTS, encode_inputs(objects))
    except ObjectExists:
        objects = await _kept(output, run, planned.source) or objects
    done = planned.done if planned.known else await find_done(output, run.part_rows, run.retry)
    await mend_errors(output, done, run.retry)
    return replace(planned, identity=identity, objects=objects, output=output, done=done)


async def _open(run: CloudRun) -> InputLocation | UrlStore:
    """Opens the input of a run. Raises CloudError if this fails."""
    if run.input is None:
        from mlserver_torch_stream.cloud.urls import UrlStore, read_url_list  # servers, which run batches, need no HTTP

        if run.urls is None:
            return UrlStore(read_url_list(await _read_manifest(run)), run.storage, run.stall_s)
        try:
            return UrlStore(read_url_list("\n".join(run.urls).encode()), run.storage, run.stall_s)
        except RunRefused as error:
            message = error.message.replace("--manifest: line", "urls: number").replace("on line", "number")
            raise RunRefused(message) from None
    return await open_input(run.input, run.storage, run.retry, manifest=run.manifest is not None, stall_s=run.stall_s)


async def _list(run: CloudRun, place: InputLocation | UrlStore) -> list[Listed]:
    if isinstance(place, InputLocation):
        manifest = None if run.manifest is None else await _read_manifest(run)
        objects = await list_objects(place, run.glob, manifest, run.retry)
    else:
        objects = await heads(place, list(place.urls), run.retry)
    if not objects and run.urls is not None:
        raise RunRefused("urls: is empty; give at least one URL")
    if not objects:
        where = run.input or run.manifest
        raise RunRefused(f"--input: nothing found in {where}" + (f" that matches {run.glob}" if run.glob else ""))
    return objects


async def _read_manifest(run: CloudRun) -> bytes:
    assert run.manifest is not None
    parent, _, name = run.manifest.rpartition("/")
    options = {} if _is_web(run.manifest) else run.storage
    store = Store.open(parent or ".", options, run.stall_s, make=False)
    try:
        return await run.retry.run(store.get, name)
    except CloudError as error:
        raise RunRefused(f"--manifest: {error.message}") from None


def _is_web(url: str) -> bool:
    return url.startswith(("http://", "https://"))


async def _kept(output: Store, run: CloudRun, place: InputLocation | UrlStore) -> list[Listed] | None:
    """Returns the list that is stored with the output. Raises RunRefused if one of its objects no longer has a URL."""
    stored = await get_or_none(output, INPUTS, run.retry)
    if stored is None:
        return None
    objects = decode_inputs(stored)
    if not isinstance(place, InputLocation):
        gone = next((each.info.key for each in objects if each.info.key not in place.urls), None)
        if gone is not None:
            raise RunRefused(f"--manifest: no longer names {gone}, which is an object of the output's run")
    return objects


def _never() -> bool:
    return False


async def results(
    planned: RunPlan, infer: Infer, metrics: RunMetrics, failures: int = 0, stopped: Callable[[], bool] = _never
) -> AsyncGenerator[Result, None]:
    """Yields the results that are still missing, in order. Raises TooManyFailures when more than the allowed number of
    rows have failed.

    ``failures`` are the failed rows of this command so far. Once ``stopped`` returns true, no further row is read.
    """
    run, done = planned.run, planned.done

    def wanted(index: int) -> bool:
        number = index // run.part_rows
        return run.output is None or (run.owns(number) and number not in done.parts)

    whole = _source(planned, metrics)
    source: Source | ObjectSequences = whole
    if run.chunking.sequences:
        source = infer = ObjectSequences(whole, infer, metrics, run.limits.batches)
    rows = source.rows(done.cursor if planned.output is not None else Cursor(), wanted)
    async with aclosing(infer_rows(_until(stopped, rows), infer, run.limits, metrics, run.weigh)) as found:
        async for result in found:
            yield result
            failures += result.outcome.failure is not None
            _check_failures(run, failures, result)


async def _until(stopped: Callable[[], bool], rows: AsyncGenerator[Row, None]) -> AsyncGenerator[Row, None]:
    async with aclosing(rows):
        async for row in rows:
            if stopped():
                return
            yield row


def _source(planned: RunPlan, metrics: RunMetrics) -> Source:
    run = planned.run
    return Source(
        planned.source.store if isinstance(planned.source, InputLocation) else planned.source,
        planned.objects,
        run.kind,
        strict=run.lanes > 1 or planned.done.sparse,
        retry=run.retry,
        ahead=run.ahead,
        chunking=run.chunking,
        tables=run.tables,
        limit=run.limit,
        on_retry=metrics.retried,
    )


def _check_failures(run: CloudRun, failures: int, result: Result) -> None:
    if run.max_failures is not None and failures > run.max_failures:
        failure = result.outcome.failure
        last = f"; the last: {result.row.custom_id}: {failure.message}" if failure else ""
        raise TooManyFailures(f"{failures} rows failed, more than the {run.max_failures} allowed{last}")


async def stream(
    run: CloudRun, model: Infer | ServerEndpoint | str, metrics: RunMetrics | None = None
) -> AsyncGenerator[Result, None]:
    """Yields the results of a run without an output, in order, while objects are still being fetched.

    ``model`` is a callable that infers a batch, a server's endpoint, or the URL of a server with one model.
    """
    from mlserver_torch_stream.cloud.backend import opened  # here: servers, which run batches, need no HTTP client

    if run.output is not None:
        raise RunRefused("--output: stream returns its results to the caller; use write to write an output")
    try:
        planned = await plan(run)
        async with opened(model) as infer, aclosing(results(planned, infer, metrics or RunMetrics())) as found:
            async for result in found:
                yield result
    finally:
        await settle()


async def write(
    planned: RunPlan,
    infer: Infer,
    metrics: RunMetrics,
    report: Callable[[str], None] = lambda message: None,
    written: Written | None = None,
    stopped: Callable[[], bool] = _never,
) -> int:
    """Writes the missing parts. Returns the number of failed rows in this worker's parts, also from earlier commands.

    ``report`` is called with one line about failed rows that cannot be inferred again; ``written`` is called for each
    part once the part is durable. Once ``stopped`` returns true, only the rows that have already been read are written.
    Raises InUse if another command writes.
    """
    run = planned.run
    assert run.output is not None, "the plan has no output"
    output = Store.open(run.output, run.storage, run.stall_s)
    async with WriterLease(output, run.lane, run.lanes, run.retry) as lease:
        planned = await _begin(planned, output)
        before = metrics.failed
        tried = await _retry_failed(planned, output, infer, metrics, report, lease) if run.retry_failed else 0
        rows, failed = 0, metrics.failed - before  # counted here, because a watcher's metrics cover many objects
        if not planned.done.complete:
            sink = PartSink(output, run.part_rows, planned.identity, run.retry)
            async with aclosing(results(planned, infer, metrics, failed, stopped)) as found:
                async for result in found:
                    lease.require()
                    rows += 1
                    failed += result.outcome.failure is not None
                    if await sink.write(result) and written is not None:
                        await written(planned.done.rows + rows, planned.done.failed + failed)
            await sink.end()
        earlier = sum(count for number, count in planned.done.failures.items() if run.owns(number))
        failed += earlier - tried
        if not planned.done.complete or run.retry_failed or run.lanes == 1:
            done = {"failed": failed, "lane": run.lane, "lanes": run.lanes}
            await run.retry.run(output.put, done_name(run.lane, run.lanes), json.dumps(done).encode() + b"\n")
        return failed


async def _retry_failed(
    planned: RunPlan,
    output: Store,
    infer: Infer,
    metrics: RunMetrics,
    report: Callable[[str], None],
    lease: WriterLease,
) -> int:
    """Infers failed rows again and returns the number of rows that were tried. Raises TooManyFailures if too many of
    them fail again.
    """
    run, done = planned.run, planned.done
    retries = FailedRowRetry(_source(planned, metrics), output, run.part_rows, planned.identity)
    before = metrics.failed
    numbers = [number for number in sorted(done.failures) if run.owns(number)]
    async for failed in retries.groups(numbers):
        async with aclosing(infer_rows(retries.rows(failed), infer, run.limits, metrics, run.weigh)) as found:
            async for result in found:
                lease.require()
                await retries.put(result)
                _check_failures(run, metrics.failed - before, result)
    if retries.lost:
        few = ", ".join(retries.lost[:_MAX_NAMED])
        report(
            f"{len(retries.lost)} failed rows each represent a JSONL object that could not be read to its end: {few}; "
            "to retry them, list the objects in a --manifest and run them into another --output"
        )
    return retries.tried
