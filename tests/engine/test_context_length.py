"""Models whose positions change at a length: by default the context ends there; longer ones use the long positions."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mlserver_torch_stream.engine.build import BuiltEngine, build_engine
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
from tests.engine.gguf_originals import CONTEXT, make_original, write_original
from tests.engine.tiny import greedy, prompt_of, reference, run, tokens_of

STEADY = 64


@pytest.fixture(scope="module")
def longrope(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with positions that are scaled by 4 in calls with more than 64 of them."""
    folder = Path(shutil.copytree(tiny_model, tmp_path_factory.mktemp("longrope") / "model"))
    config = json.loads((folder / "config.json").read_text())
    half = config["head_dim"] // 2
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
        "factor": 16.0,
        "original_max_position_embeddings": STEADY,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def built(folder: Path, resources: ProcessResources | None = None, **extra: Any) -> BuiltEngine:
    settings = parse_settings(str(folder), {"threads": 1, **extra}, environ={})
    return build_engine(settings, resources=resources or ProcessResources())


def test_up_to_where_positions_change_rows_share_a_batch(longrope: Path) -> None:
    one = built(longrope)
    assert one.engine.info.max_model_len == STEADY
    assert "sequences at a time" in one.summary and "our own kernels" in one.summary
    requests = [(prompt_of(length, length), 12) for length in (10, 50)]
    original = AutoModelForCausalLM.from_pretrained(longrope)
    assert answers(one, requests) == [reference(original, ids, count) for ids, count in requests]


def long_only(folder: Path) -> PreTrainedModel:
    """The model, with the long factors for sequences of all lengths."""
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters["short_factor"] = config.rope_parameters["long_factor"]
    return AutoModelForCausalLM.from_pretrained(folder, config=config)


def answers(one: BuiltEngine, requests: list[tuple[tuple[int, ...], int]]) -> list[list[int]]:
    async def together() -> list[list[int]]:
        return list(await asyncio.gather(*(tokens_of(one.engine, ids, greedy(count)) for ids, count in requests)))

    try:
        return run(together())
    finally:
        one.shutdown()


@pytest.mark.parametrize("fast_path", ["auto", "off"])
def test_beyond_it_sequences_of_all_lengths_share_a_batch(longrope: Path, fast_path: str) -> None:
    one = built(longrope, max_model_len=300, fast_path=fast_path)
    assert one.engine.info.max_model_len == 300 and "sequences at a time" in one.summary
    assert ("our own kernels" in one.summary) == (fast_path == "auto"), one.summary
    requests = [(prompt_of(length, length), 30) for length in (100, 150, 10, 50)]
    got = answers(one, requests)
    original = AutoModelForCausalLM.from_pretrained(longrope)
    assert got[:2] == [reference(original, ids, count) for ids, count in requests[:2]], "as in transformers"
    assert got[2:] == [reference(long_only(longrope), ids, count) for ids, count in requests[2:]]


def test_a_serial_engine_gives_what_generate_gives(longrope: Path) -> None:
    one = built(longrope, max_model_len=300, engine="serial")
    requests = [(prompt_of(length, length), 30) for length in (10, 50, 100)]
    original = AutoModelForCausalLM.from_pretrained(longrope)
    assert answers(one, requests) == [reference(original, ids, count) for ids, count in requests]


def test_a_file_that_cannot_be_converted_is_not_batched_beyond_it(tiny_model: Path, tmp_path: Path) -> None:
    file = write_original(make_original("phi3, long"), tmp_path / "m.gguf")
    unwritable = {"cache_dir": "/dev/null/cache", "tokenizer": str(tiny_model), "fast_path": "off"}
    with pytest.raises(LoadFailed, match="rescaled beyond 32 tokens"):
        built(file, **unwritable, max_model_len=CONTEXT, engine="batched")


def test_engines_with_other_positions_share_no_weights(longrope: Path) -> None:
    resources = ProcessResources()
    engines = [built(longrope, resources, max_model_len=length) for length in (60, 300)]
    try:
        assert resources.weights.made == 2
    finally:
        for one in engines:
            one.shutdown()
