"""Prompts that begin alike: not prefilled twice, never wrong, bounded, and untouched by those who copy from them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch

from mlserver_torch_stream.engine.batched import BatchedBackend
from mlserver_torch_stream.engine.cache.prefixes import PrefixStore
from mlserver_torch_stream.engine.cache.rows import CacheCost, CacheLayout, RowCache
from mlserver_torch_stream.engine.loading.selfcheck import check_batching
from mlserver_torch_stream.engine.sampling.row_samplers import SamplerFactory
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.engine.worker import EngineWorker
from tests.engine.tiny import VOCAB, byte_tokenizer, greedy, reference, run, running, tiny_model, tokens_of

SYSTEM = [(5 * i + 3) % 250 for i in range(60)]


@contextmanager
def keeping(family: str = "llama", prefix_bytes: int = 2**22) -> Iterator[EngineWorker]:
    model = tiny_model(family)
    with torch.inference_mode():
        findings = check_batching(model)
    assert findings.cost is not None
    backend = BatchedBackend(
        model,
        SamplerFactory(TextCodec(byte_tokenizer()), VOCAB, ()),
        cost=findings.cost,
        cache_bytes=2**24,
        max_rows=8,
        prefill_tokens=8 if findings.chunked else None,
        prefix_bytes=prefix_bytes,
    )
    with running(model, backend=backend) as engine:
        yield engine


def test_a_shared_beginning_is_prefilled_once_and_the_tokens_are_the_same() -> None:
    model = tiny_model()
    prompts = [[*SYSTEM, 7, 8, number] for number in range(5)]
    with keeping() as engine:
        for prompt in prompts:
            assert run(tokens_of(engine, prompt, greedy(6))) == reference(model, prompt, 6)
        stats = engine.stats()
    assert stats.prefix_hit_tokens >= 4 * len(SYSTEM)
    assert stats.prefill_tokens + stats.prefix_hit_tokens == sum(map(len, prompts))


def test_the_next_turn_of_a_conversation_begins_with_the_last_ones_answer() -> None:
    model, prompt = tiny_model(), SYSTEM[:30]
    with keeping() as engine:
        answer = run(tokens_of(engine, prompt, greedy(20)))
        turn = [*prompt, *answer, 9, 9, 9]
        before = engine.stats().prefix_hit_tokens
        assert run(tokens_of(engine, turn, greedy(5))) == reference(model, turn, 5)
        # all but the answer's last token, which was never fed to the model
        assert engine.stats().prefix_hit_tokens - before == len(prompt) + len(answer) - 1


def test_the_same_prompt_again_leaves_one_id_for_the_logits() -> None:
    model = tiny_model()
    with keeping() as engine:
        for _ in range(2):
            assert run(tokens_of(engine, SYSTEM, greedy(4))) == reference(model, SYSTEM, 4)
        assert engine.stats().prefix_hit_tokens == len(SYSTEM) - 1


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "lfm2", "gpt2", "bloom"])
def test_random_company_with_shared_beginnings_gets_the_tokens_it_gets_alone(family: str) -> None:
    """Windows and states among them, which cannot be cut once they have forgotten their beginning."""
    model, random = tiny_model(family), Random(family)
    prompts = []
    for _ in range(12):
        cut = random.choice([0, 4, 20, 40, 60])
        prompts.append([*SYSTEM[:cut], *(random.randrange(250) for _ in range(random.randrange(1, 20)))])

    async def together(engine: EngineWorker) -> list[list[int]]:
        async def later(number: int, prompt: list[int]) -> list[int]:
            await asyncio.sleep(0.01 * number)
            return await tokens_of(engine, prompt, greedy(8))

        return list(await asyncio.gather(*(later(number, prompt) for number, prompt in enumerate(prompts))))

    with keeping(family) as engine:
        for _ in range(2):
            assert run(together(engine)) == [reference(model, prompt, 8) for prompt in prompts]


def test_what_is_kept_is_bounded_and_the_least_used_goes_first() -> None:
    cost = CacheCost(per_row=0, per_column=10)
    store = PrefixStore(10 * 100, cost)
    layout = CacheLayout(tiny_model().config)

    def cache(length: int) -> RowCache:
        rows = RowCache(layout, capacity=length)
        rows.columns.end = length
        rows.lengths = [length]
        return rows

    first, second, third = ([n] * 40 for n in (1, 2, 3))
    for ids in (first, second):
        store.keep(ids, cache(40))
    assert store.bytes == 800
    assert store.begin([*first, 9]) is not None  # used: the other one is now the oldest
    store.keep(third, cache(40))
    assert store.bytes == 800
    assert store.begin([*second, 9]) is None
    assert store.begin([*first, 9]) is not None and store.begin([*third, 9]) is not None
    store.keep([4] * 200, cache(200))  # larger than all there is
    assert store.bytes == 800
    store.keep([*first, 5, 5], cache(42))  # holds all of the first
    assert store.bytes == 820
    store.keep(first, cache(40))
    assert store.bytes == 820


def test_nothing_is_kept_unless_there_is_memory_for_it() -> None:
    with keeping(prefix_bytes=0) as engine:
        for _ in range(2):
            run(tokens_of(engine, SYSTEM, greedy(3)))
        assert engine.stats().prefix_hit_tokens == 0 and engine.stats().prefix_cache_bytes == 0


def test_kept_bytes_stay_below_their_bound_under_many_prompts() -> None:
    random = Random(1)
    with keeping(prefix_bytes=2**15) as engine:
        for _ in range(30):
            run(tokens_of(engine, [random.randrange(250) for _ in range(40)], greedy(3)))
            assert engine.stats().prefix_cache_bytes <= 2**15
        assert engine.stats().prefix_cache_bytes > 0
