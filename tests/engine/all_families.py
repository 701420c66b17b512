"""Tries every type of causal language model that transformers knows, and writes the table of docs/families.md.

``python -m tests.engine.all_families`` takes some ten minutes. It starts no engine.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mlserver_torch_stream.engine.checks.selfcheck import check_batching, check_generate
from mlserver_torch_stream.engine.loading.locate import refuse_other_kinds
from mlserver_torch_stream.errors import LoadFailed
from tests.engine.page_answers import Answers, check
from tests.engine.shrunk import shrunk_config
from tests.engine.tiny_models import random_model

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
HEADING = "## All types of transformers"
TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MAX_PARAMETERS = 4_000_000
_NUMBERS = re.compile(r" by \S+ standard deviations( at position \d+)?")
_LONGEST_REASON = 110

Row = tuple[str, str, str]
"""The way of a type, how it takes prompts, and why it is not batched."""


def row_of(model_type: str) -> Row:
    """Returns the table row of a model type: how it is batched, how its prompts are computed, and why.

    Raises AssertionError if a forward that passed the check at load gives other tokens or logits than the model alone.
    """
    try:
        config = shrunk_config(model_type)
        refuse_other_kinds(config)
        with torch.device("meta"):
            size = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
        assert size <= MAX_PARAMETERS, f"{model_type} has {size} parameters"
        model = random_model(config)
    except LoadFailed:
        return "refused", "", "an encoder-decoder model"
    except Exception as error:
        return "not tried", "", _reason(f"{type(error).__name__}: {error}")
    with torch.inference_mode():
        found = check_batching(model)
        if found.problem is not None:
            try:
                check_generate(model)
            except LoadFailed as error:
                return "not tried", "", _reason(str(error))  # of transformers, and perhaps for its sizes alone
            return "serial", "whole", _reason(found.problem)
    check(model, found.way, 16, Answers(model), found.chunked)
    return found.way.value, "in chunks" if found.chunked else "whole", ""


def _reason(text: str) -> str:
    plain = _NUMBERS.sub("", " ".join(text.split())).replace("|", "/").replace("`", "'")
    return plain if len(plain) <= _LONGEST_REASON else f"{plain[:_LONGEST_REASON]}…"


def rows() -> dict[str, Row]:
    """The rows of the table in docs/families.md."""
    found = re.findall(r"^\| `([^`]+)` \| (.+?) \| (.*?) ?\| (.*?) ?\|$", _table(), re.MULTILINE)
    return {model_type: (way, prompts, reason) for model_type, way, prompts, reason in found}


def page_version() -> str:
    """The version of transformers with which the page was written."""
    return re.findall(r"transformers (\d+\.\d+\.\d+)", _table())[0]


def _table() -> str:
    return PAGE.read_text().partition(HEADING)[2]


def _written() -> Iterator[str]:
    yield "| type | way | prompts | why not batched |"
    yield "|---|---|---|---|"
    for model_type in TYPES:
        row = row_of(model_type)
        print(model_type, *row, sep=" | ", file=sys.stderr)
        yield f"| `{model_type}` | " + " | ".join(row) + " |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    text = PAGE.read_text()
    before = text[: text.index("| type |")]
    before = re.sub(r"transformers \d+\.\d+\.\d+", f"transformers {transformers.__version__}", before)
    PAGE.write_text(before + "\n".join(_written()) + "\n")
