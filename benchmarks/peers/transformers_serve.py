"""``transformers serve``, plain and with its continuous batching.

Knows how it is installed and started; both share one environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.http_endpoint import Spelling
from benchmarks.peers.peer import Peer
from benchmarks.spellings import GenerationConfigSpelling

# Its own default takes 14 GB for a cache.
_BATCHING = ("--continuous-batching", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "512")


@dataclass(frozen=True)
class TransformersServe(Peer):
    name: str = "transformers serve"
    one_at_a_time: bool = True
    distributions: Sequence[str] = ("transformers", "torch")
    switches: Sequence[str] = ()

    def make(self) -> None:
        self.make_venv()
        self.install_torch()
        self.pip("install", "--progress-bar", "off", "transformers[serving]==5.23.0", "accelerate>=1.10")

    def command(self, folder: Path, port: int) -> Sequence[str]:
        where = ["--host", "127.0.0.1", "--port", str(port)]
        fixed = ["--device", "cpu", "--dtype", "bfloat16", *self.switches, *where]
        return [str(self.python.with_name("transformers")), "serve", str(self.model), *fixed]

    @property
    def spelling(self) -> Spelling:
        return GenerationConfigSpelling(str(self.model))


@dataclass(frozen=True)
class TransformersBatching(TransformersServe):
    name: str = "transformers serve, continuous batching"
    one_at_a_time: bool = False
    switches: Sequence[str] = _BATCHING
