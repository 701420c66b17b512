"""For each family with a tensor-parallel plan in transformers, two ranks give the tokens of one process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.build import build_engine
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.settings import parse_settings
from tests.engine.tiny import byte_tokenizer, collect, greedy, prompt_of, reference, run, tiny_model

REQUESTS = [(prompt_of(3 + 5 * number, number), 10 + 3 * number) for number in range(4)]


FAMILIES = "qwen2 qwen3 mistral gemma2 gemma3_text phi3 mixtral olmo2 granite cohere2 gpt_neox qwen3_next"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES.split())
def test_two_ranks_give_the_tokens_of_one_process(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    expected = [reference(model, prompt, count) for prompt, count in REQUESTS]
    settings = {"tensor_parallel_size": 2, "threads": 1, "kv_cache_memory": "8MiB", "chunked_prefill_size": 4}
    built = build_engine(parse_settings(str(tmp_path), settings, environ={}), resources=ProcessResources())

    async def scenario() -> list[list[int]]:
        requests = [EngineRequest(prompt, greedy(count)) for prompt, count in REQUESTS]
        sequences = await asyncio.gather(*(collect(built.engine, [request]) for request in requests))  # type: ignore[arg-type]
        return [list(sequence[0].token_ids) for sequence in sequences]

    try:
        assert run(scenario()) == expected
    finally:
        if built.give_back():
            built.shutdown()
