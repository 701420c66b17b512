"""TorchServe 0.12 in an environment of its own, and the archive that both servers are given.

Knows nothing of measuring. Java is the machine's own.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.peer import Installed, PeerUnavailable
from benchmarks.process import free_ports, running
from benchmarks.servers import clean_environment, wait_until_ready

MODEL = "bench"
TOKENS, ECHO = (Path(__file__).parent / name for name in ("handler.py", "echo_handler.py"))


def write_mar(path: Path, config: Mapping[str, object], handler: Path = TOKENS) -> Path:
    """The archive, with nothing but the handler and its settings in it."""
    model = {"modelName": MODEL, "modelVersion": "1.0", "handler": "handler.py", "configFile": "model-config.yaml"}
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(handler, "handler.py")
        archive.writestr("model-config.yaml", json.dumps(config))  # JSON is YAML
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
    return path


@dataclass(frozen=True)
class TorchServe(Installed):
    """Answers in plain chunks, not in events: benchmarks/torchserve.py asks it in its own way."""

    distributions: Sequence[str] = ("torchserve", "torch", "transformers")

    def make(self) -> None:
        if shutil.which("java") is None:
            raise PeerUnavailable("there is no java, of version 17")
        self.make_venv()
        self.install_torch()
        versions = ("torchserve==0.12.0", "transformers==5.23.0", "pyyaml", "setuptools<81")
        self.pip("install", "--progress-bar", "off", *versions)

    def _command(self, folder: Path) -> Sequence[str]:
        return [
            str(self.python), "-m", "ts.model_server", "--start", "--foreground", "--ncs", "--disable-token-auth",
            "--model-store", str(folder / "store"), "--models", f"{MODEL}={MODEL}.mar",
            "--ts-config", str(folder / "ts.properties"),
        ]  # fmt: skip

    @contextmanager
    def serving(self, folder: Path, config: Mapping[str, object], handler: Path = TOKENS) -> Iterator[tuple[int, int]]:
        """Its port and pid, once the model answers pings."""
        port, *others = free_ports(5)
        (folder / "store").mkdir(parents=True)
        write_mar(folder / "store" / f"{MODEL}.mar", config, handler)
        names = ("management_address", "metrics_address")
        lines = [f"inference_address=http://127.0.0.1:{port}"]
        lines += [f"{name}=http://127.0.0.1:{each}" for name, each in zip(names, others, strict=False)]
        lines += [f"grpc_inference_port={others[2]}", f"grpc_management_port={others[3]}"]
        (folder / "ts.properties").write_text("\n".join([*lines, "enable_envvars_config=false", ""]))
        binaries = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**clean_environment(), "HF_HUB_OFFLINE": "1", "PATH": binaries, "LOG_LOCATION": str(folder)}
        log = folder / "server.log"
        with running(self._command(folder), environment, log, folder) as process:
            wait_until_ready(process, port, "/ping", log)
            yield port, process.pid
