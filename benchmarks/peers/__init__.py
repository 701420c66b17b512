"""The servers with which ours is compared, by the names that ``--peers`` accepts."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.openvino_genai.peer import OpenVinoGenAI
from benchmarks.peers.peer import Peer
from benchmarks.peers.vllm_cpu import OursVllm, VllmCpu

FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlserver-torch-stream" / "peers"
# Name -> class, and the folder of its environment.
PEERS: dict[str, tuple[type[Peer], str]] = {
    "vllm": (VllmCpu, "vllm"),
    "ours-vllm": (OursVllm, "vllm"),
    "llama.cpp": (LlamaCpp, "llama.cpp"),
    "openvino": (OpenVinoGenAI, "openvino"),
}


def make_peer(name: str, folder: Path, model: Path, weights: Path | None = None) -> Peer:
    """Returns a peer that is not installed yet; its files are below ``folder``."""
    kind, home = PEERS[name]
    return kind(folder.resolve() / home, model, weights=weights)


def installed(names: str, folder: Path, model: Path) -> list[Peer]:
    """Returns the peers in a comma-separated list, ready to serve the model. Raises PeerUnavailable."""
    peers = [make_peer(name, folder, model) for name in names.split(",") if name]
    for peer in peers:
        peer.install()
        peer.prepare()
    return peers
