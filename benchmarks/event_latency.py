"""How long it takes from an event over HTTP to a readable result, beyond the inference: ``cloud watch --listen``.

``python -m benchmarks.event_latency`` starts a watcher for each way in which a storage tells of a new object: S3's and
MinIO's webhooks, CloudEvents in both modes, SNS. The objects and the results are in a bucket: on SeaweedFS if its
program ``weed`` is on the PATH, else on moto. One event is sent at a time. A figure is the time from the begin of the
event's request to the end of the request that reads the whole result from the bucket, less the handler's time. The
watcher of SNS infers in its own process, at once, as its certificates come from this machine.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from benchmarks import machine
from benchmarks.figures import percentile
from tests.cloud.seaweedfs import s3_server
from tests.cloud.test_events import WAYS
from tests.cloud.test_listen import Sns, sns_host
from tests.server.harness import free_ports

_HANDLER = """
import time
from pathlib import Path

def handle(data, context):
    if data is None:
        return None
    began = time.monotonic()
    time.sleep({seconds})
    took = Path(__file__).parent / "took.new"
    took.write_text(str(time.monotonic() - began))
    took.rename(took.with_suffix(""))
    return ["ok"] * len(data)
"""
_START_S, _RESULT_S = 60.0, 30.0
_POLL_S = 0.001
_WARM = 5  # events that are not counted
_SNS = "sns"


class Bucket:
    """A bucket that asks for no key, over one connection."""

    def __init__(self, endpoint: str) -> None:
        self._connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=30)

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Raises RuntimeError if the answer is an error."""
        self._connection.request(method, f"/bucket{path}", body)
        response = self._connection.getresponse()
        found = response.read()
        if response.status >= 300:
            raise RuntimeError(f"{method} {path}: {response.status} {found[:300]!r}")
        return found

    def results(self, folder: str) -> list[str]:
        listed = ElementTree.fromstring(self.ask("GET", f"?list-type=2&prefix={quote(f'{folder}/result-', safe='')}"))
        return [each.text or "" for each in listed.iter() if each.tag.endswith("}Key") or each.tag == "Key"]


def _latency(bucket: Bucket, folder: str, port: int, event: tuple[Any, Mapping[str, str]], note: Path) -> float:
    """Seconds for one event. Its result is deleted, so that a listing has one result.

    The bucket is first asked for the result when the model has written ``note``, so that the questions do not slow the
    watcher down.
    """
    body, headers = event
    began = time.monotonic()
    sender = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    sender.request("POST", "/", json.dumps(body), {"Content-Type": "application/json", **headers})
    answer = sender.getresponse()
    if answer.status != 202:
        raise RuntimeError(f"the event was answered {answer.status}: {answer.read()[:300]!r}")
    while not (note.exists() and (found := bucket.results(folder))):
        if time.monotonic() - began > _RESULT_S:
            raise RuntimeError("there is no result")
        time.sleep(_POLL_S)
    result = json.loads(bucket.ask("GET", f"/{found[0]}"))
    ended = time.monotonic()
    sender.close()
    if result["error"] is not None:
        raise RuntimeError(f"the result is {result}")
    bucket.ask("DELETE", f"/{found[0]}")
    took = 0.0 if note.name == _SNS else float(note.read_text())
    note.unlink()
    return ended - began - took


@contextmanager
def _watching(command: Sequence[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + _START_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the watcher does not listen: {command}")
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def _listens(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status > 0
    except OSError:
        return False
    finally:
        connection.close()


def _command(way: str, port: int, storage: Mapping[str, str], sns: Sns, folder: Path) -> list[str]:
    if way == _SNS:
        authority, note = sns.authority.certificate, folder / _SNS
        given = ("bucket", json.dumps(storage), str(port), sns.url, str(authority), str(note))
        return [sys.executable, "-m", "tests.cloud.sns_watcher", *given]
    options = [word for name, value in storage.items() for word in ("--storage", f"{name}={value}")]
    where = ["--input", "s3://bucket/in", "--output", f"s3://bucket/{way}", "--listen", str(port), *options]
    model = ["--handler", str(folder / "handler.py"), "--extra", '{"ts": "shim"}']
    return [sys.executable, "-m", "mlserver_torch_stream.cli", "cloud", "watch", *where, *model]


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Milliseconds by way. Raises RuntimeError."""
    (folder / "s3").mkdir()
    (folder / "handler.py").write_text(_HANDLER.format(seconds=arguments.model_ms / 1000))
    figures = {}
    gc.freeze()  # a garbage collection of all that this client imports would take a part of the time of an event
    with s3_server(folder / "s3", "bucket") as storage, sns_host(folder) as sns:
        bucket = Bucket(storage["endpoint"])
        for way in arguments.ways.split(","):
            (port,) = free_ports(1)
            with _watching(_command(way, port, storage, sns, folder), port):
                note, found = folder / (_SNS if way == _SNS else "took"), []
                for number in range(_WARM + arguments.events):
                    key = f"{way}-{number}.txt"
                    bucket.ask("PUT", f"/in/{key}", key.encode())
                    found.append(_latency(bucket, way, port, _event(way, key, sns), note))
            found = sorted(found[_WARM:])
            shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
            figures[way] = {name: round(percentile(found, share) * 1000, 1) for name, share in shares.items()}
            print(json.dumps({"way": way, **figures[way]}), file=sys.stderr)
    return figures


def _event(way: str, key: str, sns: Sns) -> tuple[Any, Mapping[str, str]]:
    if way == _SNS:
        return sns.message(Message=json.dumps(WAYS["s3"]("bucket", key)[0])), {}
    return WAYS[way]("bucket", key)


def main(given: list[str] | None = None) -> int:
    """Prints the figures as one line of JSON. The status is 1 if a p99 is above ``--at-most-ms``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.event_latency", description=__doc__)
    parser.add_argument("--events", type=int, default=200, help="of each way")
    parser.add_argument("--ways", default=",".join((*WAYS, _SNS)))
    parser.add_argument("--model-ms", type=float, default=20.0, help="that the model takes for each object")
    parser.add_argument("--at-most-ms", type=float, default=50.0)
    arguments = parser.parse_args(given)
    described = machine.describe()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(arguments, Path(folder))
    print(json.dumps({**described, "events": arguments.events, "model_ms": arguments.model_ms, "ms": figures}))
    if (warning := machine.warning(described)) is not None:
        print(warning, file=sys.stderr)
    return int(any(each["p99"] > arguments.at_most_ms for each in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
