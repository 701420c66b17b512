"""The row cache alone: rows join, advance, leave, fail to join, are copied and moved, and keep what they hold."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.kv_cache.bytes_per_token import (
    CacheCost,
    cost_by_device,
    device_shares,
    window_capacity,
)
from mlserver_torch_stream.engine.kv_cache.row_cache import CacheLayout, RowCache
from mlserver_torch_stream.engine.kv_cache.slab import Columns, SlabLayer
from tests.engine.tiny import FAMILIES, prompt_of, tiny_model


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Bench:
    """A model, one batch, and for each row the ids that it should hold."""

    def __init__(self, family: str, rows: int = 8, capacity: int = 48) -> None:
        self.model: PreTrainedModel = tiny_model(family, max_position_embeddings=1024)
        self.forward = ModelForward(self.model)
        self.layout = CacheLayout(self.model.config)
        self.batch = RowCache(self.layout, rows, capacity)
        self.rows: list[list[int]] = []

    def prefilled(self, ids: list[int]) -> RowCache:
        single = RowCache(self.layout, capacity=len(ids))
        single.begin_row()
        self.forward([ids], single)
        return single

    def join(self, length: int, seed: int, copies: int = 1) -> None:
        ids = list(prompt_of(length, seed))
        self.batch.join(self.prefilled(ids), copies)
        self.rows += [list(ids) for _ in range(copies)]

    def leave(self, *leaving: int) -> None:
        self.rows = [self.rows[row] for row in self.batch.leave(set(leaving))]

    def check(self) -> None:
        """Decodes a token in every row, and compares with each sequence alone."""
        tokens = [(7 * len(ids) + row) % 250 for row, ids in enumerate(self.rows)]
        logits = self.forward([[token] for token in tokens], self.batch)
        for row, token in enumerate(tokens):
            self.rows[row].append(token)
            expected = self.model(torch.tensor([self.rows[row]]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits[row], expected, atol=2e-4, rtol=1e-3)
        assert self.batch.lengths == [len(ids) for ids in self.rows]


MIXED = ["llama", "mistral", "gemma2", "gpt_oss", "bloom", "lfm2", "mamba2", "qwen3_next"]


@pytest.mark.parametrize("family", MIXED)
def test_random_joins_leaves_and_resizes(family: str) -> None:
    bench, chance = Bench(family), random.Random(family)
    for number in range(60):
        action = chance.choice(["join", "join", "leave", "resize", "check", "check"])
        if action == "join" and len(bench.rows) < 6:
            bench.join(chance.choice([1, 3, 10, 50]), number, copies=chance.choice([1, 1, 2]))
        elif action == "leave" and bench.rows:
            bench.leave(*chance.sample(range(len(bench.rows)), chance.randint(1, len(bench.rows))))
        elif action == "resize":
            bench.batch.resize(chance.choice([8, 10, 16]), chance.choice([16, 64, 200]))
        if bench.rows:
            bench.check()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_row_that_is_copied_out_goes_on_alone_and_leaves_the_batch_as_it_was(family: str) -> None:
    bench = Bench(family)
    for length, seed in ((4, 1), (30, 2), (11, 3)):
        bench.join(length, seed)
        bench.check()
    for row, ids in enumerate(bench.rows):
        twin = bench.batch.extract(row)
        got = bench.forward([[9]], twin)[0]
        expected = bench.model(torch.tensor([[*ids, 9]]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-3)
    bench.check()


@pytest.mark.parametrize("family", MIXED)
@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5, 6])
def test_a_join_that_finds_no_memory_changes_nothing(family: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever allocation of the join fails, in whichever layer."""
    bench = Bench(family, capacity=16)
    bench.join(4, 1)
    bench.check()
    newcomer = bench.prefilled(list(prompt_of(40, 2)))
    calls = 0

    def scarce(*args: object, **kwargs: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise torch.OutOfMemoryError("no memory")
        return real(*args, **kwargs)  # type: ignore[operator, no-any-return]

    target = torch if family not in ("mamba2", "lfm2") else torch.Tensor
    name = "zeros" if target is torch else "index_select"
    real = getattr(target, name)
    with monkeypatch.context() as patched:
        patched.setattr(target, name, scarce)
        try:
            bench.batch.join(newcomer, 2)
            bench.rows += [list(prompt_of(40, 2)) for _ in range(2)]
        except torch.OutOfMemoryError:
            assert calls == nth
            assert bench.batch.columns.span == 5
    bench.check()
    bench.join(7, 3)
    bench.check()


def test_a_failed_forward_leaves_no_trace() -> None:
    bench = Bench("gemma2")
    bench.join(4, 1)
    bench.join(30, 2)
    bench.check()

    def fail(module: torch.nn.Module, args: object) -> None:
        raise RuntimeError("in the middle")

    for _ in range(12):  # a window's slab moves meanwhile
        hook = bench.model.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            bench.forward([[5]] * 2, bench.batch)
        hook.remove()
        bench.check()


@pytest.mark.parametrize("cleared", [True, False])
def test_nan_in_a_slot_does_not_reach_the_next_row_there(cleared: bool) -> None:
    """A masked column is multiplied by zero, which NaN survives."""
    bench = Bench("llama")
    bench.join(4, 1)
    bench.join(30, 2)
    for slab in bench.batch.slabs:
        slab.keys[1], slab.values[1] = torch.nan, torch.nan
    if cleared:
        bench.batch.clear_row(1)
        assert all(slab.keys.isfinite().all() and slab.values.isfinite().all() for slab in bench.batch.slabs)
    bench.leave(1)
    bench.join(3, 5)
    bench.check()


def test_a_batch_is_as_wide_as_its_longest_row() -> None:
    """Whoever has left, or has failed to join, is not paid for."""
    bench = Bench("llama")
    bench.join(4, 1)
    bench.join(30, 2)
    bench.join(9, 3)
    bench.check()
    assert bench.batch.columns.span == 31
    bench.leave(1)
    assert bench.batch.columns.span == 10
    bench.check()


def test_windows_keep_only_their_window() -> None:
    bench = Bench("mistral", rows=2, capacity=400)
    bench.join(5, 1)
    for _ in range(100):
        bench.check()
    for slab in bench.batch.slabs:
        assert slab.window == 6
        assert slab.keys.shape[2] <= window_capacity(6)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cost_of_a_row_is_what_its_tensors_take(family: str) -> None:
    bench = Bench(family, rows=3, capacity=40)
    single = bench.prefilled(list(prompt_of(20, 1)))
    cost = sum(cost_by_device(single.cache.layers).values(), CacheCost())
    bench.batch.join(single, 3)
    held = sum(t.numel() * t.element_size() for slab in bench.batch.slabs for t in (slab.keys, slab.values))
    for layer in bench.batch.cache.layers:
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, {}).values()
            held += sum(state.numel() * state.element_size() for state in states if state is not None)
    assert cost.of(3, 40) == held


@pytest.mark.parametrize("family", ["llama", "mistral", "lfm2"])
def test_a_cache_knows_its_size_whatever_its_layers_are(family: str) -> None:
    """Else every join would move all rows of a model whose layers are windowed."""
    bench = Bench(family, rows=4, capacity=32)
    bench.join(5, 1)
    assert bench.batch.allocated == (4, 32)
    bench.batch.resize(8, 64)
    assert bench.batch.allocated == (8, 64)


def test_a_resize_that_found_no_memory_half_way_is_known_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("llama", rows=2, capacity=32)
    bench.join(5, 1)
    moved, calls = SlabLayer._moved, iter(range(100))

    def scarce(self: SlabLayer, *args: Any) -> torch.Tensor:
        if next(calls) == 2:  # the second layer
            raise torch.OutOfMemoryError("no memory")
        return moved(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(SlabLayer, "_moved", scarce)
        with pytest.raises(torch.OutOfMemoryError):
            bench.batch.resize(4, 64)
    assert bench.batch.allocated not in ((2, 32), (4, 64))
    bench.batch.resize(4, 64)
    bench.join(50, 2, copies=3)
    bench.check()


def test_the_cost_counts_windows_once_they_are_full() -> None:
    cost = CacheCost(per_row=100, per_column=8, windows=((16, 2), (4, 1)))
    assert cost.of(1, 3) == 100 + 24 + 6 + 3
    assert cost.of(2, 1000) == 2 * (100 + 8000 + 64 + 8)
    assert cost.of(0, 10) == 0


def test_each_device_holds_the_layers_that_are_on_it() -> None:
    """``meta`` stands for the second device: its tensors have a size and no place."""

    def layer(device: str, heads: int, window: int | None = None) -> SlabLayer:
        slab = SlabLayer(Columns(), rows=1, capacity=4, window=window)
        slab.lazy_initialization(*(torch.empty(1, heads, 1, 8, device=device) for _ in range(2)))
        return slab

    here, there = torch.device("cpu"), torch.device("meta")
    costs = cost_by_device([layer("cpu", 1), layer("meta", 2), layer("meta", 1)])
    assert costs == {here: CacheCost(per_column=64), there: CacheCost(per_column=192)}
    assert device_shares(costs, 100) == {here: 0.25, there: 0.75}
    costs = cost_by_device([layer("cpu", 1), layer("meta", 1, window=5)])
    assert device_shares(costs, 100) == {here: 100 / 110, there: 0.5}


def test_a_slab_moves_once_in_many_steps() -> None:
    """Growing by one column per step must not copy the slab at every step."""
    columns = Columns()
    slab = SlabLayer(columns, rows=1, capacity=80)
    moves = 0
    relocate = slab.relocate

    def counted(*args: int) -> None:
        nonlocal moves
        moves += 1
        relocate(*args)

    slab.relocate = counted  # type: ignore[method-assign]
    token = torch.ones(1, 1, 1, 1)
    for step in range(1000):
        keys, _ = slab.update(token, token)
        assert keys.shape[2] == columns.span + 1
        columns.end += 1
        slab.commit()
        columns.begin = max(0, step - 62)  # rows of at most 64 tokens, as if longer ones had left
    assert moves <= 1000 / (80 - 64) + 1
    assert slab.capacity == 80
