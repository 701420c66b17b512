"""The servers that ours is compared with, by the names that ``--peers`` takes."""

from __future__ import annotations

from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.openvino_genai.peer import OpenVinoGenAI
from benchmarks.peers.ours_vllm import OursVllm
from benchmarks.peers.peer import Peer
from benchmarks.peers.vllm_cpu import VllmCpu

# Name -> class, and the folder of its environment.
PEERS: dict[str, tuple[type[Peer], str]] = {
    "vllm": (VllmCpu, "vllm"),
    "ours-vllm": (OursVllm, "vllm"),
    "llama.cpp": (LlamaCpp, "llama.cpp"),
    "openvino": (OpenVinoGenAI, "openvino"),
}
