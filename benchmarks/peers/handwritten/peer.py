"""The runtime that a reader of MLServer's documentation would write: ``generate`` and a streamer, one at a time.

Knows how it is installed and started; the runtime itself is in ``runtime.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.http_endpoint import Spelling
from benchmarks.peers.peer import Peer
from benchmarks.process import free_ports
from benchmarks.servers import write_mlserver_folder
from benchmarks.spellings import V2Spelling

_MODEL = "handwritten"


@dataclass(frozen=True)
class Handwritten(Peer):
    name: str = "hand-written MLServer runtime"
    one_at_a_time: bool = True
    distributions: Sequence[str] = ("mlserver", "torch", "transformers")
    ready_path: str = f"/v2/models/{_MODEL}/ready"

    def make(self) -> None:
        self.make_venv()
        self.install_torch()
        self.pip("install", "--progress-bar", "off", "mlserver==1.7.1", "transformers==5.23.0", "uvloop<0.22")

    def command(self, folder: Path, port: int) -> Sequence[str]:
        grpc_port, metrics_port = free_ports(2)
        ports = {"http_port": port, "grpc_port": grpc_port, "metrics_port": metrics_port, "host": "127.0.0.1"}
        write_mlserver_folder(folder, _MODEL, "runtime.Runtime", {"uri": str(self.model)}, ports)
        return [str(self.python.with_name("mlserver")), "start", str(folder)]

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": str(Path(__file__).parent)}

    @property
    def spelling(self) -> Spelling:
        return V2Spelling(_MODEL)
