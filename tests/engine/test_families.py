"""In every family, requests that join and leave at any time get the tokens of ``generate`` for each prompt alone."""

import asyncio
from dataclasses import replace

import pytest
import torch

from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.sampling.sampler import SamplerFactory
from mlserver_torch_stream.engine.step.serial import SerialBatcher
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from tests.engine.fast_families import fast
from tests.engine.tiny import (
    SERIAL_FAMILIES,
    VOCAB,
    byte_tokenizer,
    greedy,
    reference,
    run,
    running,
    tokens_of,
)
from tests.engine.tiny import tiny_model as make
from tests.engine.tiny_models import KINDS

# (prompt length, answer length): short and long prompts, some longer than any window, answers that end in turn.
REQUESTS = [(5, 20), (17, 6), (3, 14), (11, 9), (23, 12), (2, 5)]
# tests/engine/test_pages_families.py has every family in the fast tests, without an engine.


def prompt_of(length: int, seed: int) -> list[int]:
    return [(seed * 31 + 7 * position) % 250 for position in range(length)]


async def staggered(engine: EngineCore) -> list[list[int]]:
    """Starts each request a step or two after the one before, so that all of them overlap."""

    async def one(number: int, length: int, count: int) -> list[int]:
        for _ in range(1000):
            if number == 0 or engine.stats().decode_steps >= 2 * number:
                break
            await asyncio.sleep(0.001)
        return await tokens_of(engine, prompt_of(length, number), greedy(count))

    return await asyncio.gather(*(one(number, *request) for number, request in enumerate(REQUESTS)))


@fast("llama", "gemma3_text", "bloom", "qwen3_next", "jamba", long=KINDS)
def test_rows_that_join_and_leave_get_the_tokens_they_get_alone(family: str) -> None:
    model = make(family)
    expected = [reference(model, prompt_of(length, n), count) for n, (length, count) in enumerate(REQUESTS)]
    with running(model) as engine:
        got = run(staggered(engine))
        assert engine.stats().generation_tokens == sum(count for _, count in REQUESTS)
        assert engine.stats().decode_steps < sum(count for _, count in REQUESTS)  # they did share steps
    assert got == expected


SHARED = [(11 * position + 5) % 250 for position in range(32)]


async def beginning_alike(engine: EngineCore, prompts: list[list[int]], count: int) -> list[list[int]]:
    return list(await asyncio.gather(*(tokens_of(engine, prompt, greedy(count)) for prompt in prompts)))


@pytest.mark.long
@fast("llama", "gemma3_text", "bloom", "qwen3_next", "jamba")
def test_preempted_sequences_and_found_prefixes_get_the_tokens_they_get_alone(family: str) -> None:
    """Six prompts of up to 34 tokens share a beginning, and come twice; memory suffices for two sequences of 60."""
    model = make(family)
    findings = check_batching(model)
    assert findings.spec is not None
    prompts = [[*SHARED[:length], 7, 250 - length] for length in (3, 4, 5, 17, 31, 32)]
    expected = [reference(model, prompt, 26) for prompt in prompts]
    room = 2 * replace(findings.spec, page_size=4).sequence_bytes(60, step=4) + findings.spec.state_bytes
    with running(model, findings=findings, cache_bytes=room, prefix_bytes=room) as engine:
        for _ in range(2):
            assert run(beginning_alike(engine, prompts, 26)) == expected
        stats = engine.stats()
    # States never grow, nor does what a window holds.
    assert stats.num_preemptions > 0 or all(group.span is not None for group in findings.spec.groups)
    assert stats.prefix_cache_hit_tokens > 0 or findings.spec.state_bytes > 0 or not findings.chunked


@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemma2", "gpt_oss", "bloom", "qwen3_next"))],
)
def test_pages_of_any_size_give_the_same_tokens(family: str, page_size: int) -> None:
    model = make(family)
    prompts = [[*SHARED[:length], 7, 250 - length] for length in (15, 16, 17, 32)]
    expected = [reference(model, prompt, 10) for prompt in prompts]
    with running(model, page_size=page_size, prefix_bytes=2**20) as engine:
        for _ in range(2):
            assert run(beginning_alike(engine, prompts, 10)) == expected
        hits = engine.stats().prefix_cache_hit_tokens
    assert (hits > 0) == (page_size < 40 and family != "qwen3_next")


@pytest.mark.parametrize("family", SERIAL_FAMILIES)
def test_families_that_keep_state_elsewhere_are_found_out_and_served_serially(family: str) -> None:
    model = make(family)
    expected = [reference(model, prompt_of(length, n), count) for n, (length, count) in enumerate(REQUESTS)]
    with torch.inference_mode():
        assert check_batching(model).problem is not None
    samplers = SamplerFactory(TextCodec(byte_tokenizer()), VOCAB)
    with running(model, batcher=SerialBatcher(model, samplers, max_num_seqs=8)) as engine:

        async def together() -> list[list[int]]:
            requests = (
                tokens_of(engine, prompt_of(length, n), greedy(count)) for n, (length, count) in enumerate(REQUESTS)
            )
            return list(await asyncio.gather(*requests))

        assert run(together()) == expected


def test_a_wrong_model_is_found_out() -> None:
    """The comparison must find a model whose rows influence each other; otherwise it proves nothing."""
    model = make("llama")
    original = model.model.layers[1].forward

    def leaky(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        out: torch.Tensor = original(hidden_states, *args, **kwargs)
        return out + 0.1 * out.mean(dim=(0, 1), keepdim=True)

    model.model.layers[1].forward = leaky
    with torch.inference_mode():
        findings = check_batching(model)
    assert findings.problem is not None and "differ" in findings.problem
