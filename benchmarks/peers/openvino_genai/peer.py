"""OpenVINO GenAI's continuous batching behind the small server in ``front.py``, as the library has no server.

Installs and starts it, and exports the model with optimum-intel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.endpoints import OpenAISpelling, Spelling
from benchmarks.peers.peer import TORCH, Peer

_CACHE_GIB = 4


@dataclass(frozen=True)
class OpenVinoGenAI(Peer):
    name: str = "OpenVINO GenAI"
    reads_gguf: bool = True
    distributions: Sequence[str] = ("openvino-genai", "openvino", "optimum-intel", "nncf", "tokenizers")

    def make(self) -> None:
        self.make_venv()
        self.install_torch()
        libraries = ["openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"]
        # torch is named again, because the newest torchvision would replace it with the newest one for GPUs.
        self.pip("install", "--progress-bar", "off", *libraries, TORCH)
        self.pip("uninstall", "--yes", "torchvision")  # it does not match a CPU build of torch

    def prepare(self) -> None:
        if self.weights is None and not self._exported.is_dir():
            partial = self._exported.with_name(f"{self._exported.name}.partial")
            export = ["export", "openvino", "--task", "text-generation-with-past", "--weight-format", "fp32"]
            self.run([str(self.python.with_name("optimum-cli")), *export, "--model", str(self.model), str(partial)])
            partial.rename(self._exported)

    def command(self, folder: Path, port: int) -> Sequence[str]:
        front = str(Path(__file__).with_name("front.py"))
        served = [str(self.weights or self._exported), str(self.model / "tokenizer.json")]
        return [str(self.python), front, *served, str(port), str(_CACHE_GIB)]

    @property
    def spelling(self) -> Spelling:
        return OpenAISpelling("bench")

    @property
    def _exported(self) -> Path:
        return self.home / f"{self.model.name}-exported"
