"""The cache of pages and the slots of states: memory, bytes, copies, and what remains when memory runs out."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers.cache_utils import LinearAttentionLayer

from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages, PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from tests.engine.tiny_models import prompt_of, reference, tiny_model

_RESIDENT = """
import torch
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

layer = LayerPages(0, 8192, 16)
before = resident()
key = torch.ones(64, 8, 64)  # the pool holds 8192 * 16 tokens: 256 MiB each of keys and values
layer.write(key, key, torch.arange(64))
print(resident() - before)
"""


@pytest.mark.long
def test_pages_that_nobody_has_written_to_are_not_resident() -> None:
    result = subprocess.run([sys.executable, "-c", _RESIDENT], capture_output=True, text=True, timeout=120, check=True)
    assert int(result.stdout) < 32 * 2**20


def test_the_bytes_are_those_of_what_was_written() -> None:
    model = tiny_model("gemma3_text")  # a group of two windowed layers, a group of one
    cache = PagedCache(CacheLayout(model.config), 4, [8, 8], 0)
    assert cache.specs == {}
    forward(model, cache, [1, 2, 3])
    (spec,) = cache.specs.values()
    token = 2 * 2 * 8 * 4  # keys and values of two heads of 8 floats
    assert {group.layers: group.token_bytes for group in spec.groups} == {(0, 2): 2 * token, (1,): token}
    assert spec.state_bytes == 0


def test_the_bytes_of_states() -> None:
    model = tiny_model("falcon_h1")
    cache = PagedCache(CacheLayout(model.config), 4, [8], 5)
    forward(model, cache, [1, 2, 3], Way.ROWS)
    (spec,) = cache.specs.values()
    conv, recurrent = 4 * (32 + 2 * 8), 4 * 8 * 8  # kernel * channels; heads * head_dim * state
    assert spec.state_bytes % (3 * 4) == 0
    assert spec.state_bytes >= 3 * 4 * recurrent and spec.state_bytes <= 3 * 4 * (conv + recurrent) * 2
    assert spec.groups[0].token_bytes == 3 * 2 * 2 * 8 * 4


def test_no_memory_for_the_values_leaves_the_layer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LayerPages(0, 8, 4)
    key, value = torch.ones(1, 2, 8), torch.ones(1, 2, 6)
    empty, calls = torch.empty, []

    def fails_at_the_second(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fails_at_the_second)
        with pytest.raises(MemoryError, match=r"1.5 KiB for 8 pages of a layer's KV cache cannot be allocated on cpu"):
            layer.write(key, value, torch.tensor([5]))
    assert layer.keys is None and layer.values is None and layer.token_bytes == 0
    layer.write(key, value, torch.tensor([5]))
    assert layer.token_bytes == 2 * (8 + 6) * 4


def test_a_pool_that_no_machine_holds_is_refused() -> None:
    layer = LayerPages(0, 2**40, 256)
    with pytest.raises(MemoryError, match="GiB for 1099511627776 pages"):
        layer.reserve(torch.ones(2, 1, 8), torch.ones(2, 1, 8))
    assert layer.keys is None


def test_layers_that_share_the_pages_of_one_pool_hold_their_own_tokens() -> None:
    """Each group gets one allocation; a layer that already has a pool keeps it."""
    model = tiny_model("gemma3_text")  # a group of two windowed layers, a group of one
    cache = PagedCache(CacheLayout(model.config), 4, [8, 6], 0)
    like, sizes = torch.ones(2, 1, 8), []
    cache.layers[1].reserve(like, like)
    own = cache.layers[1].keys

    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.empty(size + 64, dtype=torch.uint8)

    for _ in range(2):
        cache.reserve(like, allocate)
    assert sizes == [8 * 2 * 2 * 2 * 4 * 8 * 4] and cache.layers[1].keys is own
    tokens = {index: (torch.randn(6, 2, 8), torch.randn(6, 2, 8)) for index in cache.layers}
    for index, (keys, values) in tokens.items():
        cache.layers[index].write(keys, values, torch.tensor([12, 13, 14, 15, 4, 5]))
    cache.prepare(Batch((), copies=((0, 3, 7),)))
    for index, layer in cache.layers.items():
        read = layer.read([3 if layer.group else 7, 1], 0, 6)
        assert all(torch.equal(got, put.transpose(0, 1)) for got, put in zip(read, tokens[index], strict=True))
        slots = torch.tensor([[5, 12]])
        gathered = zip(layer.gather(slots), tokens[index], strict=True)
        assert all(torch.equal(got[0], put[[5, 0]].transpose(0, 1)) for got, put in gathered)


def test_a_pool_of_all_layers_that_no_machine_holds_is_refused() -> None:
    cache = PagedCache(CacheLayout(tiny_model().config), 256, [2**36], 0)
    with pytest.raises(MemoryError, match="GiB for 68719476736 pages of the KV cache cannot be allocated on cpu"):
        cache.reserve(torch.ones(2, 1, 8), lambda size: torch.empty(size, dtype=torch.uint8))
    assert all(layer.keys is None for layer in cache.layers.values())


def test_tokens_are_read_where_they_were_written() -> None:
    layer = LayerPages(0, 4, 4)
    keys, values = torch.randn(6, 2, 8), torch.randn(6, 2, 3)
    table = [3, 1]
    layer.write(keys, values, torch.tensor([12, 13, 14, 15, 4, 5]))
    read = layer.read(table, 2, 6)
    assert torch.equal(read[0], keys[2:].transpose(0, 1)) and torch.equal(read[1], values[2:].transpose(0, 1))
    gathered = layer.gather(torch.tensor([[5, 12], [4, 4]]))
    assert torch.equal(gathered[0], torch.stack([keys[[5, 0]], keys[[4, 4]]]).transpose(1, 2))
    assert torch.equal(gathered[1], torch.stack([values[[5, 0]], values[[4, 4]]]).transpose(1, 2))


def test_a_copy_of_a_page_is_of_its_group_alone() -> None:
    model = tiny_model("gemma3_text")
    cache = PagedCache(CacheLayout(model.config), 4, [8, 8], 0)
    forward(model, cache, [1, 2, 3])
    cache.prepare(Batch((), copies=((1, 0, 5),)))
    same = {index: torch.equal(layer.keys[5, :, :3], layer.keys[0, :, :3]) for index, layer in _pools(cache)}
    assert same == {index: layer.group == 1 for index, layer in cache.layers.items()}


def _pools(cache: PagedCache) -> Any:
    return cache.layers.items()


def test_a_forward_that_raises_leaves_the_states_as_they_were() -> None:
    """One part of the batch has succeeded when another one fails, and both are run again."""
    model = tiny_model("lfm2")
    layout = CacheLayout(model.config)
    cache = PagedCache(layout, 16, [8] * len(layout.spec(16).groups), 4)
    run = ModelForward(model, Way.ROWS)
    prompt = list(prompt_of(6))
    answer = reference(model, prompt, 4)
    first = BatchSequence(prompt, 0, ([0],), 1, 2)
    with torch.inference_mode():
        run(Batch((first,)), cache)
        step = BatchSequence(answer[:1], 6, ([0],), 1, 2)
        fresh = BatchSequence([3, 4], 0, ([1],), 1, 1)
        hook = model.get_input_embeddings().register_forward_pre_hook(_refuse_two)
        with pytest.raises(ValueError, match="two tokens"):
            run(Batch((step, fresh)), cache)
        hook.remove()
        logits = run(Batch((step, fresh)), cache).tensor
    assert int(logits[0].argmax()) == answer[1]


def _refuse_two(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    if args[0].shape[1] == 2:
        raise ValueError("two tokens")


def test_slots_hold_states_of_their_own() -> None:
    model = tiny_model("mamba2")
    cache = PagedCache(CacheLayout(model.config), 4, [], 4)
    assert cache.states is not None and cache.states.bytes_by_device() == {}
    forward(model, cache, [1, 2, 3], Way.ROWS, slot=1)
    forward(model, cache, [4, 5], Way.ROWS, slot=3)
    assert sum(cache.states.bytes_by_device().values()) > 0
    cache.prepare(Batch((), state_copies=((3, 0),)))
    taken = cache.states.take([0, 1, 3])
    for layer in taken.values():
        assert type(layer) is LinearAttentionLayer and all(layer.has_previous_state.values())
        state = layer.recurrent_states[0]
        assert state is not None and torch.equal(state[0], state[2]) and not torch.equal(state[0], state[1])
        state.zero_()  # a copy
    again = cache.states.take([1])
    assert all(layer.recurrent_states[0].abs().sum() > 0 for layer in again.values())


def forward(model: Any, cache: PagedCache, ids: list[int], way: Way = Way.PACKED, slot: int = 0) -> torch.Tensor:
    with torch.inference_mode():
        part = BatchSequence(ids, 0, tuple([0] for _ in cache.groups), 1, slot)
        return ModelForward(model, way)(Batch((part,)), cache).tensor
