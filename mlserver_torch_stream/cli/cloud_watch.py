"""Runs ``cloud watch``. It gets new objects from a queue, from events over HTTP or by polling, or it gets rows from
Kafka.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, TypedDict

from mlserver_torch_stream.cli import cloud_settings as settings
from mlserver_torch_stream.cli.argument_types import key_in_file
from mlserver_torch_stream.cli.cloud_options import TABLE_DEFAULTS
from mlserver_torch_stream.cli.cloud_run import OpenedModel, Stopwatch, finish, model_name, open_model, say
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.lease import WriterLease
from mlserver_torch_stream.cloud.listen import EventListener
from mlserver_torch_stream.cloud.naming import glob_pattern, lies_within
from mlserver_torch_stream.cloud.notifications import InputPlace
from mlserver_torch_stream.cloud.prefetch import PrefetchedRange
from mlserver_torch_stream.cloud.rows import InUse, RunRefused
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.store import Store, storage_account
from mlserver_torch_stream.cloud.watch import Poller, Watcher

if TYPE_CHECKING:
    from mlserver_torch_stream.cloud.sns import SnsVerifier
    from mlserver_torch_stream.cloud.sqs import Queue


def watch(arguments: argparse.Namespace) -> int:
    """Runs ``cloud watch`` and returns its exit status.

    Raises RunRefused, or LoadInterrupted if a signal arrives while the model is loading.
    """
    _check(arguments)
    return finish(arguments, _watch, "; objects and records without a result are delivered again")


def _check(arguments: argparse.Namespace) -> None:
    if (arguments.input is None) == (arguments.kafka is None):
        raise RunRefused("--input: give either --input or --kafka, not both")
    if arguments.kafka is not None:
        for name in ("topic", "group"):
            if getattr(arguments, name) is None:
                raise RunRefused(f"--{name}: is required with --kafka")
        for name in ("queue", "listen", "glob", "kind"):
            if getattr(arguments, name) is not None:
                raise RunRefused(
                    f"--{'as' if name == 'kind' else name}: applies only to objects, not to records of --kafka"
                )
        for name, default in TABLE_DEFAULTS.items():
            if getattr(arguments, name) != default:
                raise RunRefused(f"--{name}: applies only to objects, not to records of --kafka")
    else:
        settings.tables(arguments)  # refuses wrong options before a model is loaded
        for name in ("topic", "group", "dead_letter"):
            if getattr(arguments, name) is not None:
                raise RunRefused(f"--{name.replace('_', '-')}: applies only with --kafka")
        if arguments.queue is not None and not arguments.input.startswith("s3://"):
            raise RunRefused("--queue: SQS reports objects in s3:// only; without --queue, --input is polled")
        if arguments.queue is not None:
            _open_queue(arguments)  # refuses it before a model is loaded
        if lies_within(arguments.output, arguments.input):
            raise RunRefused("--output: is inside --input, so results would be read as input")
    _check_listen(arguments)


_EVENT_SCHEMES = ("s3://", "gs://", "az://")


def _check_listen(arguments: argparse.Namespace) -> None:
    if arguments.listen is None:
        for name in ("listen_key", "listen_tls", "sns_topic"):
            if getattr(arguments, name):
                raise RunRefused(f"--{name.replace('_', '-')}: applies only with --listen")
        return
    if arguments.queue is not None:
        raise RunRefused("--listen: cannot be combined with --queue, because only one of them can announce objects")
    if not arguments.input.startswith(_EVENT_SCHEMES):
        raise RunRefused(f"--listen: events name objects in {', '.join(_EVENT_SCHEMES)}; without it --input is polled")
    if arguments.listen_key is None and not _is_loopback(arguments.listen[0]):
        raise RunRefused("--listen-key: is required unless --listen is a loopback address: anyone could post events")
    _make_listener_parts(arguments)  # refuses them before a model is loaded


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _ListenerParts(TypedDict):
    key: str | None
    tls: ssl.SSLContext | None
    sns: SnsVerifier | None


def _make_listener_parts(arguments: argparse.Namespace) -> _ListenerParts:
    """Reads the key, the certificate and the topics of ``--listen``. Raises RunRefused if one cannot be used."""
    key, tls, sns = None, None, None
    if arguments.listen_key is not None:
        try:
            key = key_in_file(arguments.listen_key, "--listen-key")
        except ValueError as error:
            raise RunRefused(str(error)) from None
    if arguments.listen_tls is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            certificate, private_key = arguments.listen_tls
            tls.load_cert_chain(certificate, private_key, password="")  # None would ask for one on the terminal
        except (OSError, ValueError) as error:
            raise RunRefused(f"--listen-tls: {error}") from None
    if arguments.sns_topic:
        try:
            from mlserver_torch_stream.cloud.sns import SnsVerifier
        except ImportError:
            raise RunRefused(
                "--sns-topic: needs the extra [cloud]: pip install 'mlserver-torch-stream[cloud]'"
            ) from None
        sns = SnsVerifier(arguments.sns_topic)
    return {"key": key, "tls": tls, "sns": sns}


async def _watch(arguments: argparse.Namespace, metrics: RunMetrics, stopwatch: Stopwatch) -> int:
    storage = dict(arguments.storage)
    Store.open(arguments.output, storage, arguments.stall, make=False)  # reports a wrong --output before the load
    name = await model_name(arguments)
    async with open_model(arguments, name, metrics) as model:
        output = Store.open(arguments.output, storage, arguments.stall)
        stopwatch.start()
        say("watching")
        if arguments.kafka is not None:
            await _consume(arguments, name, output, model, metrics)
        else:
            await _objects(arguments, name, output, model, metrics)
    return metrics.failed


def make_watcher(
    arguments: argparse.Namespace, name: str, output: Store, model: OpenedModel, metrics: RunMetrics
) -> Watcher:
    """Returns the watcher of the objects below ``--input``. ``name`` is the model's name or location."""
    store = Store.open(arguments.input, dict(arguments.storage), arguments.stall)
    identity, kind = settings.identity(arguments, name), settings.kind_for_all(arguments)
    watcher = Watcher(
        *(store, output, model.infer, identity, kind, model.limits, Retry(arguments.tries)),
        metrics=metrics,
        report=say,
        created=settings.created(),
        chunking=settings.chunking(arguments),
        ahead=PrefetchedRange(arguments.prefetch, arguments.prefetch_bytes),
        weigh=model.weigh,
        tables=settings.tables(arguments),
        part_rows=arguments.part_rows,
    )
    if arguments.sequences:
        watcher.objects = min(watcher.objects, model.limits.batches)
    return watcher


async def _objects(
    arguments: argparse.Namespace, name: str, output: Store, model: OpenedModel, metrics: RunMetrics
) -> None:
    retry, store = Retry(arguments.tries), Store.open(arguments.input, dict(arguments.storage), arguments.stall)
    watcher = make_watcher(arguments, name, output, model, metrics)
    pattern = glob_pattern(arguments.glob or "**")
    if arguments.listen is not None:
        records = Store.open(f"{arguments.output.rstrip('/')}/events", dict(arguments.storage), arguments.stall)
        async with _turn(WriterLease(output, 1, 1, retry), arguments.poll) as lease:
            host, port = arguments.listen
            account = storage_account(dict(arguments.storage)) if arguments.input.startswith("az://") else ""
            place = InputPlace.of_url(arguments.input, pattern, account)
            parts = _make_listener_parts(arguments)
            listener = EventListener(host, port, place, records, retry, say, metrics, check=lease.require, **parts)
            try:
                await watcher.watch(listener.announcements(), arguments.limit)
            finally:
                if metrics.refused_events:
                    say(f"{metrics.refused_events} events were refused")
        return
    if arguments.queue is None:
        async with _turn(WriterLease(output, 1, 1, retry), arguments.poll) as lease:
            poller = Poller(store, output, pattern, arguments.poll, retry, lease.require)
            try:
                await watcher.watch(poller.announcements(), arguments.limit)
            finally:
                await poller.save()
        return
    queue = _open_queue(arguments)
    try:
        await watcher.watch(queue.announcements(), arguments.limit)
    finally:
        await queue.aclose()


def _open_queue(arguments: argparse.Namespace) -> Queue:
    """Connects to the SQS queue of ``--queue``. Raises RunRefused if the queue cannot be used."""
    try:
        from mlserver_torch_stream.cloud.sqs import Queue
    except ImportError:
        raise RunRefused("--queue: needs the extra [cloud]: pip install 'mlserver-torch-stream[cloud]'") from None
    place = InputPlace.of_url(arguments.input, glob_pattern(arguments.glob or "**"))
    return Queue(arguments.queue, place, Retry(arguments.tries), _report_foreign)


@asynccontextmanager
async def _turn(lease: WriterLease, every: float) -> AsyncIterator[WriterLease]:
    """Waits until no other command has the lease, because two commands that poll would both infer every object."""
    async with AsyncExitStack() as stack:
        standing_by = False
        while True:
            try:
                await stack.enter_async_context(lease)
                break
            except InUse as error:
                if not standing_by:
                    say(f"standing by: {error.message}")
                standing_by = True
                await asyncio.sleep(every)
        yield lease


async def _consume(
    arguments: argparse.Namespace, name: str, output: Store, model: OpenedModel, metrics: RunMetrics
) -> None:
    try:
        from mlserver_torch_stream.cloud.kafka import Topic
    except ImportError:
        raise RunRefused("--kafka: needs the extra [cloud]: pip install 'mlserver-torch-stream[cloud]'") from None
    topic = Topic(
        arguments.kafka,
        arguments.topic,
        arguments.group,
        output,
        model.infer,
        settings.identity(arguments, name),
        arguments.dead_letter,
        arguments.part_rows,
        limits=model.limits,
        weigh=model.weigh,
        retry=Retry(arguments.tries),
        metrics=metrics,
        created=settings.created(),
    )
    await topic.consume(arguments.limit)


def _report_foreign(message: str) -> None:
    say(f"a notification names no object below --input, and stays in the queue: {message}")
