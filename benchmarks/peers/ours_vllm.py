"""This package's server over the vLLM of the peer ``vllm``, asked on the same path: what the server costs.

Both have the same environment of vLLM, the same cache of 4 GiB and no prefix cache.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.peers.vllm_cpu import VllmCpu
from benchmarks.servers import Live, Ours


@dataclass(frozen=True)
class OursVllm(VllmCpu):
    name: str = "mlserver-torch-stream with vllm-cpu"

    def prepare(self) -> None:
        """Puts tcmalloc where this package looks for it, and preloads it."""
        if (malloc := self._malloc()) is not None:
            shutil.copy(malloc, self.python.parent.parent / "lib")

    @contextmanager
    def start(self, folder: Path) -> Iterator[Live]:
        vllm = {"enable_prefix_caching": False}
        extra = {"vllm": vllm, "vllm_python": str(self.python), "dtype": "bfloat16", "kv_cache_memory": "4GiB"}
        with Ours(str(self.model), extra).start(folder) as live:
            yield replace(live, endpoints={"rest": live.endpoints["openai"]})
