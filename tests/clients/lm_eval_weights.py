"""Scores of one model with its weights in several formats, by lm-evaluation-harness, as a table.

    python -m tests.clients.lm_eval_weights PYTHON RESULTS [--examples 200]

PYTHON is an interpreter that has lm-eval. The model is the embedded one, whose file has weights in Q4_1: float32 is
that file dequantised, and each other format is made from it. The scores of each format are stored in the folder
RESULTS, and a run skips those that are already there. Prints the table.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import gguf

from mlserver_torch_stream.engine.loading.embedded import find_embedded
from tests.clients.lm_eval_choices import FLOAT32, MODEL, Scores, float32_folder, score_by_server, write_task
from tests.server.conftest import QUIET
from tests.server.harness import Model, serve

_HEAD = (
    "| weights | settings | accuracy | right, of {examples} "
    "| right here and wrong in float32; wrong here and right there "
    "| log-likelihood of a choice, mean | its distance from float32, mean | at most |\n"
    "|---|---|---|---|---|---|---|---|\n"
)
_BF16 = {"dtype": "bfloat16"}
_CONCURRENT, _BATCH = 4, 8


_PACKED = {"weights": "packed"}
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "float32": FLOAT32,
    "bfloat16": _BF16,
    "int8": {**_BF16, "weights": "int8"},
    "int4": {**_BF16, "weights": "int4"},
    "GGUF Q4_1": _PACKED,
    "GGUF Q8_0": _PACKED,
}  # by the name in the table


def _scores(name: str, python: str, folder: Path, examples: int) -> Scores:
    """Returns the scores of the model in one format, from a server."""
    write_task(folder, examples)
    uri = str(write_q8_0(folder / "q8_0.gguf")) if name == "GGUF Q8_0" else MODEL
    with serve(folder / "served", [Model("smollm2", uri, extra=_SETTINGS[name])], settings=QUIET) as server:
        return score_by_server(python, folder, server.url, float32_folder(), _CONCURRENT, _BATCH)


def write_q8_0(file: Path) -> Path:
    """Writes the embedded model's file with its matrices in Q8_0, and all else unchanged."""
    reader = gguf.GGUFReader(find_embedded(MODEL.partition("://")[2]))
    writer = gguf.GGUFWriter(file, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            writer.add_key_value(name, field.contents(), *field.types[:2])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if kind is gguf.GGMLQuantizationType.Q4_1:
            data, kind = gguf.dequantize(data, kind), gguf.GGMLQuantizationType.Q8_0
            data = gguf.quantize(data, kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _row(name: str, found: Scores, exact: Scores) -> str:
    pairs = list(zip(found.correct, exact.correct, strict=True))
    won, lost = sum(ours and not theirs for ours, theirs in pairs), sum(theirs and not ours for ours, theirs in pairs)
    error = math.sqrt(found.accuracy * (1 - found.accuracy) / (len(found.correct) - 1))
    apart = [abs(ours - theirs) for ours, theirs in zip(found.logprobs, exact.logprobs, strict=True)]
    spelled = ", ".join(f"`{key}: {value}`" for key, value in _SETTINGS[name].items())
    cells = (
        name, spelled, f"{found.accuracy:.3f} ± {error:.3f}", sum(found.correct), f"{won}; {lost}",
        f"{mean(found.logprobs):.3f}", f"{mean(apart):.3f}", f"{max(apart):.2f}",
    )  # fmt: skip
    return f"| {' | '.join(str(cell) for cell in cells)} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("results", type=Path)
    parser.add_argument("--examples", type=int, default=200)
    options = parser.parse_args()
    options.results.mkdir(exist_ok=True)
    print(_HEAD.format(examples=options.examples), end="", flush=True)
    exact = None
    for name in _SETTINGS:
        file = options.results / f"{options.examples} {name}.json"
        if not file.is_file():
            with tempfile.TemporaryDirectory() as folder:
                found = _scores(name, options.python, Path(folder), options.examples)
            file.write_text(json.dumps(asdict(found)))
        kept = Scores(**json.loads(file.read_text()))
        exact = exact or kept
        print(_row(name, kept, exact), end="", flush=True)


if __name__ == "__main__":
    main()
