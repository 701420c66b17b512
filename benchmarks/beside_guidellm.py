"""Our client beside guidellm's: one server, the same load, and both tools' tokens/s and time to the first token.

python -m benchmarks.beside_guidellm /path/to/guidellm-env/bin/python --streams 1,8

Both ask ``/v1/completions`` for a fixed number of tokens, with a fixed number of requests in flight, and take turns.
guidellm makes its own prompts, with the same number of tokens. Each measurement is printed as a line of JSON and
appended to ``--output``.
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
from benchmarks.answers import Ask, check_all
from benchmarks.bench import EMBEDDED
from benchmarks.figures import summarize
from benchmarks.model_folder import model_folder
from benchmarks.prompts import Prompts
from benchmarks.servers import Live, Ours
from benchmarks.sweep import run_quietly, started

_RUN_S = 300


def by_ours(live: Live, prompts: Prompts, options: argparse.Namespace, streams: int, sweep: int) -> dict[str, float]:
    """Measures with the client of ``make bench``."""
    made = [prompts.text(options.prompt_tokens, "ours", streams, sweep, index) for index in range(options.requests)]
    asks = [Ask(text, tokens, options.new_tokens) for text, tokens in made]
    endpoint = live.endpoints["openai"]

    async def run() -> dict[str, float]:
        answers = [endpoint.read(each) for each in await load.always(endpoint, asks, streams)]
        check_all(asks, answers)
        return summarize([answers])

    figures = run_quietly(run())
    return {name: figures[name] for name in ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms")}


def by_guidellm(live: Live, folder: Path, options: argparse.Namespace, streams: int) -> dict[str, float]:
    """Measures with guidellm, in its own environment. Raises RuntimeError if it fails or a request does."""
    with tempfile.TemporaryDirectory() as nowhere:
        report = Path(nowhere) / "report.json"
        command = [str(options.python.with_name("guidellm")), "run", "--disable-progress"]
        target = f"http://127.0.0.1:{live.http_port}"
        command += ["--backend", f"kind=openai_http,target={target},model=bench,request_format=/v1/completions"]
        command += ["--tokenizer", f"kind=hf_auto,model={folder}"]
        sizes = f"prompt_tokens={options.prompt_tokens},output_tokens={options.new_tokens}"
        command += ["--data", f"kind=synthetic_text,{sizes}", "--profile", f"kind=concurrent,streams={streams}"]
        command += ["--constraint", f"kind=max_requests,count={options.requests}"]
        command += ["--output", f"kind=json,path={report}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S, cwd=nowhere, check=False)
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
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
    parser.add_argument("--uri", default=EMBEDDED, help="the model (%(default)s)")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--sweeps", type=int, default=2)
    parser.add_argument("--output", type=Path, help="a file to which the lines are appended")
    options = parser.parse_args(arguments)
    folder = model_folder(options.uri, {})
    prompts = Prompts(folder, 1)
    described = machine.describe()
    with started(Ours(options.uri)) as live:
        for streams in map(int, options.streams.split(",")):
            by_ours(live, prompts, options, streams, -1)  # warms the server up
            for sweep in range(options.sweeps):
                for tool in ("ours", "guidellm"):
                    if tool == "ours":
                        figures = by_ours(live, prompts, options, streams, sweep)
                    else:
                        figures = by_guidellm(live, folder, options, streams)
                    line = {"date": described["date"], "chip": machine.chip(), "tool": tool, "streams": streams}
                    text = json.dumps({**line, "sweep": sweep, **figures})
                    print(text, flush=True)
                    if options.output:
                        with options.output.open("a") as file:
                            file.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
