"""Runs one job from its input to its output: plans it, resumes it, writes its parts and records its end.

Knows of the model only the callable, and a description by which it tells one run from another.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.claim import claim, identify, read_claim
from mlserver_torch_stream.cloud.cloud_errors import CloudError, ObjectExists, RunRefused, TooManyFailures
from mlserver_torch_stream.cloud.lease import WriterLease
from mlserver_torch_stream.cloud.listing import InputLocation, decode_inputs, encode_inputs, list_objects, open_input
from mlserver_torch_stream.cloud.naming import INPUTS, done_name, lies_within, part_number
from mlserver_torch_stream.cloud.pipeline import PipelineLimits, infer_rows
from mlserver_torch_stream.cloud.prefetch import PrefetchedRange
from mlserver_torch_stream.cloud.retry_failed import FailedRowRetry
from mlserver_torch_stream.cloud.rows import Infer, Kind, Result, Row, RunIdentity
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.sink import Done, PartSink, find_done, mend_errors
from mlserver_torch_stream.cloud.source import Cursor, Listed, Source
from mlserver_torch_stream.cloud.store import Store, settle

_MOST_NAMED = 5  # keys in one message


@dataclass(frozen=True, slots=True)
class CloudRun:
    """``model``: a description of the model as plain JSON; another description is another run. ``lane`` of ``lanes``,
    from 1: this worker writes the parts n with n % lanes == lane - 1. ``max_failures``: rows that may fail before the
    run ends; None: all. ``retry_failed``: failed rows of existing parts are inferred again, before missing parts.
    ``created``: the time that the rows bear, in seconds since the epoch; None: the beginning of the run.
    """

    input: str
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
    weigh: Callable[[Row], int] = lambda row: row.size
    created: int | None = None

    def __post_init__(self) -> None:
        """Raises RunRefused, which names the option."""
        if self.part_rows < 1:
            raise RunRefused("--part-rows: must be at least 1")
        if not 1 <= self.lane <= self.lanes:
            raise RunRefused("--worker: must be I/N with I from 1 to N")
        if self.lanes > 1 and self.output is None:
            raise RunRefused("--worker: several workers need an --output that they share")
        if self.retry_failed and self.output is None:
            raise RunRefused("--retry-failed: needs the --output whose failed rows are to be tried again")
        if self.glob is not None and self.manifest is not None:
            raise RunRefused("--glob: names objects beside --manifest, which names them all; give one of them")
        if self.output is not None:
            if self.output.startswith(("http://", "https://")):
                raise RunRefused("--output: an HTTP server is for reading; write to s3, gs, az or a folder")
            if lies_within(self.output, self.input):
                raise RunRefused("--output: lies within --input, so that results would be read as input")

    def owns(self, part: int) -> bool:
        """True if this worker writes the part."""
        return part % self.lanes == self.lane - 1

    def config(self) -> dict[str, Any]:
        """The run's configuration: another value is another run."""
        return {
            "input": self.input.rstrip("/"),
            "glob": self.glob,
            "manifest": self.manifest,
            "kind": None if self.kind is None else self.kind.value,
            "part_rows": self.part_rows,
            "model": dict(self.model),
        }


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The objects of a run, and the parts that its output holds. ``known``: the output belongs to this run already."""

    job: CloudRun
    run: RunIdentity
    source: InputLocation
    objects: list[Listed]
    output: Store | None
    done: Done
    known: bool = False

    async def aclose(self) -> None:
        await self.source.store.aclose()


async def plan(job: CloudRun) -> RunPlan:
    """Lists the input, or reads the list that is stored with the output. Writes nothing.

    Raises CloudError: RunRefused where the output belongs to another run, InUse where another command writes to it.
    """
    try:
        return await _plan(job)
    except BaseException:
        await settle()
        raise


async def _plan(job: CloudRun) -> RunPlan:
    place = await open_input(job.input, job.storage, job.retry, manifest=job.manifest is not None, stall_s=job.stall_s)
    run = identify(job.config(), int(time.time()) if job.created is None else job.created)
    if job.output is None:
        return RunPlan(job, run, place, await _list(job, place), None, Done())
    output = Store.open(job.output, job.storage, job.stall_s, make=False)
    claimed = await read_claim(output, job.config(), job.retry)
    if claimed is None:
        await job.retry.run(lambda: _refuse_parts(output))
        return RunPlan(job, run, place, await _list(job, place), output, Done())
    await job.retry.run(WriterLease(output, job.lane, job.lanes, job.retry).check)
    objects = await _kept(output, job) or await _list(job, place)
    return RunPlan(job, claimed, place, objects, output, await find_done(output, job.part_rows, job.retry), True)


async def _refuse_parts(output: Store) -> None:
    async for info in output.list():
        if part_number(info.key) is not None:
            raise RunRefused(f"--output: {output.url} holds parts without a manifest; choose an empty place")


async def _begin(planned: RunPlan, output: Store) -> RunPlan:
    """Claims the output for the run and stores the list of objects. A list that another worker stored before is taken
    instead."""
    job, objects = planned.job, planned.objects
    run = await claim(output, job.config(), planned.run.created, job.retry)
    try:
        await job.retry.run(lambda: output.create(INPUTS, encode_inputs(objects)))
    except ObjectExists:
        objects = await _kept(output, job) or objects
    done = planned.done if planned.known else await find_done(output, job.part_rows, job.retry)
    await mend_errors(output, done, job.retry)
    return replace(planned, run=run, objects=objects, output=output, done=done)


async def _list(job: CloudRun, place: InputLocation) -> list[Listed]:
    manifest = None if job.manifest is None else await _read_manifest(job)
    objects = await list_objects(place, job.glob, manifest, job.retry)
    if not objects:
        raise RunRefused(f"--input: nothing found in {job.input}" + (f" that is {job.glob}" if job.glob else ""))
    return objects


async def _read_manifest(job: CloudRun) -> bytes:
    assert job.manifest is not None
    parent, _, name = job.manifest.rpartition("/")
    store = Store.open(parent or ".", job.storage, job.stall_s, make=False)
    try:
        return await job.retry.run(lambda: store.get(name))
    except CloudError as error:
        raise RunRefused(f"--manifest: {error.message}") from None


async def _kept(output: Store, job: CloudRun) -> list[Listed] | None:
    try:
        return decode_inputs(await job.retry.run(lambda: output.get(INPUTS)))
    except CloudError as error:
        if error.code != "missing":
            raise
        return None


async def results(
    planned: RunPlan, infer: Infer, metrics: RunMetrics, failures: int = 0
) -> AsyncGenerator[Result, None]:
    """The results that are still missing, in order. Raises TooManyFailures after the failure that exceeds the limit.

    ``failures``: the failed rows of this command so far.
    """
    job, done = planned.job, planned.done

    def wanted(index: int) -> bool:
        number = index // job.part_rows
        return job.output is None or (job.owns(number) and number not in done.parts)

    source = Source(
        planned.source.store,
        planned.objects,
        job.kind,
        strict=job.lanes > 1 or done.sparse,
        retry=job.retry,
        ahead=job.ahead,
        on_retry=metrics.retried,
    )
    rows = source.rows(done.cursor if planned.output is not None else Cursor(), wanted)
    async with aclosing(infer_rows(rows, infer, job.limits, metrics, job.weigh)) as found:
        async for result in found:
            yield result
            failures += result.outcome.failure is not None
            _bear(job, failures, result)


def _bear(job: CloudRun, failures: int, result: Result) -> None:
    if job.max_failures is not None and failures > job.max_failures:
        failure = result.outcome.failure
        last = f"; the last: {result.row.custom_id}: {failure.message}" if failure else ""
        raise TooManyFailures(f"{failures} rows failed, more than {job.max_failures}{last}")


async def stream(job: CloudRun, infer: Infer, metrics: RunMetrics | None = None) -> AsyncGenerator[Result, None]:
    """Yields the results of a job without an output, in order, while objects are still being fetched."""
    if job.output is not None:
        raise RunRefused("--output: stream gives results to its caller; use write for an output")
    planned = await plan(job)
    try:
        async with aclosing(results(planned, infer, metrics or RunMetrics())) as found:
            async for result in found:
                yield result
    finally:
        await planned.aclose()


async def write(
    planned: RunPlan, infer: Infer, metrics: RunMetrics, report: Callable[[str], None] = lambda message: None
) -> int:
    """Writes the missing parts; returns how many rows in this worker's parts have failed, now or in an earlier command.

    ``report`` gets a line about failed rows that cannot be inferred again. Raises InUse where another command writes.
    """
    job = planned.job
    assert job.output is not None, "a plan without an output"
    output = Store.open(job.output, job.storage, job.stall_s)
    async with WriterLease(output, job.lane, job.lanes, job.retry) as lease:
        return await _write(await _begin(planned, output), output, infer, metrics, report, lease)


async def _write(
    planned: RunPlan,
    output: Store,
    infer: Infer,
    metrics: RunMetrics,
    report: Callable[[str], None],
    lease: WriterLease,
) -> int:
    job = planned.job
    before = metrics.failed
    tried = await _try_again(planned, output, infer, metrics, report, lease) if job.retry_failed else 0
    if not planned.done.complete:
        sink = PartSink(output, job.part_rows, planned.run, job.retry)
        async with aclosing(results(planned, infer, metrics, metrics.failed - before)) as found:
            async for result in found:
                lease.require()
                await sink.write(result)
        await sink.end()
    earlier = sum(count for number, count in planned.done.failures.items() if job.owns(number))
    failed = earlier - tried + metrics.failed - before
    if not planned.done.complete or job.retry_failed or job.lanes == 1:
        done = {"failed": failed, "lane": job.lane, "lanes": job.lanes}
        await job.retry.run(lambda: output.put(done_name(job.lane, job.lanes), json.dumps(done).encode() + b"\n"))
    return failed


async def _try_again(
    planned: RunPlan,
    output: Store,
    infer: Infer,
    metrics: RunMetrics,
    report: Callable[[str], None],
    lease: WriterLease,
) -> int:
    """The number of rows that were inferred again. Raises TooManyFailures."""
    job, done = planned.job, planned.done
    source = planned.source.store
    retries = FailedRowRetry(
        *(source, planned.objects, job.kind, output, job.part_rows, planned.run, job.retry, job.ahead, metrics.retried)
    )
    before = metrics.failed
    numbers = [number for number in sorted(done.failures) if job.owns(number)]
    async for failed in retries.groups(numbers):
        async with aclosing(infer_rows(retries.rows(failed), infer, job.limits, metrics, job.weigh)) as found:
            async for result in found:
                lease.require()
                await retries.put(result)
                _bear(job, metrics.failed - before, result)
    if retries.lost:
        few = ", ".join(retries.lost[:_MOST_NAMED])
        report(
            f"{len(retries.lost)} failed rows stand for JSONL objects that could not be read to their ends: {few}; "
            "their rows have no places here: run them, named by --manifest, into another --output"
        )
    return retries.tried
