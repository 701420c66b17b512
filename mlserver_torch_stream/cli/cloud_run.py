"""Runs a job that was typed: loads or asks for the model, shows progress, writes parts or lines, says how it went.

Knows the stages and the terminal; what the options are is ``cloud``'s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlserver_torch_stream.cli import cloud as options
from mlserver_torch_stream.cli.infer_engine import EMBEDDED, EngineInfer
from mlserver_torch_stream.cli.infer_http import HttpInfer, only_model
from mlserver_torch_stream.cli.interruptible import Interrupted, run_to_end
from mlserver_torch_stream.cli.progress import Progress, Total, summary
from mlserver_torch_stream.cloud.cloud_errors import CloudError, RunRefused, StorageFull
from mlserver_torch_stream.cloud.naming import closed_format, is_gzip, kind_of
from mlserver_torch_stream.cloud.rows import Infer, Kind, Row
from mlserver_torch_stream.cloud.run import RunPlan, plan, results, write
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.source import MOST_OBJECT_BYTES, too_large

_AGAIN = "what is written is kept; the same command goes on from there"


class Stopwatch:
    """Seconds since the model was there: loading it is a figure of its own."""

    def __init__(self) -> None:
        self._began: float | None = None

    def start(self) -> None:
        self._began = time.monotonic()

    def elapsed(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began


def run(arguments: argparse.Namespace, meter: RunMetrics | None = None) -> int:
    """The exit status. Raises Refused where the run may not start, LeftBehind where it ended while a model loaded."""
    meter = meter or RunMetrics()
    watch = Stopwatch()
    try:
        failed = run_to_end(_run(arguments, meter, watch))
        status = options.ROWS_FAILED if failed else options.OK
    except Interrupted:
        _say(f"interrupted{_hint(arguments)}")
        status = options.INTERRUPTED
    except RunRefused:
        raise
    except CloudError as error:
        _say(f"error: {error.message}{_hint(arguments)}")
        status = options.ENDED
    except BrokenPipeError:
        sys.stdout = None  # nobody reads: nothing is left to flush
        status = options.ENDED
    if not arguments.dry_run:
        _say(summary(meter, watch.elapsed()))
        if arguments.metrics is not None:
            write_metrics(arguments.metrics, meter)
    return status


async def _run(arguments: argparse.Namespace, meter: RunMetrics, watch: Stopwatch) -> int:
    name = await model_name(arguments)
    planned = await plan(options.make_job(arguments, name))
    try:
        check_objects(arguments, (each.info.key for each in planned.objects))
        if arguments.dry_run:
            print(_described(planned))
            return 0
        async with model(arguments, name, meter) as (infer, weigh):
            planned = replace(planned, job=replace(planned.job, weigh=weigh))
            watch.start()
            shown = arguments.progress == "on" or (arguments.progress == "auto" and sys.stderr.isatty())
            async with Progress(meter, _total(planned), sys.stderr, shown):
                if planned.output is not None:
                    return await write(planned, infer, meter, _say)
                return await _print(planned, infer, meter)
    finally:
        await planned.aclose()


async def model_name(arguments: argparse.Namespace) -> str:
    if arguments.url is None:
        return str(arguments.model or EMBEDDED)
    return str(arguments.model or await only_model(arguments.url, arguments.api, options.api_key()))


@asynccontextmanager
async def model(
    arguments: argparse.Namespace, name: str, meter: RunMetrics
) -> AsyncIterator[tuple[Infer, Callable[[Row], int]]]:
    """The callable that infers a batch, and what a row weighs in it."""
    asking = options.make_asking(arguments, name)
    shown = options.shown_name(arguments)
    if arguments.url is not None:
        asked = HttpInfer(
            arguments.url.rstrip("/"),
            name,
            arguments.api,
            asking,
            arguments.concurrency,
            not arguments.unary,
            options.api_key(),
            arguments.timeout,
            shown,
        )
        try:
            yield asked, lambda row: row.size
        finally:
            meter.retries += asked.retries
            await asked.aclose()
        return
    limits = options.make_limits(arguments)
    _say(f"loading {name}")
    extra = _room_for(limits.batch_rows * limits.batches, arguments.extra)
    engine = await EngineInfer.load(name, extra, asking, meter, shown)
    try:
        yield engine, engine.tokens if arguments.batch_tokens else lambda row: row.size
    finally:
        await engine.aclose()


def _room_for(rows: int, extra: dict[str, Any]) -> dict[str, Any]:
    """The engine's queue holds what the stages may hand to it, unless it was told otherwise."""
    return {"max_queued_requests": max(256, rows), **extra}


def check_objects(arguments: argparse.Namespace, keys: Iterable[str]) -> None:
    """Raises Refused, which names the first one that the model cannot take."""
    asking = options.make_asking(arguments)
    given = None if arguments.kind is None else Kind(arguments.kind)
    for key in keys:
        kind = kind_of(key, given)
        form = closed_format(key, kind)
        if form is not None:
            raise RunRefused(
                f"--input: holds {key}, which is {form}: that is not looked into; write its rows as JSONL, of any "
                "size, or choose others with --glob"
            )
        if not asking.takes(kind):
            raise RunRefused(
                f"--input: holds {key}, of kind {kind.value}, which this model cannot take; "
                "choose others with --glob, or say with --as how to read them"
            )


async def _print(planned: RunPlan, infer: Infer, meter: RunMetrics) -> int:
    """Lines on stdout, each as soon as those before it are out."""
    async with aclosing(results(planned, infer, meter)) as found:
        async for result in found:
            try:
                sys.stdout.buffer.write(result.encode(planned.run))
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                raise StorageFull(f"stdout: {error.strerror or error}") from None
    return meter.failed


def _total(planned: RunPlan) -> Total:
    """What is ahead of this worker."""
    source, job, done = planned.objects, planned.job, planned.done
    again = sum(count for number, count in done.failures.items() if job.owns(number))
    if job.retry_failed and done.complete:
        return Total(0, again)
    if done.cursor.key is not None:
        # A cursor that is none of the run's objects is refused by the source.
        first = next((index for index, each in enumerate(source) if each.info.key == done.cursor.key), 0)
        source = source[first:]
    zipped = any(is_gzip(each.info.key, kind_of(each.info.key, job.kind)) for each in source)
    whole = all(kind_of(each.info.key, job.kind) is not Kind.JSONL for each in planned.objects)
    rows = None
    if whole:
        indexes = range(done.cursor.index, len(planned.objects))
        numbers = [index // job.part_rows for index in indexes]
        rows = sum(job.owns(number) and number not in done.parts for number in numbers)
        rows += again if job.retry_failed else 0
    return Total(None if zipped else sum(each.info.size for each in source) // job.lanes, rows)


def _described(planned: RunPlan) -> str:
    job, objects = planned.job, planned.objects
    kinds: dict[str, int] = {}
    for each in objects:
        kind = kind_of(each.info.key, job.kind).value
        kinds[kind] = kinds.get(kind, 0) + 1
    lines = [
        f"input: {len(objects)} objects, {sum(each.info.size for each in objects)} bytes in {job.input}",
        "kinds: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())),
        f"first: {', '.join(each.info.key for each in objects[:5])}",
        f"model: {json.dumps(job.model, ensure_ascii=False)}",
    ]
    large = [each.info.key for each in objects if too_large(kind_of(each.info.key, job.kind), each.info)]
    if large:
        most = f"over {MOST_OBJECT_BYTES // 2**20} MiB, each an error row"
        lines.append(f"too large: {len(large)} {most}: {', '.join(large[:5])}")
    missing = [each.info.key for each in objects if each.failure is not None]
    if missing:
        lines.append(f"missing: {len(missing)}: {', '.join(missing[:5])}")
    if planned.output is None:
        lines.append("output: stdout")
    else:
        there = f"{len(planned.done.parts)} parts there already" if planned.done.parts else "nothing there yet"
        if planned.done.failed:
            there += f" with {planned.done.failed} failed rows" + (" to try again" if job.retry_failed else "")
        lines.append(f"output: {planned.output.url}, parts of {job.part_rows} rows, {there}")
    return "\n".join(lines)


def write_metrics(path: str, meter: RunMetrics) -> None:
    try:
        Path(path).write_text(json.dumps(meter.figures(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        _say(f"error: --metrics: {path}: {error.strerror or error}")


def _hint(arguments: argparse.Namespace) -> str:
    return "" if arguments.output == options.STDOUT else f"; {_AGAIN}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
