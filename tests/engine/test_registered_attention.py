"""Attention functions registered with transformers: outside a paged forward, a model computes exactly as before."""

import threading

import pytest
import torch

from mlserver_torch_stream.engine.attention.registered import CannotPage, give_attention_back, paged, take_attention
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from tests.engine.page_driver import PageDriver, Way
from tests.engine.tiny_models import prompt_of, reference, tiny_model


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "llama4_chunked", "gpt2"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_outside_a_paged_forward_a_model_computes_as_before(family: str, implementation: str) -> None:
    model = tiny_model(family)
    if implementation == "eager" or family != "gpt_oss":  # which has no other
        model.set_attn_implementation(implementation)
    ids = torch.tensor([prompt_of(12), prompt_of(12, 3)])
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    before = model.config._attn_implementation
    with torch.inference_mode():
        expected = model(ids, attention_mask=mask).logits
        take_attention(model)
        assert model.config._attn_implementation != before
        assert torch.equal(model(ids, attention_mask=mask).logits, expected)
        give_attention_back(model)
    assert model.config._attn_implementation == before
    with torch.inference_mode():
        assert torch.equal(model(ids, attention_mask=mask).logits, expected)


def test_another_attention_is_left_to_its_own() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(CannotPage, match="'flex_attention'"):
        take_attention(model)
    assert model.config._attn_implementation == "flex_attention"


def test_keys_of_no_cache_layer_are_refused() -> None:
    """If a model changes keys after the cache has stored them, the pages do not have the keys that it attends to."""
    model = tiny_model("jetmoe")
    driver = PageDriver(model, Way.PACKED, 16)
    with pytest.raises(CannotPage, match="that are in no cache layer"):
        driver.step([(driver.join([1, 2, 3]), 3)])


def test_a_paged_forward_is_of_its_own_thread() -> None:
    """While one thread is inside a paged forward, another one calls the model in the ordinary way."""
    model = tiny_model("llama")
    ids = torch.tensor([prompt_of(8)])
    with torch.inference_mode():
        expected = model(ids).logits
    take_attention(model)
    inside, leave, got = threading.Event(), threading.Event(), []

    def other() -> None:
        assert inside.wait(30)
        with torch.inference_mode():
            got.append(model(ids).logits)
        leave.set()

    thread = threading.Thread(target=other)
    thread.start()

    def never(*args: object, **options: object) -> torch.Tensor:
        raise AssertionError("another thread's forward")

    with paged(never):
        inside.set()
        assert leave.wait(30)
    thread.join(30)
    assert torch.equal(got[0], expected)


def test_threads_run_batches_of_one_model_over_one_cache() -> None:
    model = tiny_model("gemma3_text")
    forward = ModelForward(model)
    cache = PagedCache(CacheLayout(model.config), 4, [64, 64], 0)
    prompts = [list(prompt_of(9 + seed, seed)) for seed in range(4)]
    with torch.inference_mode():
        forward(Batch((BatchSequence([1], 0, ([63], [63])),)), cache)
    answers: dict[int, list[int]] = {}

    def run(number: int) -> None:
        tables = tuple(list(range(10 * number, 10 * number + 10)) for _ in range(2))
        tokens, start = list(prompts[number]), 0
        for _ in range(8):
            with torch.inference_mode():
                logits = forward(Batch((BatchSequence(tokens[start:], start, tables),)), cache).tensor
            start = len(tokens)
            tokens.append(int(logits[0].argmax()))
        answers[number] = tokens[len(prompts[number]) :]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answers[number] for number in range(4)] == [reference(model, prompt, 8) for prompt in prompts]
