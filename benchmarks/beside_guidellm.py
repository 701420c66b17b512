"""Our client beside guidellm's: one server, the same load, and both tools' tokens/s and time to the first token.

python -m benchmarks.beside_guidellm /path/to/guidellm-env/bin/python --streams 1,8

Both ask ``/v1/completions`` for a fixed number of tokens, with a fixed number of requests in flight, and take turns.
guidellm makes its own prompts, with the same number of tokens. Each measurement is printed as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import load, machine
from benchmarks.answers import Ask
from benchmarks.figures import summarize
from benchmarks.model_folder import model_folder
from benchmarks.prompts import Prompts
from benchmarks.servers import EMBEDDED, Live, Ours
from benchmarks.sweep import run_quietly, started

_RUN_S = 300
_PROMPT_TOKENS, _NEW_TOKENS = 128, 64


def by_ours(live: Live, asks: Sequence[Ask], streams: int) -> dict[str, float]:
    """Measures with the client of ``make bench``."""
    endpoint = live.endpoints["openai"]
    figures = summarize([load.read(endpoint, asks, run_quietly(load.always(endpoint, asks, streams)))])
    return {name: figures[name] for name in ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms")}


def by_guidellm(live: Live, folder: Path, python: Path, streams: int, requests: int) -> dict[str, float]:
    """Measures with guidellm, in its own environment. Raises RuntimeError if it fails or a request does."""
    options = {
        "backend": f"kind=openai_http,target=http://127.0.0.1:{live.http_port},model={Ours.model},"
        "request_format=/v1/completions",
        "tokenizer": f"kind=hf_auto,model={folder}",
        "data": f"kind=synthetic_text,prompt_tokens={_PROMPT_TOKENS},output_tokens={_NEW_TOKENS}",
        "profile": f"kind=concurrent,streams={streams}",
        "constraint": f"kind=max_requests,count={requests}",
        "output": "kind=json,path=report.json",
    }
    command = [str(python.with_name("guidellm")), "run", "--disable-progress"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S, cwd=home, check=False)
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        (benchmark,) = json.loads(Path(home, "report.json").read_text())["benchmarks"]
    return read_guidellm(benchmark)


def read_guidellm(benchmark: dict[str, Any]) -> dict[str, float]:
    """Returns the rate and the first tokens of the requests that succeeded. Raises RuntimeError if one did not."""
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    if totals["successful"] != totals["total"]:
        raise RuntimeError(f"requests failed: {totals}")
    first = metrics["time_to_first_token_ms"]["successful"]
    tokens = metrics["output_token_count"]["successful"]["total_sum"]
    seconds = benchmark["end_time"] - benchmark["start_time"]
    return {
        "tokens_per_s": tokens / seconds,
        "own_tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
        "ttft_p50_ms": first["percentiles"]["p50"],
        "ttft_p99_ms": first["percentiles"]["p99"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures with both tools in turn, and prints a line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", type=Path, help="the interpreter of an environment with guidellm")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--sweeps", type=int, default=2)
    options = parser.parse_args(arguments)
    folder = model_folder(EMBEDDED, {})
    prompts, date = Prompts(folder), machine.describe()["date"]
    with started(Ours(EMBEDDED)) as live:
        for streams in map(int, options.streams.split(",")):
            by_ours(live, prompts.asks(streams, _PROMPT_TOKENS, _NEW_TOKENS, "warm", streams), streams)
            for sweep in range(options.sweeps):
                asks = prompts.asks(options.requests, _PROMPT_TOKENS, _NEW_TOKENS, streams, sweep)
                figures = {
                    "ours": by_ours(live, asks, streams),
                    "guidellm": by_guidellm(live, folder, options.python, streams, options.requests),
                }
                for tool, found in figures.items():
                    line = {"date": date, "chip": machine.chip(), "tool": tool, "streams": streams, "sweep": sweep}
                    print(json.dumps({**line, **found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
