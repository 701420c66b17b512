"""Scores of prompts, that is the log-probabilities of their tokens, against transformers' log_softmax in float32."""

from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.cache.pages import PageScores
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.sampling.sampler import prompt_scores
from mlserver_torch_stream.engine.scheduler import scheduler
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.types import FinishReason, SamplingParameters, TokenEvent, TokenLogprob
from tests.engine.tiny import collect, greedy, idle, one_by_one, prompt_of, reference, run_with_engine, until

_CLOSE = 1e-4
_PAGE = 4  # tokens, of the engines of these tests
_TOKEN_BYTES = 2 * 3 * 2 * 8 * 4  # keys and values, layers, heads, their size, float32


def expected(model: PreTrainedModel, prompt: Sequence[int]) -> torch.Tensor:
    """The log-probabilities of all tokens after each token of the prompt."""
    with torch.inference_mode():
        return model(torch.tensor([list(prompt)])).logits[0].float().log_softmax(-1)


def check(model: PreTrainedModel, event: TokenEvent, prompt: Sequence[int], top: int) -> None:
    first, *others = event.prompt_logprobs
    assert (first.token_id, first.logprob, first.top) == (prompt[0], None, ())
    assert [each.token_id for each in others] == list(prompt[1:])
    table = expected(model, prompt)[:-1]
    own = table.gather(1, torch.tensor(list(prompt[1:]))[:, None])[:, 0]
    assert torch.tensor([each.logprob for each in others]) == pytest.approx(own, abs=_CLOSE)
    best = torch.tensor([[logprob for _, logprob in each.top] for each in others])
    assert best == pytest.approx(table.topk(top).values, abs=_CLOSE)


def scored(count: int, top: int) -> SamplingParameters:
    return greedy(count, prompt_logprobs=top)


@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("count", [0, 3])
def test_scores_are_those_of_transformers_in_chunks_and_batches(model: PreTrainedModel, top: int, count: int) -> None:
    prompts = [list(prompt_of(length, length)) for length in (1, 2, 17, 50)]
    prompts.append([*prompts[-1][:40], *prompt_of(6, 9)])

    async def scenario(engine: EngineCore) -> None:
        plain = EngineRequest(tuple(prompt_of(30, 5)), greedy(4), len(prompts))
        requests = [EngineRequest(tuple(each), scored(count, top), index) for index, each in enumerate(prompts)]
        for _ in range(2):  # the second time the prefix cache has their pages
            events = await collect(engine, [*requests, plain])
            for index, prompt in enumerate(prompts):
                assert events[index].finish_reason is FinishReason.LENGTH, events[index].error
                check(model, events[index], prompt, top) if len(prompt) > 1 else None
                assert list(events[index].token_ids) == (reference(model, prompt, count) if count else [])
            assert not events[len(prompts)].prompt_logprobs
        await until(lambda: idle(engine))

    run_with_engine(scenario, model, prefix_bytes=2**22)


def test_a_shared_prefix_is_computed_once(model: PreTrainedModel) -> None:
    shared = prompt_of(4 * _PAGE, 3)
    prompts = [[*shared, *prompt_of(9, seed)] for seed in (1, 2, 3)]

    async def scenario(engine: EngineCore) -> None:
        for position, prompt in enumerate(prompts):
            before = engine.stats().prefill_tokens
            events = await collect(engine, [EngineRequest(tuple(prompt), scored(0, 1))])
            check(model, events[0], prompt, 1)
            computed = engine.stats().prefill_tokens - before
            # The token before the first token without a score is computed again, for its logits.
            assert computed == (len(prompt) if position == 0 else 1 + 9)
            assert events[0].usage is not None and events[0].usage.num_cached_tokens == len(prompt) - computed
        # More alternatives than are kept: all of it is computed.
        before = engine.stats().prefill_tokens
        check(model, (await collect(engine, [EngineRequest(tuple(prompts[0]), scored(0, 3))]))[0], prompts[0], 3)
        assert engine.stats().prefill_tokens - before == len(prompts[0])

    run_with_engine(scenario, model, prefix_bytes=2**22)


async def computed_together(engine: EngineCore, model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> int:
    """Submits the prompts together, checks their scores, and returns how many of their tokens were computed."""
    before = engine.stats().prefill_tokens
    events = await collect(engine, [EngineRequest(tuple(each), scored(0, 1), i) for i, each in enumerate(prompts)])
    for index, prompt in enumerate(prompts):
        check(model, events[index], prompt, 1)
    return engine.stats().prefill_tokens - before


def test_prompts_of_one_step_continue_in_copies_of_the_last_page_that_they_share(model: PreTrainedModel) -> None:
    shared = prompt_of(4 * _PAGE, 3)
    prompts = [[*shared, *prompt_of(9, seed)] for seed in range(4)]

    async def scenario(engine: EngineCore) -> None:
        await collect(engine, [EngineRequest(tuple(shared), scored(0, 1))])
        assert await computed_together(engine, model, prompts) == len(prompts) * (1 + 9)

    run_with_engine(scenario, model, prefix_bytes=2**22, prefill_tokens=256)


def test_a_prefix_is_computed_once_of_prompts_that_arrive_together(model: PreTrainedModel) -> None:
    shared = prompt_of(4 * _PAGE, 3)
    prompts = [[*shared, *prompt_of(9, seed)] for seed in range(4)]

    async def scenario(engine: EngineCore) -> None:
        assert await computed_together(engine, model, prompts) == len(shared) + 9 + 3 * (1 + 9)

    run_with_engine(scenario, model, prefix_bytes=2**22, prefill_tokens=256)


def test_a_prefix_that_takes_several_steps_is_computed_once_too(model: PreTrainedModel) -> None:
    """Also a longer prefix that some of the prompts share."""
    shared = prompt_of(6 * _PAGE, 3)
    longer = [[*shared, *prompt_of(2 * _PAGE, seed)] for seed in (4, 5)]
    prompts = [[*prefix, *prompt_of(9, seed)] for prefix in longer for seed in range(3)]

    async def scenario(engine: EngineCore) -> None:
        once = len(shared) + 9 + 2 * _PAGE
        assert await computed_together(engine, model, prompts) == once + (1 + 2 * _PAGE + 9) + 4 * (1 + 9)

    run_with_engine(scenario, model, prefix_bytes=2**22, prefill_tokens=4 * _PAGE)


def test_a_page_whose_scores_are_known_is_written_before_it_is_copied(model: PreTrainedModel) -> None:
    """Scores stay cached longer than the page itself, which the first prompt of the step computes again."""
    shared = prompt_of(4 * _PAGE, 3)
    prompts = [[*shared, *prompt_of(9, seed)] for seed in range(3)]

    async def scenario(engine: EngineCore) -> None:
        await collect(engine, [EngineRequest(tuple(shared), scored(0, 1))])
        for seed in (98, 99):  # evicts the pages, then overwrites them
            await collect(engine, [EngineRequest(tuple(prompt_of(60, seed)), scored(0, 1))])
        assert await computed_together(engine, model, prompts) == len(shared) + 9 + 2 * (1 + 9)

    run_with_engine(scenario, model, prefix_bytes=10 * _PAGE * _TOKEN_BYTES, prefill_tokens=256)


def test_a_step_scores_a_bounded_number_of_rows(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_MAX_SCORED_ROWS", 7)
    rows: list[int] = []
    prompts = [prompt_of(length, length) for length in (40, 23, 5)]

    async def scenario(engine: EngineCore) -> None:
        rows.clear()  # those of the checks at load
        events = await collect(
            engine, [EngineRequest(tuple(each), scored(2, 1), index) for index, each in enumerate(prompts)]
        )
        assert 7 <= max(rows) <= 7 + len(prompts)  # and one of each sequence that decodes
        for index, prompt in enumerate(prompts):
            check(model, events[index], prompt, 1)

    hook = model.get_output_embeddings().register_forward_hook(lambda _, __, out: rows.append(out.shape[-2]))
    try:
        run_with_engine(scenario, model, prefill_tokens=64)
    finally:
        hook.remove()


def test_every_sequence_of_a_request_shows_the_scores(model: PreTrainedModel) -> None:
    prompt = prompt_of(21, 1)

    async def scenario(engine: EngineCore) -> None:
        for count in (0, 2):
            events = await collect(engine, [EngineRequest(tuple(prompt), scored(count, 1) if count else scored(0, 1))])
            check(model, events[0], prompt, 1)
            params = greedy(count, prompt_logprobs=1, n=3)
            events = await collect(engine, [EngineRequest(tuple(prompt), params, prompt_text="said")])
            assert sorted(events) == [0, 1, 2]
            for event in events.values():
                check(model, event, prompt, 1)
                assert event.prompt_text == "said" and event.finish_reason is FinishReason.LENGTH

    run_with_engine(scenario, model)


@pytest.mark.long
def test_preempted_prompts_are_scored_all_the_same(model: PreTrainedModel) -> None:
    prompts = [prompt_of(20, seed) for seed in range(6)]

    async def scenario(engine: EngineCore) -> None:
        events = await collect(
            engine, [EngineRequest(tuple(each), scored(60, 1), index) for index, each in enumerate(prompts)]
        )
        assert engine.stats().num_preemptions
        for index, prompt in enumerate(prompts):
            check(model, events[index], prompt, 1)
            assert list(events[index].token_ids) == reference(model, prompt, 60)

    run_with_engine(scenario, model, cache_bytes=200 * _TOKEN_BYTES)


@pytest.mark.parametrize(("params", "field"), [(scored(1, 0), "prompt_logprobs"), (greedy(0), "max_tokens")])
def test_the_serial_engine_refuses_scores_by_name(
    model: PreTrainedModel, params: SamplingParameters, field: str
) -> None:
    async def scenario(engine: EngineCore) -> None:
        with pytest.raises(InvalidInput) as refused:
            engine.submit([EngineRequest((1, 2), params)])
        assert refused.value.field == field

    run_with_engine(scenario, model, batcher=one_by_one(model))


def test_scores_have_float32_values_of_half_logits() -> None:
    logits = torch.randn(130, 50).bfloat16()
    token_ids = [position % 50 for position in range(130)]
    scores = prompt_scores(logits, token_ids, 2)
    table = logits.float().log_softmax(-1)
    for position, score in enumerate(scores):
        assert score.logprob == pytest.approx(float(table[position, token_ids[position]]), abs=1e-5)
    best = prompt_scores(logits, logits.argmax(-1).tolist(), 1)
    assert all(score.logprob == score.top[0][1] for score in best)  # the same bits, so that a reader sees it is greedy


def test_page_scores_are_bounded_and_serve_fewer_alternatives() -> None:
    pages = PageScores(max_logprobs=8)
    scores = [TokenLogprob(1, -0.5, ((1, -0.5), (2, -1.0)))]
    for digest in (b"a", b"b"):
        pages.keep(digest, scores, 2)
    assert pages.find(b"a", 1) == [TokenLogprob(1, -0.5, ((1, -0.5),))]
    assert pages.find(b"a", 2) == tuple(scores) and pages.find(b"a", 3) is None
    pages.keep(b"c", scores, 2)
    assert pages.find(b"b", 0) is None and pages.find(b"a", 0) is not None
    pages.keep(b"a", [TokenLogprob(1, -0.5)], 0)  # fewer alternatives replace nothing
    assert pages.find(b"a", 2) == tuple(scores)
