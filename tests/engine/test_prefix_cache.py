"""Prompts that begin alike: not prefilled twice, never wrong, bounded, and untouched by those who copy from them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.batching.continuous import ContinuousBatcher
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.kv_cache.bytes_per_token import CacheCost
from mlserver_torch_stream.engine.kv_cache.prefix_cache import PrefixCache
from mlserver_torch_stream.engine.kv_cache.row_cache import CacheLayout, RowCache
from tests.engine.tiny import (
    collect,
    greedy,
    reference,
    run,
    running,
    tiny_model,
    tokens_of,
    until,
    watched,
)

SYSTEM = [(5 * i + 3) % 250 for i in range(60)]


@contextmanager
def keeping(
    family: str = "llama", prefix_bytes: int = 2**22, chunked: bool = True, model: PreTrainedModel | None = None
) -> Iterator[EngineCore]:
    model = model or tiny_model(family)
    with running(model, prefill_tokens=8 if chunked else None, prefix_bytes=prefix_bytes) as engine:
        yield engine


def test_a_shared_beginning_is_prefilled_once_and_the_tokens_are_the_same() -> None:
    model = tiny_model()
    prompts = [[*SYSTEM, 7, 8, number] for number in range(5)]
    with keeping() as engine:
        for prompt in prompts:
            assert run(tokens_of(engine, prompt, greedy(6))) == reference(model, prompt, 6)
        stats = engine.stats()
    assert stats.prefix_cache_hit_tokens >= 4 * len(SYSTEM)
    assert stats.prefill_tokens + stats.prefix_cache_hit_tokens == sum(map(len, prompts))


def test_the_next_turn_of_a_conversation_begins_with_the_last_ones_answer() -> None:
    model, prompt = tiny_model(), SYSTEM[:30]
    with keeping() as engine:
        sequence = run(tokens_of(engine, prompt, greedy(20)))
        turn = [*prompt, *sequence, 9, 9, 9]
        before = engine.stats().prefix_cache_hit_tokens
        assert run(tokens_of(engine, turn, greedy(5))) == reference(model, turn, 5)
        # all but the answer's last token, which was never fed to the model
        assert engine.stats().prefix_cache_hit_tokens - before == len(prompt) + len(sequence) - 1


def test_the_same_prompt_again_leaves_one_id_for_the_logits() -> None:
    model = tiny_model()
    with keeping() as engine:
        for _ in range(2):
            assert run(tokens_of(engine, SYSTEM, greedy(4))) == reference(model, SYSTEM, 4)
        assert engine.stats().prefix_cache_hit_tokens == len(SYSTEM) - 1


def test_prompts_whose_beginning_is_known_take_little_of_a_steps_share() -> None:
    """160 copied ids and a new one count as a forward of 64 tokens: two prompts a step of 128, not three in four."""
    model = tiny_model()
    beginning = [(5 * i + 3) % 250 for i in range(160)]
    prompts = [(*beginning, number) for number in range(6)]
    with running(model, prefill_tokens=128, prefix_bytes=2**22) as engine:
        run(tokens_of(engine, beginning, greedy(2)))
        before = engine.stats().decode_steps
        requests = [EngineRequest(prompt, greedy(2), first_index=number) for number, prompt in enumerate(prompts)]
        sequences = run(collect(engine, requests))
        assert engine.stats().decode_steps - before == 3
    for number, prompt in enumerate(prompts):
        assert list(sequences[number].token_ids) == reference(model, prompt, 2)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "lfm2", "gpt2", "bloom"])
def test_random_company_with_shared_beginnings_gets_the_tokens_it_gets_alone(family: str) -> None:
    """Windows and states among them, which cannot be cut once they have forgotten their beginning."""
    model, random = tiny_model(family), Random(family)
    prompts = []
    for _ in range(12):
        cut = random.choice([0, 4, 20, 40, 60])
        prompts.append([*SYSTEM[:cut], *(random.randrange(250) for _ in range(random.randrange(1, 20)))])

    async def together(engine: EngineCore) -> list[list[int]]:
        async def later(number: int, prompt: list[int]) -> list[int]:
            await asyncio.sleep(0.01 * number)
            return await tokens_of(engine, prompt, greedy(8))

        return list(await asyncio.gather(*(later(number, prompt) for number, prompt in enumerate(prompts))))

    with keeping(family) as engine:
        for _ in range(2):
            assert run(together(engine)) == [reference(model, prompt, 8) for prompt in prompts]


def test_what_is_kept_is_bounded_and_the_least_used_goes_first() -> None:
    cost = CacheCost(per_row=0, per_column=10)
    store = PrefixCache(10 * 100, cost)
    layout = CacheLayout(tiny_model().config)

    def cache(length: int) -> RowCache:
        rows = RowCache(layout, capacity=length)
        rows.columns.end = length
        rows.lengths = [length]
        return rows

    first, second, third = ([n] * 40 for n in (1, 2, 3))
    for ids in (first, second):
        store.keep(ids, lambda: cache(40))
    assert store.bytes == 800
    assert store.begin([*first, 9]) is not None  # used: the other one is now the oldest
    store.keep(third, lambda: cache(40))
    assert store.bytes == 800
    assert store.begin([*second, 9]) is None
    assert store.begin([*first, 9]) is not None and store.begin([*third, 9]) is not None
    store.keep([4] * 200, lambda: cache(200))  # larger than all there is
    assert store.bytes == 800
    store.keep([*first, 5, 5], lambda: cache(42))  # holds all of the first
    assert store.bytes == 820
    store.keep(first, lambda: cache(40))
    assert store.bytes == 820


def test_nothing_is_kept_unless_there_is_memory_for_it() -> None:
    with keeping(prefix_bytes=0) as engine:
        for _ in range(2):
            run(tokens_of(engine, SYSTEM, greedy(3)))
        assert engine.stats().prefix_cache_hit_tokens == 0 and engine.stats().prefix_cache_bytes == 0


def test_kept_bytes_stay_below_their_bound_under_many_prompts() -> None:
    random = Random(1)
    with keeping(prefix_bytes=2**15) as engine:
        for _ in range(30):
            run(tokens_of(engine, [random.randrange(250) for _ in range(40)], greedy(3)))
            assert engine.stats().prefix_cache_bytes <= 2**15
        assert engine.stats().prefix_cache_bytes > 0


def test_how_many_are_kept_is_bounded_too() -> None:
    """Each is compared with every new prompt: ten thousand short ones would hold up a step by 30 ms."""
    store = PrefixCache(2**40, CacheCost(per_row=0, per_column=10))
    layout = CacheLayout(tiny_model().config)
    for number in range(600):
        store.keep([*divmod(number, 250), *([1] * 15)], lambda: RowCache(layout))
    assert store.bytes == 512 * 17 * 10


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_model_that_cannot_go_on_from_a_prefix_is_not_asked_to(family: str) -> None:
    """Neither one whose prompts must go in whole, nor one with states; nor are their rows copied in vain."""
    model = tiny_model(family)
    with keeping(family, chunked=family != "llama", model=model) as engine, watched(model) as watch:
        for _ in range(2):
            run(tokens_of(engine, SYSTEM, greedy(4)))
        assert engine.stats().prefix_cache_hit_tokens == 0 and engine.stats().prefix_cache_bytes == 0
        assert engine.stats().kv_cache_budget == 2**24, "its memory is for rows"
        if family == "llama":
            assert [len(call[0]) for call in watch.calls if len(call[0]) > 1] == [len(SYSTEM)] * 2


def test_no_memory_for_what_would_be_kept_hurts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()

    def scarce(self: RowCache, row: int, spare: int = 1) -> RowCache:
        raise torch.OutOfMemoryError("no memory")

    with keeping(model=model) as engine:
        monkeypatch.setattr(RowCache, "extract", scarce)  # the check at load has run
        for count in (1, 8):
            assert run(tokens_of(engine, SYSTEM, greedy(count))) == reference(model, SYSTEM, count)
        assert engine.alive


def test_what_holds_nan_is_not_kept() -> None:
    """Logits that are not finite once, by a fault that passes, would come back with every prompt that begins alike."""
    model = tiny_model()
    broken = False

    def spoil(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output.mul(torch.nan) if broken else output

    hook = model.model.layers[0].mlp.register_forward_hook(spoil)
    with keeping(model=model) as engine:
        broken = True
        with pytest.raises(AssertionError, match="not finite"):
            run(tokens_of(engine, SYSTEM, greedy(4)))
        assert engine.stats().generation_tokens == 0
        broken = False
        assert run(tokens_of(engine, SYSTEM, greedy(4))) == reference(model, SYSTEM, 4)
    hook.remove()


def test_a_prompt_that_came_in_pieces_is_kept_without_its_spare_columns() -> None:
    async def scenario(engine: EngineCore) -> None:
        stream = engine.submit([EngineRequest((), greedy(1), open=True)])
        for end in range(10, 61, 10):
            stream.extend(SYSTEM[end - 10 : end])
            await until(lambda end=end: engine.stats().prefill_tokens == end - 1)  # type: ignore[misc]
        stream.seal(SYSTEM)
        assert [event async for event in stream][-1].error is None
        batcher = engine._batcher
        assert isinstance(batcher, ContinuousBatcher)
        held = [slab for _, cache in batcher._prefixes._kept.values() for slab in cache.slabs]
        assert held
        assert sum(slab.keys.nbytes + slab.values.nbytes for slab in held) == engine.stats().prefix_cache_bytes

    with keeping() as engine:
        run(scenario(engine))
