"""Batches of unlike rows: groups of lengths, slabs that move, random arrivals and departures against ``generate``."""

import asyncio
import random

import pytest
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.batching.continuous import ContinuousBatcher
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.kv_cache.row_cache import RowCache
from tests.engine.tiny import (
    Watch,
    greedy,
    idle,
    prompt_of,
    reference,
    run,
    running,
    tiny_model,
    tokens_of,
    until,
)

LONG = 2048
_SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", max_position_embeddings=LONG)


def batches(engine: EngineCore) -> list[RowCache]:
    batcher = engine._batcher
    assert isinstance(batcher, ContinuousBatcher)
    return list(batcher._caches.values())


def test_rows_of_very_different_lengths_decode_apart(model: PreTrainedModel, watch: Watch) -> None:
    requests = [(prompt_of(1500, 1), 30), (prompt_of(5, 2), 60), (prompt_of(1400, 3), 30), (prompt_of(30, 4), 60)]
    expected = [reference(model, prompt, count) for prompt, count in requests]

    async def scenario(engine: EngineCore) -> None:
        sequences = [asyncio.create_task(tokens_of(engine, prompt, greedy(count))) for prompt, count in requests]
        await until(lambda: engine.stats().running_sequences == 4, "four rows")
        assert sorted(len(cache.lengths) for cache in batches(engine)) == [2, 2]
        for cache in batches(engine):
            assert max(cache.lengths) <= 4 * max(256, *cache.lengths)
        short = min(batches(engine), key=lambda cache: max(cache.lengths))
        assert short.columns.span < 200  # the short ones do not pay for the long ones
        assert [await sequence for sequence in sequences] == expected
        await until(lambda: idle(engine), "an idle engine")

    with running(model, context=LONG, prefill_tokens=512) as engine:
        watch.calls.clear()
        run(scenario(engine))
    assert max(len(step) for step in watch.steps) == 2


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(each, marks=_SLOW) for each in ("mistral", "gemma2", "gpt_oss"))]
)
def test_a_long_run_with_many_short_visitors_moves_its_slabs_and_stays_right(family: str) -> None:
    """The write pointer passes the slab's end many times; windows are left behind; rows come and go meanwhile."""
    model = tiny_model(family, max_position_embeddings=1024)
    visitors = [(prompt_of(1 + 5 * i % 37, i), 1 + 7 * i % 40) for i in range(40)]
    expected = [reference(model, prompt, count) for prompt, count in visitors]
    stayer = reference(model, prompt_of(20, 99), 500)

    async def scenario(engine: EngineCore) -> None:
        staying = asyncio.create_task(tokens_of(engine, prompt_of(20, 99), greedy(500)))
        gate = asyncio.Semaphore(5)

        async def visit(prompt: tuple[int, ...], count: int) -> list[int]:
            async with gate:
                return await tokens_of(engine, prompt, greedy(count))

        assert await asyncio.gather(*(visit(*visitor) for visitor in visitors)) == expected
        assert await staying == stayer

    with running(model, context=1024) as engine:
        run(scenario(engine))


def test_a_batch_whose_longest_row_left_moves_along_and_does_not_grow(model: PreTrainedModel) -> None:
    """Rows that come and go for ever must not make the slab grow, nor write beyond it."""
    expected = [reference(model, prompt_of(6, i), 30) for i in range(4)]

    async def scenario(engine: EngineCore) -> None:
        async def again(seed: int) -> None:
            for _ in range(12):
                assert await tokens_of(engine, prompt_of(6, seed), greedy(30)) == expected[seed]

        async def watching() -> None:
            while True:
                for cache in batches(engine):
                    sizes.add(cache.allocated[1])
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watching())
        await asyncio.gather(*(again(seed) for seed in range(4)))
        watcher.cancel()

    sizes: set[int] = set()
    with running(model, context=LONG) as engine:
        run(scenario(engine))
    assert max(sizes) <= 48  # 36 tokens and the slack


def test_a_flood_of_short_prompts_does_not_keep_rows_from_decoding(model: PreTrainedModel, watch: Watch) -> None:
    """Between two decode steps there are at most as many forwards as ``chunked_prefill_size`` pays for."""

    async def scenario(engine: EngineCore) -> None:
        row = asyncio.create_task(tokens_of(engine, prompt_of(5), greedy(60)))
        await until(lambda: engine.stats().running_sequences == 1, "a row")
        await watch.hold()
        watch.calls.clear()
        flood = [asyncio.create_task(tokens_of(engine, prompt_of(16, seed), greedy(4))) for seed in range(32)]
        await asyncio.sleep(0)  # they are submitted
        watch.let_go()
        await asyncio.gather(row, *flood)

    with running(model, prefill_tokens=512, max_num_seqs=40) as engine:
        run(scenario(engine))
    prefills = "".join("d" if len(call[0]) == 1 else "p" for call in watch.calls).strip("d").split("d")
    assert sum(map(len, prefills)) == 32
    assert max(map(len, prefills)) <= 512 // 64


def test_whole_prompts_where_they_cannot_be_cut(model: PreTrainedModel, watch: Watch) -> None:
    requests = [(prompt_of(9 + i, i), 10) for i in range(6)]
    expected = [reference(model, prompt, count) for prompt, count in requests]

    async def scenario(engine: EngineCore) -> None:
        opened = engine.submit([EngineRequest((), greedy(10), open=True)])
        opened.extend(requests[0][0][:5])
        assert await asyncio.gather(*(tokens_of(engine, *_greedy(request)) for request in requests)) == expected
        opened.seal(requests[0][0])
        assert [token async for event in opened for token in event.token_ids] == expected[0]

    watch.calls.clear()
    with running(model, prefill_tokens=None, context=LONG) as engine:
        checks = len(watch.calls)
        run(scenario(engine))
    prefills = [len(call[0]) for call in watch.calls[checks:] if len(call[0]) > 1]
    assert sorted(prefills) == sorted([len(prompt) for prompt, _ in requests] + [len(requests[0][0])])


def _greedy(request: tuple[tuple[int, ...], int]) -> tuple[tuple[int, ...], object]:
    return request[0], greedy(request[1])


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=_SLOW)])
@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "lfm2", *(pytest.param(family, marks=_SLOW) for family in ("gpt_oss", "qwen3_next"))]
)
def test_random_company(family: str, seed: int) -> None:
    """Requests arrive, are cancelled, come in pieces and end at random, over a cache that holds only some of them."""
    model = tiny_model(family, max_position_embeddings=1024, seed=seed)
    chance = random.Random(f"{family} {seed}")
    lengths = [chance.choice([1, 2, 5, 17, 30, 70, 300]) for _ in range(40)]
    counts = [chance.choice([1, 2, 9, 25, 60]) for _ in lengths]
    expected = [reference(model, prompt_of(lengths[i], i), counts[i]) for i in range(len(lengths))]

    async def one(engine: EngineCore, number: int) -> None:
        length, count, wanted = lengths[number], counts[number], expected[number]
        prompt = prompt_of(length, number)
        for _ in range(chance.randrange(150)):
            await asyncio.sleep(0)
        in_pieces, patience = chance.random() < 0.3, chance.choice([None, None, 1, 8])
        n = 1 if in_pieces else chance.choice([1, 1, 2])
        stream = engine.submit([EngineRequest(() if in_pieces else prompt, greedy(count, n=n), open=in_pieces)])
        if in_pieces:
            stream.extend(prompt[: length // 2])
            await asyncio.sleep(0)
            stream.seal(prompt)
        tokens: dict[int, list[int]] = {}
        async for event in stream:
            assert event.error is None, event.error
            tokens.setdefault(event.index, []).extend(event.token_ids)
            if patience is not None and len(tokens.get(0, [])) >= patience:
                break
        stream.close()
        for got in tokens.values():
            assert got == wanted[: len(got)]
        assert patience is not None or all(len(got) == count for got in tokens.values())

    async def scenario(engine: EngineCore) -> None:
        await asyncio.gather(*(one(engine, number) for number in range(len(lengths))))
        await until(lambda: idle(engine), "an idle engine")
        assert engine.stats().wasted_tokens == 0

    with running(model, context=1024, prefill_tokens=16, max_queued_requests=100, cache_bytes=2**20) as engine:
        run(scenario(engine))
