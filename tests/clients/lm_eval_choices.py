"""Compares scores of lm-evaluation-harness: by its backend `local-completions` from this server, and by its backend
`hf`.

    python -m tests.clients.lm_eval_choices PYTHON [--examples 200]

PYTHON is an interpreter that has lm-eval. The task is multiple choice: which words continue a passage of the text that
tests.engine.perplexity names? One choice is the text's own, three are from other places in it. Prints how far apart the
two backends' scores of the embedded model in float32 are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from mlserver_torch_stream.engine.loading.locate import locate
from mlserver_torch_stream.settings import parse_settings
from tests.engine.perplexity import TEXT
from tests.server.conftest import QUIET
from tests.server.harness import Model, serve

MODEL = "embedded://smollm2-135m-instruct"
FLOAT32: Mapping[str, Any] = {"dtype": "float32"}
TASK = "continuations"
_TASK = f"""\
task: {TASK}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "FOLDER/test.jsonl", shots: "FOLDER/shots.jsonl"}}}}
test_split: test
fewshot_split: shots
fewshot_config: {{sampler: first_n}}
num_fewshot: SHOTS
output_type: multiple_choice
doc_to_text: passage
doc_to_target: answer
doc_to_choice: choices
metric_list: [{{metric: acc}}]
"""
_CHOICES = 4
_CHOICE_WORDS, _PASSAGE_WORDS = (1, 6), (16, 48)
_SEED = 35
_RUN_S = 3600


@dataclass(frozen=True, slots=True)
class Scores:
    """``correct`` has an item for each example, the other lists one for each choice of each example.

    ``words`` is the number of words, ``logprobs`` the choice's log-likelihood, and ``greedy`` whether each of its
    tokens is the most likely one.
    """

    accuracy: float
    correct: list[bool]
    words: list[int]
    logprobs: list[float]
    greedy: list[bool]


def write_task(folder: Path, examples: int, *, shots: int = 0, seed: int = _SEED) -> None:
    """Writes the task and its examples, which depend only on the seed.

    ``shots`` is the number of solved examples before each example, always the same ones.
    """
    words, drawn = TEXT.read_text(encoding="utf-8").split(), random.Random(seed)
    rows = []
    for _ in range(examples + max(1, shots)):  # datasets reads no empty file
        passage, choice = drawn.randint(*_PASSAGE_WORDS), drawn.randint(*_CHOICE_WORDS)
        start = drawn.randrange(len(words) - passage - choice)
        own, starts = start + passage, range(len(words) - choice)
        others = drawn.sample([other for other in starts if abs(other - own) >= choice], _CHOICES - 1)
        choices = [" ".join(words[first : first + choice]) for first in (own, *others)]
        answer = drawn.randrange(_CHOICES)
        choices[0], choices[answer] = choices[answer], choices[0]
        rows.append({"passage": " ".join(words[start:own]), "choices": choices, "answer": answer})
    for name, part in (("test", rows[:examples]), ("shots", rows[examples:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    task = _TASK.replace("FOLDER", str(folder)).replace("SHOTS", str(shots))
    (folder / f"{TASK}.yaml").write_text(task, encoding="utf-8")


def score_by_hf(python: str, task: Path, model: Path) -> Scores:
    return _score(python, task, "hf", f"pretrained={model},dtype=float32", "--device", "cpu", "--batch_size", "8")


def score_by_server(python: str, task: Path, url: str, tokenizer: Path, concurrent: int, batch: int) -> Scores:
    arguments = f"base_url={url}/v1/completions,model=smollm2,tokenizer={tokenizer},num_concurrent={concurrent}"
    return _score(python, task, "local-completions", arguments, "--batch_size", str(batch))


def _score(python: str, task: Path, backend: str, arguments: str, *more: str) -> Scores:
    with tempfile.TemporaryDirectory() as output:
        options = ["--tasks", TASK, "--include_path", str(task), "--output_path", output, "--log_samples"]
        command = [python, "-m", "lm_eval", "run", "--model", backend, "--model_args", arguments, *options, *more]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(task / "hub")}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_RUN_S, check=False, env=environment, cwd=task
        )
        assert done.returncode == 0, done.stderr[-3000:]
        (results,) = Path(output).rglob("results_*.json")
        (samples,) = Path(output).rglob("samples_*.jsonl")
        accuracy = json.loads(results.read_text())["results"][TASK]["acc,none"]
        rows = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    words = [len(choice.split()) for row in rows for choice in row["doc"]["choices"]]
    logprobs, greedy = zip(*(pair for row in rows for pair in row["filtered_resps"]), strict=True)
    correct = [bool(row["acc"]) for row in rows]
    return Scores(
        accuracy, correct, words, [float(each) for each in logprobs], [str(each) == "True" for each in greedy]
    )


def float32_folder() -> Path:
    """Returns the folder of the embedded model's weights in float32, as transformers reads them."""
    return Path(locate(parse_settings(MODEL, dict(FLOAT32))).location)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("--examples", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder, weights = Path(made), float32_folder()
        write_task(folder, options.examples)
        expected = score_by_hf(options.python, folder, weights)
        with serve(folder / "served", [Model("smollm2", MODEL, extra=FLOAT32)], settings=QUIET) as server:
            found = score_by_server(options.python, folder, server.url, weights, 4, 8)
    print(f"accuracy {found.accuracy:.3f}, by hf {expected.accuracy:.3f}")
    print(f"greedy choices {sum(found.greedy)}, by hf {sum(expected.greedy)}")
    apart = [abs(ours - theirs) for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True)]
    print(f"log-likelihoods of choices: {mean(apart):.1e} apart on average, {max(apart):.1e} at most")


if __name__ == "__main__":
    main()
