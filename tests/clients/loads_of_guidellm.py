"""Streamed loads of guidellm over chats, prompts and responses, with the usage in each event.

Knows nothing of the server beyond its address and the folder of its tokenizer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

_REQUESTS = 10
_TOKENS = 8  # of each answer
_RUN_S = 900


def main(url: str, tokenizer: str) -> None:
    guidellm = str(Path(sys.executable).with_name("guidellm"))
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            served = ["--backend", f"kind=openai_http,target={url},model=tiny,request_format={path}"]
            served += ["--tokenizer", f"kind=hf_auto,model={tokenizer}"]
            load = ["--data", f"kind=synthetic_text,prompt_tokens=20,output_tokens={_TOKENS}"]
            load += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={_REQUESTS}"]
            command = [guidellm, "run", *served, *load, "--output", f"kind=json,path={report}", "--disable-progress"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S, check=False, cwd=folder)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            (benchmark,) = json.loads(report.read_text())["benchmarks"]
        metrics = benchmark["metrics"]
        assert metrics["request_totals"] == {"successful": 10, "errored": 0, "incomplete": 0, "total": 10}, path
        tokens, firsts = (metrics[name]["successful"] for name in ("output_token_count", "time_to_first_token_ms"))
        assert tokens["total_sum"] == _REQUESTS * _TOKENS and firsts["min"] > 0, path


main(*sys.argv[1:])
