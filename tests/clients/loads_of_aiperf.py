"""Streamed loads of aiperf over chats, prompts and messages, while it scrapes the server's metrics.

Knows nothing of the server beyond its address and the folder of its tokenizer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_REQUESTS = 12
_RUN_S = 900
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # with them aiperf takes a tokenizer's folder for a hub id


def main(url: str, tokenizer: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in _OFFLINE}
    for endpoint in ("chat", "completions", "messages"):
        with tempfile.TemporaryDirectory() as folder:
            load = ["--concurrency", "3", "--request-count", str(_REQUESTS)]
            load += ["--synthetic-input-tokens-mean", "20", "--output-tokens-mean", "8"]
            served = ["--model", "tiny", "--url", url, "--tokenizer", tokenizer]
            command = [str(Path(sys.executable).with_name("aiperf")), "profile", *served, *load]
            command += ["--endpoint-type", endpoint, "--streaming", "--ui", "none", "--artifact-dir", folder]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_RUN_S, check=False, env=environment, cwd=folder
            )
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            (profile,) = Path(folder).rglob("profile_export_aiperf.json")
            (metrics,) = Path(folder).rglob("server_metrics_export.json")
            _check(json.loads(profile.read_text()), json.loads(metrics.read_text())["metrics"])
            assert "counter reset" not in done.stdout + done.stderr


def _check(profile: dict, metrics: dict) -> None:
    """Checks that the load is complete, and that the server has counted it."""
    assert profile["completed_request_count"]["avg"] == _REQUESTS and not profile["error_summary"]
    assert profile["time_to_first_token"]["avg"] > 0
    (counted,) = metrics["torch_stream_generation_tokens"]["series"]
    assert counted["stats"]["total"] == profile["total_usage_completion_tokens"]["avg"] > 0


main(*sys.argv[1:])
