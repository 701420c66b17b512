"""Scores per second by lm-evaluation-harness: from this server and from the harness's own backend `hf`, in turn.

    python -m tests.clients.lm_eval_rates PYTHON [--examples 50] [--shots 0] [--rounds 3] [--hf-batch-sizes 8]

PYTHON is an interpreter that has lm-eval. Both have the embedded model's weights in float32. Each round has its own
examples, so that the server's prefix cache has none of their prompts. With ``--shots``, each example begins with that
many solved examples, the same ones throughout a round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

from tests.clients.lm_eval_choices import FLOAT32, MODEL, float32_folder, write_task
from tests.server.conftest import QUIET
from tests.server.harness import Model, serve

_DRIVER = Path(__file__).parent / "timed_by_lm_eval.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("--examples", type=int, default=50)
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hf-batch-sizes", default="8")
    parser.add_argument("--batch-size", default="8")
    parser.add_argument("--concurrent", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder, weights = Path(made), float32_folder()
        tasks = [folder / f"{options.shots}-shot-{number}" for number in range(options.rounds)]
        for number, task in enumerate(tasks):
            task.mkdir()
            write_task(task, options.examples, shots=options.shots, seed=number)
        with serve(folder / "served", [Model("smollm2", MODEL, extra=FLOAT32)], settings=QUIET) as server:
            arguments = f"base_url={server.url}/v1/completions,model=smollm2,tokenizer={weights}"
            arguments += f",num_concurrent={options.concurrent}"
            sizes = ["--hf-batch-sizes", options.hf_batch_sizes, "--batch-size", options.batch_size]
            command = [options.python, str(_DRIVER), str(weights), arguments, *map(str, tasks), *sizes]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
            subprocess.run(command, check=True, env=environment, cwd=folder)
            counted = server.counters("smollm2")
        computed, shared = (counted[name] for name in ("prefill_tokens", "prefix_cache_hit_tokens"))
        print(f"the server computed {computed:.0f} of {computed + shared:.0f} prompt tokens")


if __name__ == "__main__":
    main()
