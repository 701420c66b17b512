"""Positions that change with the longest row of a call: batched where they do not, one by one where they might."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.engine.build import BuiltEngine, build_engine
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
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


def built(folder: Path, **extra: Any) -> BuiltEngine:
    return build_engine(parse_settings(str(folder), {"threads": 1, **extra}, environ={}), resources=ProcessResources())


def test_up_to_where_positions_change_rows_share_a_batch(longrope: Path) -> None:
    one = built(longrope)
    try:
        assert one.engine.info.max_model_len == STEADY and "sequences at a time" in one.summary
    finally:
        one.shutdown()


def test_beyond_it_each_request_runs_alone_and_gets_what_generate_gives(longrope: Path) -> None:
    one = built(longrope, max_model_len=300)
    requests = [(prompt_of(length, length), 30) for length in (10, 50, 100)]
    model = one.lease.value.weights.value.weights.model

    async def together() -> list[list[int]]:
        return list(await asyncio.gather(*(tokens_of(one.engine, ids, greedy(count)) for ids, count in requests)))

    try:
        assert one.engine.info.max_model_len == 300 and "one request at a time (its positions" in one.summary
        got = run(together())
    finally:
        one.shutdown()
    assert got == [reference(model, ids, count) for ids, count in requests]


def test_who_insists_on_batches_is_told_why_not(longrope: Path) -> None:
    with pytest.raises(LoadFailed, match="scaled anew beyond 64 tokens"):
        built(longrope, max_model_len=300, engine="batched")
