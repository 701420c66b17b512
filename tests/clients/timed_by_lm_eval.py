"""How long lm-evaluation-harness takes for the scores of tasks, by two of its backends in turn.

    PYTHON timed_by_lm_eval.py FOLDER SERVER_ARGUMENTS [--hf-batch-sizes 8] FOLDER_OF_TASK...

Runs where the harness is installed. FOLDER is the model's. Each task is scored by `hf` with each batch size and by
`local-completions`. A line of JSON says how long the requests took, from the texts to the scores, without the time in
which a model loads.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

_TASK = "continuations"


def timed(model: Any, folder: Path) -> dict[str, Any]:
    """Returns the requests of a task, the seconds that they took, and the accuracy."""
    measured: dict[str, Any] = {}
    scores = type(model).loglikelihood

    def loglikelihood(requests: Any, **options: Any) -> Any:
        started = time.perf_counter()
        found = scores(model, requests, **options)
        measured.update(requests=len(requests), seconds=time.perf_counter() - started)
        return found

    model.loglikelihood = loglikelihood
    tasks = TaskManager(include_path=str(folder))
    results = lm_eval.simple_evaluate(model, tasks=[_TASK], task_manager=tasks, bootstrap_iters=0, log_samples=False)
    return {**measured, "accuracy": results["results"][_TASK]["acc,none"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("server", help="arguments of local-completions")
    parser.add_argument("tasks", nargs="+", type=Path)
    parser.add_argument("--hf-batch-sizes", default="8")
    parser.add_argument("--batch-size", default="8")
    options = parser.parse_args()
    more = {"device": "cpu", "batch_size": 1}
    hf = get_model("hf").create_from_arg_string(f"pretrained={options.model},dtype=float32", more)
    server = get_model("local-completions").create_from_arg_string(options.server, {"batch_size": options.batch_size})
    sizes = [int(size) for size in options.hf_batch_sizes.split(",")]
    for folder in options.tasks:
        for size in sizes:
            hf.batch_size_per_gpu = size
            print(json.dumps({"task": folder.name, "backend": "hf", "batch": size, **timed(hf, folder)}), flush=True)
        print(json.dumps({"task": folder.name, "backend": "server", **timed(server, folder)}), flush=True)


if __name__ == "__main__":
    main()
