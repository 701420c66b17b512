"""Runs ``cloud run``: opens the model, runs the stages, shows progress, writes the results and prints a summary."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.cli import cloud_settings as settings
from mlserver_torch_stream.cli.child_server import NAME, LoadRefused, child_server
from mlserver_torch_stream.cli.cloud_options import STDOUT
from mlserver_torch_stream.cli.interruptible import Interrupted, run_to_end
from mlserver_torch_stream.cli.progress import Progress, Total, summary
from mlserver_torch_stream.cloud.archives import decompressor
from mlserver_torch_stream.cloud.backend import open_backend
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.batch_backend import BatchBackend
from mlserver_torch_stream.cloud.endpoint import Backend, ServerEndpoint, only_model
from mlserver_torch_stream.cloud.naming import closed_format, compression_of, is_archive, kind_of
from mlserver_torch_stream.cloud.parquet import parquet_library
from mlserver_torch_stream.cloud.pipeline import PipelineLimits
from mlserver_torch_stream.cloud.rows import CloudError, Infer, Kind, RunRefused, StorageFull, Weigh
from mlserver_torch_stream.cloud.run import RunPlan, plan, results, write
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.gunzip import Damaged
from mlserver_torch_stream.log_text import log_text

EMBEDDED = "embedded://smollm2-135m-instruct"
# A batch of the run becomes a batch of the handler. So the handler's queue must not wait for more requests, and its own
# bound is not needed, since the run's window is bounded.
_BATCHED_BY_THE_RUN = {"maxBatchDelay": 0, "jobQueueSize": 1_000_000, "useJobTicket": False}
_AHEAD = 3  # batches that wait in the server, so that a worker never waits for its next batch
_CHILD_RETRY = Retry(tries=6, first=0.1, longest=2.0)
_RESUME_HINT = "; the parts that were written are kept, and the same command continues the run"


Work = Callable[[argparse.Namespace, RunMetrics, "Stopwatch"], Awaitable[int]]
"""The work of a command. It returns the number of failed rows."""


class Stopwatch:
    """Measures the seconds since the model was loaded; how long the load took is a separate metric."""

    def __init__(self) -> None:
        self._began: float | None = None

    def start(self) -> None:
        """Starts the clock, when the model is loaded."""
        self._began = time.monotonic()

    def elapsed(self) -> float:
        """Returns the seconds since the start, or 0 before the start."""
        return 0.0 if self._began is None else time.monotonic() - self._began


def run(arguments: argparse.Namespace) -> int:
    """Runs ``cloud run`` and returns its exit status.

    Raises RunRefused if the run may not start, and LoadInterrupted if a signal arrives while the model is loading.
    """
    return finish(arguments, _run, "" if arguments.output == STDOUT else _RESUME_HINT)


def finish(arguments: argparse.Namespace, work: Work, hint: str) -> int:
    """Does the work of a command until it is finished or a signal arrives, prints the summary and returns the exit
    status.

    ``hint`` is added to the message about a signal, and says how to continue.
    """
    gc.freeze()  # the imports stay, and a garbage collection that visited them would pause all stages for 40 ms
    metrics, stopwatch = RunMetrics(), Stopwatch()
    try:
        status = settings.ROWS_FAILED if run_to_end(work(arguments, metrics, stopwatch)) else settings.OK
    except Interrupted:
        say(f"interrupted{hint}")
        status = settings.INTERRUPTED
    except RunRefused:
        raise
    except CloudError as error:
        say(f"error: {error.message}{hint}")
        status = settings.ENDED
    except BrokenPipeError:
        sys.stdout = None  # its reader has closed it, so a flush at exit would fail
        status = settings.ENDED
    if not arguments.dry_run:
        for line in summary(metrics, stopwatch.elapsed()).splitlines():
            say(line)
        if arguments.metrics is not None:
            _write_metrics(arguments.metrics, metrics)
    return status


async def _run(arguments: argparse.Namespace, metrics: RunMetrics, stopwatch: Stopwatch) -> int:
    name = await model_name(arguments)
    planned = await plan(settings.make_run(arguments, name))
    check_libraries(planned)
    check_objects(arguments, (each.info.key for each in planned.objects if each.failure is None))
    if arguments.dry_run:
        print(_described(planned))
        return 0
    async with open_model(arguments, name, metrics) as (infer, weigh, limits):
        planned = replace(planned, run=replace(planned.run, weigh=weigh, limits=limits))
        stopwatch.start()
        shown = arguments.progress == "on" or (arguments.progress == "auto" and sys.stderr.isatty())
        async with Progress(metrics, _total(planned), sys.stderr, shown):
            if planned.output is not None:
                return await write(planned, infer, metrics, say)
            return await _print(planned, infer, metrics)


async def model_name(arguments: argparse.Namespace) -> str:
    """Returns the handler or ``--model``. The default is the only model of ``--url`` or, without ``--url``, the
    embedded model.
    """
    if arguments.handler is not None:
        return str(arguments.handler)
    if arguments.url is None:
        return str(arguments.model or EMBEDDED)
    return str(arguments.model or await only_model(arguments.url, arguments.api, settings.api_key()))


class OpenedModel(NamedTuple):
    """A function that infers a batch, a function that returns a row's weight, and the limits of the stages."""

    infer: Infer
    weigh: Weigh
    limits: PipelineLimits


@asynccontextmanager
async def open_model(arguments: argparse.Namespace, name: str, metrics: RunMetrics) -> AsyncIterator[OpenedModel]:
    """Opens the server at ``--url``, or starts a server for the model or handler, which ends after the ``async with``
    block.

    Raises RunRefused, or LoadInterrupted if the task is cancelled during the load.
    """
    if arguments.url is not None:
        async with _asked(settings.make_endpoint(arguments, name), metrics) as backend:
            yield OpenedModel(backend, lambda row: row.size, settings.make_limits(arguments))
        return
    say(f"loading {name}")
    serve = _serve_handler if arguments.handler is not None else _serve_model
    async with serve(arguments, name, metrics) as model:
        yield model


@asynccontextmanager
async def _asked(endpoint: ServerEndpoint, metrics: RunMetrics) -> AsyncIterator[Backend]:
    backend = await open_backend(endpoint)
    try:
        yield backend
    finally:
        metrics.retries += backend.retries
        await backend.aclose()


@asynccontextmanager
async def _serve_model(arguments: argparse.Namespace, name: str, metrics: RunMetrics) -> AsyncIterator[OpenedModel]:
    from mlserver_torch_stream.settings import parse_settings

    limits = settings.make_limits(arguments)
    # The engine's queue must have room for all rows that the stages submit.
    extra = {"max_queued_requests": max(256, limits.batch_rows * limits.batches), **arguments.extra}
    try:
        source = parse_settings(name, extra).source.name
        async with child_server("TorchStreamRuntime", name, extra, metrics) as child:
            endpoint = ServerEndpoint(
                *(child.url, NAME),
                rows=settings.make_row_request(arguments, name, source),
                batches=True,
                concurrency=limits.batches + 1,
                key=child.key,
                timeout=None,
                name=settings.shown_name(arguments) or source,
                retry=_CHILD_RETRY,
                ended=child.ended,
            )
            async with _asked(endpoint, metrics) as backend:
                assert isinstance(backend, BatchBackend)
                weigh: Weigh = backend.tokens if arguments.batch_tokens else lambda row: row.size
                yield OpenedModel(backend, weigh, limits)
    except (SettingsError, LoadRefused) as error:
        raise RunRefused(f"--model: {str(error).removeprefix('parameters.uri: ')}") from None


@asynccontextmanager
async def _serve_handler(arguments: argparse.Namespace, name: str, metrics: RunMetrics) -> AsyncIterator[OpenedModel]:
    size = {} if arguments.batch_rows is None else {"batchSize": arguments.batch_rows}
    extra = {**arguments.extra, **_BATCHED_BY_THE_RUN, **size}
    try:
        async with child_server("TorchServeRuntime", name, extra, metrics) as child:
            objects = settings.object_request(arguments)
            endpoint = ServerEndpoint(
                *(child.url, NAME),
                objects=objects,
                batches=True,
                key=child.key,
                timeout=None,
                retry=_CHILD_RETRY,
                ended=child.ended,
            )
            async with _asked(endpoint, metrics) as backend:
                assert isinstance(backend, BatchBackend)
                if arguments.sequences:
                    most = await backend.most_sequences()
                    limits = settings.make_limits(arguments, batches=most)
                    limits = replace(limits, batch_rows=1, batches=min(limits.batches, most))
                else:
                    batch_rows, workers = await backend.workers()
                    limits = settings.make_limits(arguments, batch_rows, workers + _AHEAD)
                yield OpenedModel(backend, lambda row: row.size, limits)
    except LoadRefused as error:
        raise RunRefused(_as_options(str(error))) from None


def _as_options(message: str) -> str:
    """Replaces the names of MLServer's settings in a loader's message by the command's options that set them."""
    for setting, option in (
        ("parameters.uri", "--handler"),
        ("parameters.extra.", "--extra: "),
        ("parameters.extra", "--extra"),
    ):
        if message.startswith(setting):
            return option + message.removeprefix(setting)
    return f"--handler: {message}"


def check_objects(arguments: argparse.Namespace, keys: Iterable[str]) -> None:
    """Raises RunRefused if the model cannot process an object; the message names the first such object."""
    if settings.hands_objects(arguments):
        return
    row_request = settings.make_row_request(arguments)
    given = None if arguments.kind is None else Kind(arguments.kind)
    archives = arguments.command == "run"
    for key in keys:
        if archives and is_archive(key):
            continue
        kind = kind_of(key, given)
        form = closed_format(key, kind)
        if form is not None:
            raise RunRefused(
                f"--input: contains {key}, which is {form}, a format that is not supported; convert its rows to "
                "JSONL, of any size, or exclude the object with --glob"
            )
        if not kind.many and not row_request.takes(kind):
            raise RunRefused(
                f"--input: contains {key}, of kind {kind.value}, which this model does not accept; "
                "exclude the object with --glob, or choose with --as how objects are read"
            )


def check_libraries(planned: RunPlan) -> None:
    """Raises RunRefused if an object is in the format zstd or Parquet and the library for it is missing."""
    for each in planned.objects:
        if planned.run.kind_of(each.info.key) is Kind.PARQUET:
            try:
                parquet_library()
            except RunRefused as error:
                raise RunRefused(f"--input: contains {each.info.key}, which {error.message}") from None
        if compression_of(each.info.key, planned.run.kind_of(each.info.key)) == "zstd":
            try:
                decompressor("zstd")
            except Damaged as error:
                raise RunRefused(f"--input: contains {each.info.key}, which {error}") from None


async def _print(planned: RunPlan, infer: Infer, metrics: RunMetrics) -> int:
    """Prints the results to stdout in order, and returns the number of failed rows."""
    async with aclosing(results(planned, infer, metrics)) as found:
        async for result in found:
            try:
                sys.stdout.buffer.write(result.encode(planned.identity))
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                raise StorageFull(f"stdout: {error.strerror or error}") from None
    return metrics.failed


def _total(planned: RunPlan) -> Total:
    """Returns the bytes and rows that this worker still has to read."""
    source, run, done = planned.objects, planned.run, planned.done
    failed_before = sum(count for number, count in done.failures.items() if run.owns(number))
    if run.retry_failed and done.complete:
        return Total(0, failed_before)
    if done.cursor.key is not None:
        # ``Source`` refuses a cursor whose object is not in the run.
        first = next((index for index, each in enumerate(source) if each.info.key == done.cursor.key), 0)
        source = source[first:]
    kinds = {each.info.key: run.kind_of(each.info.key) for each in planned.objects}
    zipped = any(
        compression_of(key, kinds[key]) or kinds[key] is Kind.ARCHIVE for key in (each.info.key for each in source)
    )
    whole = not any(kind.many for kind in kinds.values())
    rows = None
    if whole:
        count = sum(map(run.rows_of, planned.objects))
        indexes = range(done.cursor.index, count if run.limit is None else min(run.limit, count))
        numbers = [index // run.part_rows for index in indexes]
        rows = sum(run.owns(number) and number not in done.parts for number in numbers)
        rows += failed_before if run.retry_failed else 0
    return Total(None if zipped or run.limit is not None else sum(each.info.size for each in source) // run.lanes, rows)


def _described(planned: RunPlan) -> str:
    run, objects = planned.run, planned.objects
    kinds: dict[str, int] = {}
    for each in objects:
        kind = run.kind_of(each.info.key).value
        kinds[kind] = kinds.get(kind, 0) + 1
    nbytes = sum(each.info.size for each in objects)
    lines = [
        f"input: {len(objects)} objects, {nbytes} bytes in {run.input or run.manifest}",
        "kinds: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())),
        f"first: {', '.join(each.info.key for each in objects[:5])}",
        f"model: {json.dumps(run.model, ensure_ascii=False)}",
    ]
    whole = [each for each in objects if not run.kind_of(each.info.key).many]
    large = [each.info.key for each in whole if run.chunking.refuses(each.info.size)]
    if large:
        most = f"over {format_bytes(run.chunking.whole_bytes)}, each an error row"
        lines.append(f"too large: {len(large)} {most}: {', '.join(large[:5])}")
    if run.chunking.chunk_bytes is not None:
        count = sum(run.chunking.count(each.info.size) for each in whole if each.failure is None)
        lines.append(f"chunks: {count} of at most {format_bytes(run.chunking.chunk_bytes)}")
    missing = [each.info.key for each in objects if each.failure is not None]
    if missing:
        lines.append(f"cannot be read: {len(missing)}, each an error row: {', '.join(missing[:5])}")
    if planned.output is None:
        lines.append("output: stdout")
    else:
        there = f"{len(planned.done.parts)} parts exist already" if planned.done.parts else "no parts yet"
        if planned.done.failed:
            there += f" with {planned.done.failed} failed rows" + (" to try again" if run.retry_failed else "")
        lines.append(f"output: {planned.output.url}, parts of {run.part_rows} rows, {there}")
    return "\n".join(map(log_text, lines))


def _write_metrics(path: str, metrics: RunMetrics) -> None:
    try:
        Path(path).write_text(json.dumps(metrics.as_dict(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        say(f"error: --metrics: {path}: {error.strerror or error}")


def say(text: str) -> None:
    """Prints a text to stderr in one line, without control characters."""
    print(log_text(text), file=sys.stderr, flush=True)
