"""TorchServe 0.12 in its own environment, and this package's server, with the same model store and configuration.

Does not measure anything. Uses the machine's Java.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.answers import Ask
from benchmarks.endpoints import HttpEndpoint
from benchmarks.peers.peer import Installed, PeerUnavailable
from benchmarks.process import free_ports, running
from benchmarks.servers import OURS, Live, Ours, clean_environment, wait_until_ready

MODEL = "my_tc"
HANDLERS = Path(__file__).parent / "handlers"
_HOST = "http://127.0.0.1"


@dataclass(frozen=True)
class TorchServe(Installed):
    name: str = "TorchServe"
    distributions: Sequence[str] = ("torchserve", "torch", "transformers")

    def make(self) -> None:
        if shutil.which("java") is None:
            raise PeerUnavailable("java, version 17, is not installed")
        self.make_venv()
        self.install_torch()
        versions = ("torchserve==0.12.0", "transformers==5.23.0", "pyyaml", "setuptools<81")
        self.pip("install", "--progress-bar", "off", *versions)

    def command(self, options: Sequence[str]) -> Sequence[str]:
        """``options`` are those of the ``torchserve`` command."""
        return [str(self.python), "-m", "ts.model_server", *options]

    def environment(self) -> Mapping[str, str]:
        return {"PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"}  # its workers are `python`


@dataclass(frozen=True)
class OurTorchServe:
    """``mlserver-torch-stream torchserve``."""

    name: str = OURS

    def versions(self) -> dict[str, str]:
        return Ours("").versions()

    def command(self, options: Sequence[str]) -> Sequence[str]:
        return [sys.executable, "-m", "mlserver_torch_stream.cli", "torchserve", *options]

    def environment(self) -> Mapping[str, str]:
        return {"MLSERVER_MODEL_EXTRA": json.dumps({"ts": "shim"})}


PredictionServer = TorchServe | OurTorchServe  # of TorchServe's paths


def write_mar(path: Path, handler: str, values: Mapping[str, Any]) -> None:
    """Writes the archive of a file of ``handlers``; ``values`` are the key ``handler`` of its model-config.yaml."""
    model = {"modelName": MODEL, "modelVersion": "1.0", "handler": "handler.py", "configFile": "model-config.yaml"}
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(HANDLERS / f"{handler}.py", "handler.py")
        archive.writestr("model-config.yaml", json.dumps({"handler": dict(values)}))  # JSON is YAML
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))


@contextmanager
def serving(
    server: PredictionServer,
    folder: Path,
    handler: str,
    config: Mapping[str, Any],
    values: Mapping[str, Any] = {},
    **properties: object,
) -> Iterator[tuple[str, int]]:
    """Yields the URL of the model's predictions and the server's pid, once all ``minWorkers`` workers are ready.

    ``config`` is the model's entry in config.properties. ``folder`` must be empty. Raises StartFailed if it ends first.
    """
    port, management, metrics, *grpc = free_ports(5)
    write_mar(folder / "store" / f"{MODEL}.mar", handler, values)
    described = {MODEL: {"1.0": {"defaultVersion": True, "marName": f"{MODEL}.mar", **config}}}
    lines: dict[str, object] = {
        "inference_address": f"{_HOST}:{port}",
        "management_address": f"{_HOST}:{management}",
        "metrics_address": f"{_HOST}:{metrics}",
        "grpc_inference_port": grpc[0],
        "grpc_management_port": grpc[1],
        "load_models": f"{MODEL}.mar",
        "models": json.dumps(described),
        **properties,
    }
    configuration = folder / "config.properties"
    configuration.write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
    options = ["--start", "--foreground", "--ncs", "--disable-token-auth", "--model-store", str(folder / "store")]
    command = server.command([*options, "--ts-config", str(configuration)])
    # TorchServe starts only once with one folder for temporary files, and its workers' sockets are there.
    places = dict.fromkeys(("LOG_LOCATION", "TEMP", "TMPDIR"), str(folder))
    environment = {**clean_environment(), "HF_HUB_OFFLINE": "1", **places, **server.environment()}
    log = folder / "server.log"
    with running(command, environment, log, folder) as process:
        wait_until_ready(process, lambda: _ready(f"{_HOST}:{management}/models/{MODEL}", config["minWorkers"]), log)
        yield f"{_HOST}:{port}/predictions/{MODEL}", process.pid


# What a handler does: the ``batchSize``, and whether answers are streamed. None: it answers at once (handlers/echo.py).
HANDLED: Mapping[str, tuple[int, bool] | None] = {
    **{f"h{batch}-{how}": (batch, how == "stream") for batch in (1, 16) for how in ("stream", "whole")},
    "requests": None,
}


@dataclass(frozen=True)
class Tokens:
    """How ``handlers/tokens.py`` is asked, and what its events mean."""

    stream: bool
    path: str = f"/predictions/{MODEL}"

    def body(self, ask: Ask) -> Mapping[str, Any]:
        return {"prompt": ask.prompt, "max_new_tokens": ask.new_tokens, "stream": self.stream}

    def text(self, event: Mapping[str, Any]) -> str:
        return "".join(f"{token} " for token in event["tokens"])

    def usage(self, event: Mapping[str, Any]) -> tuple[int, int]:
        return event["prompt_tokens"], event["new_tokens"]


@dataclass(frozen=True)
class HandlerServer:
    """A server with one worker that runs a handler, as ``kind`` of ``HANDLED`` says. ``model`` is the tokens' model."""

    server: PredictionServer
    kind: str
    model: Path

    @property
    def name(self) -> str:
        return self.server.name

    def versions(self) -> dict[str, str]:
        return self.server.versions()

    @contextmanager
    def start(self, folder: Path) -> Iterator[Live]:
        batch, stream = HANDLED[self.kind] or (1, False)
        config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": batch, "maxBatchDelay": 50, "responseTimeout": 600}
        handler, values = ("echo", {}) if HANDLED[self.kind] is None else ("tokens", {"model_path": str(self.model)})
        began = time.perf_counter()
        with serving(self.server, folder, handler, config, values, job_queue_size=1000) as (url, pid):
            port = httpx.URL(url).port or 0
            yield Live(pid, port, time.perf_counter() - began, {"rest": HttpEndpoint(port, Tokens(stream))})


def _ready(url: str, workers: int) -> bool:
    with suppress(httpx.TransportError, ValueError, LookupError):  # not listening yet
        return [each["status"] for each in httpx.get(url, timeout=10).json()[0]["workers"]] == ["READY"] * workers
    return False
