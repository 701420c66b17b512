"""Sampling, finish reasons and token counts as a client of the engine sees them."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.types import FinishReason, SamplingParameters, TokenEvent
from tests.engine.tiny import (
    CONTEXT,
    EOS,
    VOCAB,
    collect,
    dictated,
    greedy,
    one_by_one,
    prompt_of,
    reference,
    run,
    run_with_engine,
    running,
    spelled,
    tiny_model,
    tokens_of,
)

PROMPT = prompt_of(11, 3)


def sampled(count: int = 20, **changes: Any) -> SamplingParameters:
    return SamplingParameters(**{"max_tokens": count, "ignore_eos": True, "temperature": 1.0, "seed": 7, **changes})


async def sequence(engine: EngineCore, params: SamplingParameters, prompt: Sequence[int] = PROMPT) -> TokenEvent:
    event = (await collect(engine, [EngineRequest(tuple(prompt), params)]))[0]
    assert event.error is None, event.error
    return event


def alone(model: PreTrainedModel, params: SamplingParameters, **options: Any) -> TokenEvent:
    with running(model, **options) as engine:
        event: TokenEvent = run(sequence(engine, params))
        return event


# --- seeds ---


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param({"temperature": 0.7, "top_k": 20, "top_p": 0.9}, id="filtered", marks=pytest.mark.slow),
        pytest.param({"min_p": 0.02, "repetition_penalty": 1.2}, id="penalised", marks=pytest.mark.long),
    ],
)
def test_a_seed_gives_the_same_tokens_in_any_company(model: PreTrainedModel, changes: dict[str, Any]) -> None:
    params = sampled(**changes)
    expected = alone(model, params).token_ids

    async def crowded(engine: EngineCore) -> tuple[int, ...]:
        others = [
            tokens_of(engine, prompt_of(3 + 5 * i, i), sampled(10 + i, seed=None if i % 2 else i, temperature=0.5 * i))
            for i in range(7)
        ]
        first, *_ = await asyncio.gather(sequence(engine, params), *others)
        return first.token_ids

    for chunk in (1, 3, 512):
        with running(model, prefill_tokens=chunk) as engine:
            assert run(crowded(engine)) == expected
    assert alone(model, params, batcher=one_by_one(model)).token_ids == expected


@pytest.mark.long
def test_seeds_differ_and_no_seed_is_a_new_one_each_time(model: PreTrainedModel) -> None:
    async def scenario(engine: EngineCore) -> set[tuple[int, ...]]:
        seeds = (1, 2, -3, 2**70, None, None)
        return {(await sequence(engine, sampled(seed=seed))).token_ids for seed in seeds}

    with running(model) as engine:
        assert len(run(scenario(engine))) == 6


def test_n_samples_differ_from_each_other_and_come_again_with_their_seed(model: PreTrainedModel) -> None:
    async def scenario(engine: EngineCore) -> None:
        first = await collect(engine, [EngineRequest(PROMPT, sampled(n=3), first_index=5)])
        again = await collect(engine, [EngineRequest(PROMPT, sampled(n=3), first_index=5)])
        assert set(first) == {5, 6, 7}
        assert len({event.token_ids for event in first.values()}) == 3
        assert {i: e.token_ids for i, e in first.items()} == {i: e.token_ids for i, e in again.items()}
        assert first[5].token_ids == (await sequence(engine, sampled())).token_ids  # n changes nothing for the first
        for event in first.values():
            assert event.usage is not None
            assert (event.usage.num_input_tokens, event.usage.num_output_tokens) == (len(PROMPT), 20)

    run_with_engine(scenario, model)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_n_greedy_answers_are_equal(family: str) -> None:
    model = tiny_model(family)
    expected = reference(model, PROMPT, 15)

    async def scenario(engine: EngineCore) -> None:
        events = await collect(engine, [EngineRequest(PROMPT, greedy(15, n=3))])
        assert [list(events[index].token_ids) for index in range(3)] == [expected] * 3

    run_with_engine(scenario, model)


# --- ends ---


@pytest.mark.long
def test_every_way_to_end(model: PreTrainedModel) -> None:
    tokens = reference(model, PROMPT, 40)
    end = tokens[6]  # the token that is to end the answer, at its first place
    first = tokens.index(end)
    later = next(i for i in range(first + 1, 40) if tokens[i] not in tokens[: first + 1])

    async def scenario(engine: EngineCore) -> None:
        async def check(params: SamplingParameters, count: int, reason: FinishReason) -> None:
            event = await sequence(engine, params)
            assert (len(event.token_ids), event.finish_reason) == (count, reason)
            assert list(event.token_ids) == tokens[:count]
            assert event.usage is not None and event.usage.num_output_tokens == count

        stop, length = FinishReason.STOP, FinishReason.LENGTH
        plain = SamplingParameters(max_tokens=40)
        await check(plain, first + 1, stop)  # the engine's own end
        await check(SamplingParameters(max_tokens=first + 1), first + 1, stop)  # an end at the last place is an end
        await check(SamplingParameters(max_tokens=first), first, length)
        await check(SamplingParameters(max_tokens=40, ignore_eos=True), 40, length)
        await check(SamplingParameters(max_tokens=40, eos_token_ids=(tokens[later],)), later + 1, stop)
        await check(SamplingParameters(max_tokens=40, eos_token_ids=()), 40, length)
        await check(
            SamplingParameters(max_tokens=40, ignore_eos=True, stop_token_ids=(tokens[later], EOS)), later + 1, stop
        )
        await check(SamplingParameters(max_tokens=40, stop_token_ids=(tokens[later],)), first + 1, stop)

    run_with_engine(scenario, model, eos_token_ids=(end,))


def test_the_text_leaves_the_ending_token_out_unless_asked(model: PreTrainedModel) -> None:
    (x,) = spelled("x")

    async def scenario(engine: EngineCore) -> None:
        bias = {x: 1e4}
        event = await sequence(engine, SamplingParameters(max_tokens=5, logit_bias=bias, stop_token_ids=(x,)))
        assert (event.text, event.token_ids) == ("", (x,))
        included = SamplingParameters(
            max_tokens=5, logit_bias=bias, stop_token_ids=(x,), include_stop_str_in_output=True
        )
        assert (await sequence(engine, included)).text == "x"

    run_with_engine(scenario, model)


def test_no_stop_string_ends_an_answer_before_min_tokens(model: PreTrainedModel) -> None:
    """Nor does a stop string end the answer later if it begins within those tokens, which were already sent as text."""
    said = spelled("ab ab ab ab ab ")
    with running(model) as engine, dictated(model, said, prompt=5):
        params = greedy(15, min_tokens=7, stop=("ab",))
        event = run(collect(engine, [EngineRequest(prompt_of(5), params)]))[0]
    assert event.text == "ab ab a" + "b "
    assert event.finish_reason is FinishReason.STOP
    assert len(event.token_ids) == 11


def test_min_tokens_keeps_all_ends_away(model: PreTrainedModel) -> None:
    tokens = reference(model, PROMPT, 40)

    async def scenario(engine: EngineCore) -> None:
        end = tokens[0]
        params = SamplingParameters(max_tokens=30, min_tokens=9, stop_token_ids=(end,), logit_bias={end: 50})
        event = await sequence(engine, params)
        assert tokens[0] not in event.token_ids[:9]
        assert event.token_ids[9] == tokens[0]
        assert event.finish_reason is FinishReason.STOP

    run_with_engine(scenario, model, eos_token_ids=(tokens[1],))


@pytest.mark.long
def test_no_max_tokens_fills_the_context_and_no_more(model: PreTrainedModel) -> None:
    async def scenario(engine: EngineCore) -> None:
        for params in (SamplingParameters(ignore_eos=True), greedy(10**6)):
            event = await sequence(engine, params, prompt_of(CONTEXT - 20))
            assert event.finish_reason is FinishReason.LENGTH
            assert event.usage is not None
            assert event.usage.num_input_tokens + event.usage.num_output_tokens == CONTEXT

    run_with_engine(scenario, model)
    run_with_engine(scenario, model, batcher=one_by_one(model))


# --- stop strings ---


@pytest.mark.parametrize(
    ("stop", "include", "text", "tokens"),
    [
        (("END",), False, "Grüße an ", 14),
        (("END",), True, "Grüße an END", 14),
        (("ENDE!",), False, "Grüße an ENDE", None),
        (("ße",), False, "Grü", 7),
        (("never", "an E"), False, "Grüße ", 12),
        ((), False, "Grüße an ENDE", None),
        (("ENDX", "DE"), False, "Grüße an EN", 15),
    ],
    ids=["plain", "included", "never completed", "across bytes", "second of two", "none", "a prefix that fails"],
)
def test_stop_strings_never_leak(
    model: PreTrainedModel, stop: tuple[str, ...], include: bool, text: str, tokens: int | None
) -> None:
    said = "Grüße an ENDE"

    async def scenario(engine: EngineCore) -> None:
        count = len(spelled(said))
        params = SamplingParameters(max_tokens=count, stop=stop, include_stop_str_in_output=include)
        chunks = []
        async for event in engine.submit([EngineRequest(PROMPT, params)]):
            chunks.append(event.text)
        assert "".join(chunks) == text
        assert event.finish_reason is (FinishReason.LENGTH if tokens is None else FinishReason.STOP)
        assert event.usage is not None and event.usage.num_output_tokens == (tokens or count)

    with running(model) as engine, dictated(model, spelled(said), len(PROMPT)):
        run(scenario(engine))


# --- logits ---


@pytest.mark.long
def test_bias_and_penalties_reach_the_choice(model: PreTrainedModel) -> None:
    async def scenario(engine: EngineCore) -> None:
        plain = (await sequence(engine, greedy(30))).token_ids
        assert (await sequence(engine, greedy(4, logit_bias={77: 1e4}))).token_ids == (77,) * 4
        banned = (await sequence(engine, greedy(30, logit_bias={plain[0]: -1e4}))).token_ids
        assert plain[0] not in banned
        for name, value in (("repetition_penalty", 5.0), ("presence_penalty", 50.0), ("frequency_penalty", 50.0)):
            changed = (await sequence(engine, greedy(30, **{name: value}))).token_ids
            if name == "repetition_penalty":
                assert changed != plain
            else:
                assert len(set(changed)) == 30  # nothing comes twice

    run_with_engine(scenario, model)


@pytest.mark.parametrize("serial", [False, True], ids=["batched", "serial"])
def test_logprobs_are_the_log_softmax_of_the_models_logits(model: PreTrainedModel, serial: bool) -> None:
    async def scenario(engine: EngineCore) -> tuple[TokenEvent, TokenEvent, list[TokenEvent]]:
        asked = sampled(12, logprobs=True, top_logprobs=4, repetition_penalty=1.3)
        stream = engine.submit([EngineRequest(PROMPT, asked)])
        return await sequence(engine, asked), await sequence(engine, sampled(12)), [event async for event in stream]

    with running(model, batcher=one_by_one(model) if serial else None) as engine:
        event, silent, events = run(scenario(engine))
    assert silent.logprobs == () and silent.cumulative_logprob is None
    whole = (*PROMPT, *event.token_ids)
    with torch.inference_mode():
        table = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    assert [entry.token_id for entry in event.logprobs] == list(event.token_ids)
    for position, entry in enumerate(event.logprobs, start=len(PROMPT) - 1):
        assert entry.logprob == pytest.approx(table[position, entry.token_id].item(), abs=1e-3)
        best = table[position].topk(4)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-3)
    total = math.fsum(entry.logprob for entry in event.logprobs)
    assert event.cumulative_logprob == pytest.approx(total)
    assert sum(len(each.logprobs) for each in events) == 12
    assert events[-1].cumulative_logprob == pytest.approx(total)  # cumulative: the last one holds all


# --- counts ---


@pytest.mark.parametrize("serial", [False, True], ids=["batched", "serial"])
def test_usage_counts_tokens_and_times(model: PreTrainedModel, serial: bool) -> None:
    async def scenario(engine: EngineCore) -> None:
        requests = [EngineRequest(prompt_of(4 + i, i), greedy(3 + i, n=2), first_index=2 * i) for i in range(6)]
        events = await collect(engine, requests)
        for index, event in events.items():
            usage = event.usage
            assert usage is not None
            assert (usage.num_input_tokens, usage.num_output_tokens) == (4 + index // 2, 3 + index // 2)
            assert len(event.token_ids) == usage.num_output_tokens
            assert 0 <= usage.queue_s <= usage.ttft_s < 60
        assert engine.stats().generation_tokens == 2 * sum(3 + i for i in range(6))
        assert events[11].usage.queue_s > events[0].usage.queue_s  # type: ignore[union-attr]

    run_with_engine(scenario, model, max_num_seqs=2, batcher=one_by_one(model) if serial else None)


def test_ids_beyond_the_tokenizer_are_never_chosen() -> None:
    """A model's embedding often has more rows than its tokenizer has tokens."""
    wide = tiny_model("llama", vocab_size=VOCAB + 61, tie_word_embeddings=False)
    with torch.no_grad():
        wide.lm_head.weight[VOCAB:] *= 50

    async def scenario(engine: EngineCore) -> None:
        for params in (greedy(40), sampled(40, temperature=2.0)):
            assert max((await sequence(engine, params)).token_ids) < VOCAB

    run_with_engine(scenario, wide)
