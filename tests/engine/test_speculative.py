"""``speculative`` through the factory: the same tokens in fewer steps, or a refusal where drafts cannot be dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.build import BuiltEngine, build_engine
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.engine.step.drafts import PromptLookup
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
from tests.engine.tiny import (
    byte_tokenizer,
    collect,
    dictated,
    greedy,
    prompt_of,
    run,
    running,
    spelled,
)
from tests.engine.tiny import tiny_model as make

_PAGE = 8
DRAFTING = {"speculative": {"prompt_lookup": 6}}


def built(folder: Path, **extra: Any) -> BuiltEngine:
    settings = {"threads": 1, "kv_cache_memory": "8MiB", **extra}
    return build_engine(parse_settings(str(folder), settings, environ={}), resources=ProcessResources())


def answered(folder: Path, params: Any, **extra: Any) -> tuple[tuple[int, ...], int, int, int]:
    """Returns the tokens of an answer, and the numbers of its steps, drafts and accepted drafts."""
    one = built(folder, **extra)
    try:
        event = run(collect(one.engine, [EngineRequest(prompt_of(12), params)]))[0]
        stats = one.engine.stats()
    finally:
        one.shutdown()
    assert event.usage is not None and event.usage.num_output_tokens == len(event.token_ids)
    assert stats.generation_tokens == len(event.token_ids)
    return event.token_ids, stats.decode_steps, stats.draft_tokens, stats.accepted_draft_tokens


@pytest.mark.parametrize("fast_path", ["auto", "off"])
def test_an_answer_that_repeats_itself_comes_in_fewer_steps_with_the_same_tokens(
    tiny_model: Path, fast_path: str
) -> None:
    params = greedy(40, logit_bias={65: 1e3, 66: 1e3}, frequency_penalty=2.0)  # two tokens in turn
    plain = answered(tiny_model, params, fast_path=fast_path)
    tokens, steps, drafted, accepted = answered(tiny_model, params, fast_path=fast_path, **DRAFTING)
    assert tokens == plain[0] and set(tokens) == {65, 66}
    assert plain[1:] == (39, 0, 0)
    assert 0 < accepted <= drafted
    assert steps == plain[1] - accepted


def test_an_answer_that_quotes_its_prompt_is_drafted_from_it(model: PreTrainedModel) -> None:
    quote = spelled("a quick brown fox jumps over the lazy dog")
    findings = check_batching(model)
    prompt = tuple([*quote, *spelled(": ")])
    with (
        dictated(model, quote, len(prompt)),
        running(model, findings=findings, lookup=PromptLookup(8), prefill_tokens=64) as engine,
    ):
        event = run(collect(engine, [EngineRequest(prompt, greedy(len(quote)))]))[0]
        stats = engine.stats()
    assert list(event.token_ids) == quote
    assert stats.accepted_draft_tokens > 0
    assert stats.decode_steps == len(quote) - 1 - stats.accepted_draft_tokens


def test_the_next_turn_finds_the_pages_that_drafts_have_filled(model: PreTrainedModel) -> None:
    """As without drafts, these are all full pages of the prompt and of the answer except its last token."""
    quote = spelled("a quick brown fox jumps over the lazy dog, and over another")
    findings = check_batching(model)
    for length in range(len(quote) - _PAGE, len(quote)):  # the answers end on each offset in a page
        prompt = tuple([*quote, *spelled(": ")])
        turns = [prompt, (*prompt, *quote[:length], *spelled("!"))]
        with (
            dictated(model, quote, len(prompt)),
            running(
                model, findings=findings, lookup=PromptLookup(8), prefill_tokens=64, page_size=_PAGE, prefix_bytes=2**20
            ) as engine,
        ):
            first = run(collect(engine, [EngineRequest(turns[0], greedy(length))]))[0]
            assert list(first.token_ids) == quote[:length] and engine.stats().accepted_draft_tokens > 0
            second = run(collect(engine, [EngineRequest(turns[1], greedy(1))]))[0]
        written = len(prompt) + length - 1
        assert second.usage is not None
        assert second.usage.num_cached_tokens == written // _PAGE * _PAGE


def test_a_serial_engine_refuses_drafts_by_their_name(tiny_model: Path) -> None:
    with pytest.raises(LoadFailed, match=r"parameters\.extra\.speculative: .* one request at a time \(set by engine"):
        built(tiny_model, engine="serial", **DRAFTING)


def test_a_model_with_states_refuses_drafts_by_their_name(tmp_path: Path) -> None:
    make("lfm2").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(LoadFailed, match=r"parameters\.extra\.speculative: this model keeps states"):
        built(tmp_path, **DRAFTING)
