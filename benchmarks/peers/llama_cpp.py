"""llama.cpp's own server, built for this machine from the sources that ``llama-cpp-python`` contains.

Builds and starts it, and makes GGUF files of the model with its converter.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.endpoints import OpenAISpelling, Spelling
from benchmarks.peers.peer import Peer, PeerUnavailable

_SOURCE = "llama-cpp-python==0.3.36"
_VENDORED = "llama_cpp_python-*/vendor/llama.cpp"
_OFF = ("LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "BUILD_SHARED_LIBS")
# Made by llama-quantize, not by the converter.
_QUANTISED = {"q4_0": "Q4_0", "q4_k": "Q4_K_S", "q4_k_m": "Q4_K_M", "q6_k": "Q6_K"}
_SLOT_CONTEXT = 2304  # tokens: the longest prompt of the default cases, and its answer


@dataclass(frozen=True)
class LlamaCpp(Peer):
    name: str = "llama.cpp server"
    reads_gguf: bool = True

    def make(self) -> None:
        for tool in ("cmake", "c++"):
            if shutil.which(tool) is None:
                raise PeerUnavailable(f"{tool}, which builds it, is not installed")
        self.make_venv()
        if not list(self.home.glob(_VENDORED)):
            self.pip("download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(self.home), _SOURCE)
            for archive in self.home.glob("*.tar.gz"):
                with tarfile.open(archive) as packed:
                    packed.extractall(self.home, filter="data")
        switches = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *(f"-D{name}=OFF" for name in _OFF)]
        self.run(["cmake", "-S", str(self._source), "-B", str(self._build), *switches])
        jobs = str(len(os.sched_getaffinity(0)))
        self.run(
            ["cmake", "--build", str(self._build), "--target", "llama-server", "llama-quantize", "--parallel", jobs]
        )
        self.install_torch()
        self.pip("install", "--progress-bar", "off", "transformers==5.23.0", "sentencepiece", "protobuf")
        self.pip("install", "--progress-bar", "off", str(self._source / "gguf-py"))

    def versions(self) -> dict[str, str]:
        name, _, version = _SOURCE.partition("==")
        return {name: version}

    def command(self, folder: Path, port: int) -> Sequence[str]:
        threads = str(len(os.sched_getaffinity(0)))
        fixed = ["-t", threads, "-tb", threads, "--no-kv-unified"]
        slots = ["-np", str(self.streams), "-c", str(self.streams * _SLOT_CONTEXT)]
        where = ["--host", "127.0.0.1", "--port", str(port)]
        weights = ["-m", str(self.weights or self._converted("bf16"))]
        return [str(self._build / "bin" / "llama-server"), *weights, *fixed, *slots, *where]

    @property
    def spelling(self) -> Spelling:
        return OpenAISpelling("bench", {"ignore_eos": True, "cache_prompt": False})

    @property
    def _source(self) -> Path:
        for found in sorted(self.home.glob(_VENDORED)):
            return found
        raise PeerUnavailable(f"the sources of {_SOURCE} have no folder vendor/llama.cpp")

    @property
    def _build(self) -> Path:
        return self.home / "build"

    def prepare(self) -> None:
        if self.weights is None:
            self.convert("bf16")

    def convert(self, kind: str) -> Path:
        """Returns a GGUF file in a format of ``shapes.BITS``. Raises PeerUnavailable if it is not made."""
        made = self._converted(kind)
        if not made.is_file():
            partial = made.with_suffix(".partial")
            if kind in _QUANTISED:
                quantise = str(self._build / "bin" / "llama-quantize")
                self.run([quantise, str(self.convert("bf16")), str(partial), _QUANTISED[kind]])
            else:
                script = str(self._source / "convert_hf_to_gguf.py")
                self.run([str(self.python), script, str(self.model), "--outtype", kind, "--outfile", str(partial)])
            partial.rename(made)
        return made

    def _converted(self, kind: str) -> Path:
        return self.home / f"{self.model.name}-{kind}.gguf"
