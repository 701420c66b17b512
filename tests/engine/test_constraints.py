"""Constraints limit what a sequence says, in combination with everything else that the engine does with sequences."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.constraints.token_matcher import CompiledConstraint
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.step.drafts import PromptLookup
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.errors import GenerationFailed, as_request_error
from mlserver_torch_stream.types import (
    Constraint,
    ConstraintKind,
    FinishReason,
    ReasoningMarks,
    SamplingParameters,
    TokenEvent,
)
from tests.engine.emulated import laid_out, pipelined
from tests.engine.noted_matchers import note_matchers
from tests.engine.tiny import (
    EOS,
    VOCAB,
    byte_tokenizer,
    collect,
    idle,
    one_by_one,
    prompt_of,
    run,
    run_with_engine,
    running,
    tiny_model,
    until,
    watched,
)

_SAMPLED = SamplingParameters(max_tokens=150, temperature=1.2, seed=3)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
_WRITTEN = r'\{"name": ?"([^"\\]|\\.)*", ?"size": ?"(small|large)"\}'


def _compiled(codec: TextCodec, kind: str, source: Any, behind: ReasoningMarks | None = None) -> CompiledConstraint:
    text = source if isinstance(source, str) else json.dumps(source)
    return codec.submit(Constraint(ConstraintKind(kind), text, "field"), behind).result()


def _asked(constraint: CompiledConstraint | None, seeds: int = 6, **changes: Any) -> list[EngineRequest]:
    params = [replace(_SAMPLED, seed=seed, **changes) for seed in range(seeds)]
    return [
        EngineRequest(prompt_of(5 + seed, seed), each, seed, constraint=constraint) for seed, each in enumerate(params)
    ]


def _answers(engine: EngineCore, requests: Sequence[EngineRequest]) -> list[TokenEvent]:
    events = run(collect(engine, requests))
    assert idle(engine) or run(until(lambda: idle(engine))) is None
    return [events[number] for number in sorted(events)]


def _answer(model: PreTrainedModel, constraint: CompiledConstraint, **changes: Any) -> TokenEvent:
    with running(model, eos_token_ids=(EOS,)) as engine:
        return _answers(engine, _asked(constraint, 1, **changes))[0]


def _tokens(events: Sequence[TokenEvent]) -> list[tuple[int, ...]]:
    assert all(event.finish_reason is FinishReason.STOP for event in events), events
    return [event.token_ids for event in events]


@pytest.fixture(scope="module")
def schema(codec: TextCodec) -> CompiledConstraint:
    return _compiled(codec, "json_schema", _SCHEMA)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel, schema: CompiledConstraint) -> list[tuple[int, ...]]:
    """The tokens of each answer, computed alone in the engine, one token a step."""
    with running(model, eos_token_ids=(EOS,), drafts_forced=False) as engine:
        events = [_answers(engine, [request])[0] for request in _asked(schema)]
        assert engine.stats().forced_tokens == 0
    assert all(re.fullmatch(_WRITTEN, event.text) for event in events), [event.text for event in events]
    assert len({event.text for event in events}) > 3
    return _tokens(events)


@pytest.mark.long
def test_forced_tokens_take_no_step_of_their_own_and_change_no_token(
    model: PreTrainedModel, schema: CompiledConstraint, expected: list[tuple[int, ...]]
) -> None:
    with running(model, eos_token_ids=(EOS,)) as engine:
        for request, tokens in zip(_asked(schema), expected, strict=True):
            before = engine.stats()
            assert _tokens(_answers(engine, [request])) == [tokens]
            after = engine.stats()
            forced = after.forced_tokens - before.forced_tokens
            assert forced > 10  # of the names and of what stands between them
            # The last forced tokens end the answer: no other token comes of their step.
            assert after.decode_steps - before.decode_steps == len(tokens) - forced


@pytest.mark.long
def test_forced_tokens_have_the_log_probabilities_that_the_model_gives_them(
    model: PreTrainedModel, schema: CompiledConstraint, expected: list[tuple[int, ...]]
) -> None:
    alike = []
    for forced in (True, False):
        with running(model, eos_token_ids=(EOS,), drafts_forced=forced) as engine:
            answers = _answers(engine, _asked(schema, logprobs=True))
            assert _tokens(answers) == expected and (engine.stats().forced_tokens > 0) is forced
            alike.append([each.logprob for answer in answers for each in answer.logprobs])
    assert alike[0] == pytest.approx(alike[1], abs=1e-3) and len(alike[0]) == sum(map(len, expected))
    assert len(set(alike[0])) > 30


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="together"),
        pytest.param({"lookup": True}, id="prompt lookup", marks=pytest.mark.long),
        pytest.param({"cache_bytes": 30_000, "prefill_tokens": 8}, id="preemption"),
        pytest.param({"prefix_bytes": 2**20}, id="prefix cache", marks=pytest.mark.long),
        pytest.param({"prefill_tokens": None}, id="whole prompts", marks=pytest.mark.long),
    ],
)
def test_the_tokens_are_those_of_each_alone(
    model: PreTrainedModel, schema: CompiledConstraint, expected: list[tuple[int, ...]], more: dict[str, Any]
) -> None:
    given = {**more, "lookup": PromptLookup(4)} if more.get("lookup") else more
    with running(model, eos_token_ids=(EOS,), **given) as engine:
        assert _tokens(_answers(engine, _asked(schema))) == expected
        assert _tokens(_answers(engine, _asked(schema))) == expected
        stats = engine.stats()
    assert (stats.num_preemptions > 0) == ("cache_bytes" in more)
    assert (stats.prefix_cache_hit_tokens > 0) == ("prefix_bytes" in more)


@pytest.mark.long
def test_prompt_lookup_drafts_what_the_constraint_allows(model: PreTrainedModel, codec: TextCodec) -> None:
    """A text of only two letters repeats itself, so that some drafts are right."""
    two = _compiled(codec, "regex", "[ab]{60}")
    plain, drafted = [], None
    for lookup in (None, PromptLookup(4)):
        with running(model, lookup=lookup) as engine:
            plain.append(_tokens(_answers(engine, _asked(two))))
            drafted = engine.stats()
    assert plain[0] == plain[1]
    assert drafted is not None and 0 < drafted.accepted_draft_tokens <= drafted.draft_tokens


@pytest.mark.long
def test_a_model_that_is_served_one_request_at_a_time_gives_the_same_tokens(
    model: PreTrainedModel, schema: CompiledConstraint, expected: list[tuple[int, ...]]
) -> None:
    with running(model, batcher=one_by_one(model), eos_token_ids=(EOS,)) as engine:
        assert _tokens(_answers(engine, _asked(schema))) == expected


def test_several_batches_in_flight_give_the_same_tokens(
    schema: CompiledConstraint, expected: list[tuple[int, ...]]
) -> None:
    with pipelined(laid_out(tiny_model("llama"), 3), eos_token_ids=(EOS,)) as (engine, _):
        assert _tokens(_answers(engine, _asked(schema))) == expected


def test_a_model_with_states_which_takes_no_drafts_is_constrained_too(schema: CompiledConstraint) -> None:
    with running(tiny_model("mamba2"), eos_token_ids=(EOS,)) as engine:
        events = _answers(engine, _asked(schema))
        assert engine.stats().forced_tokens == 0
    assert all(re.fullmatch(_WRITTEN, event.text) for event in events)


def test_a_forward_that_fails_leaves_the_others_their_tokens(
    model: PreTrainedModel, schema: CompiledConstraint, expected: list[tuple[int, ...]]
) -> None:
    culprit = prompt_of(9, 60)
    with running(model, eos_token_ids=(EOS,)) as engine, watched(model) as watch:
        watch.fail = lambda ids: RuntimeError("x") if any(culprit[-1:] == tuple(each[-1:]) for each in ids) else None
        bad = EngineRequest(culprit, _SAMPLED, 6, constraint=schema)
        *others, failed = _answers(engine, [*_asked(schema), bad])
    assert failed.finish_reason is FinishReason.ERROR
    assert _tokens(others) == expected


def test_answers_to_one_prompt_differ_and_each_matches(model: PreTrainedModel, schema: CompiledConstraint) -> None:
    request = EngineRequest(prompt_of(5), replace(_SAMPLED, n=4), constraint=schema)
    with running(model, eos_token_ids=(EOS,)) as engine:
        texts = [event.text for event in _answers(engine, [request])]
    assert len(set(texts)) == 4 and all(re.fullmatch(_WRITTEN, text) for text in texts)


@pytest.mark.parametrize(
    ("changes", "text", "reason"),
    [
        ({"logit_bias": {EOS: 100.0}}, "aaa", FinishReason.STOP),
        ({"logit_bias": {EOS: 100.0}, "min_tokens": 6}, "aaaaaa", FinishReason.STOP),
        ({"logit_bias": {EOS: 100.0}, "min_tokens": 20}, "a" * 9, FinishReason.STOP),
        ({"logit_bias": {EOS: 100.0}, "ignore_eos": True}, "a" * 9, FinishReason.STOP),
        ({"logit_bias": {EOS: -100.0}}, "a" * 9, FinishReason.STOP),
        ({"logit_bias": {EOS: -100.0}, "max_tokens": 9}, "a" * 9, FinishReason.STOP),
        ({"logit_bias": {EOS: 100.0}, "max_tokens": 2}, "aa", FinishReason.LENGTH),
        ({"logit_bias": {EOS: -100.0}, "stop": ("aaaa",)}, "", FinishReason.STOP),
        ({"logit_bias": {EOS: -100.0}, "temperature": 0.0}, "a" * 9, FinishReason.STOP),
        ({"logit_bias": {ord("b"): 100.0, EOS: -100.0}, "frequency_penalty": 2.0}, "a" * 9, FinishReason.STOP),
    ],
    ids=str,
)
def test_an_answer_ends_where_the_constraint_accepts_it(
    model: PreTrainedModel, codec: TextCodec, changes: dict[str, Any], text: str, reason: FinishReason
) -> None:
    letter = byte_tokenizer().convert_tokens_to_ids
    bias = {letter("b") if key == ord("b") else key: value for key, value in changes["logit_bias"].items()}
    answer = _answer(model, _compiled(codec, "regex", "a{3,9}"), **{**changes, "logit_bias": bias})
    assert (answer.text, answer.finish_reason) == (text, reason)


def test_a_stop_token_that_the_constraint_does_not_allow_ends_nothing(model: PreTrainedModel, codec: TextCodec) -> None:
    letters = byte_tokenizer().convert_tokens_to_ids(["a", "b"])
    bias = {letters[1]: 100.0, EOS: -100.0}
    for stop, text in ((letters[1], "aaaaa"), (letters[0], "")):
        answer = _answer(model, _compiled(codec, "regex", "a{5}c"), logit_bias=bias, stop_token_ids=(stop,))
        assert answer.text.removesuffix("c") == text and answer.finish_reason is FinishReason.STOP


def test_bad_words_go_before_forced_tokens(model: PreTrainedModel, codec: TextCodec) -> None:
    """If a bad word excludes the only token that the constraint allows, this sequence alone ends with an error."""
    either = _compiled(codec, "choice", ["left", "right"])
    assert _answer(model, either, bad_words=("l",)).text == "right"
    with running(model, eos_token_ids=(EOS,)) as engine:
        requests = _asked(either, 2)
        banned = replace(requests[0].sampling, bad_words=("t",))
        failed, other = _answers(engine, [replace(requests[0], sampling=banned), requests[1]])
    assert failed.finish_reason is FinishReason.ERROR and "the constraint allows" in str(failed.error)
    assert other.text in ("left", "right")


@pytest.mark.parametrize("source", ["hello[ab]{5}", "[ab]hello[ab]{5}"], ids=["first", "later"])
@pytest.mark.parametrize("more", [{}, {"logprobs": True}], ids=["plain", "log-probabilities"])
def test_a_forced_token_that_the_model_does_not_know_ends_its_sequence_before_the_forward(
    model: PreTrainedModel, source: str, more: dict[str, Any]
) -> None:
    """The tokenizer has a token for the whole word, and the model has no embedding for that token."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["hello"])
    constraint = _compiled(TextCodec(tokenizer), "regex", source)
    matcher = constraint.matcher([EOS], len(tokenizer))
    while not matcher.forced:
        matcher.accept(tokenizer.convert_tokens_to_ids("a"))
    assert matcher.forced[0] == tokenizer.convert_tokens_to_ids("hello") == VOCAB
    answer = _answer(model, constraint, **more)
    assert answer.finish_reason is FinishReason.ERROR and "the model does not know" in str(answer.error)
    assert len(answer.token_ids) == source.index("hello") // 4


@pytest.mark.parametrize("serial", [False, True])
def test_a_constraint_that_becomes_too_complex_ends_its_sequence_alone(
    model: PreTrainedModel, codec: TextCodec, schema: CompiledConstraint, serial: bool
) -> None:
    many = " | ".join(f'"a" "{number:04}"' for number in range(2500))  # at most 2,000 may be open at a time
    hard = EngineRequest(prompt_of(4), _SAMPLED, 0, constraint=_compiled(codec, "grammar", f"start: /[bc]/ ({many})"))
    easy = EngineRequest(prompt_of(6), _SAMPLED, 1, constraint=schema)
    with running(model, batcher=one_by_one(model) if serial else None, eos_token_ids=(EOS,)) as engine:
        failed, other = _answers(engine, [hard, easy])
    assert failed.finish_reason is FinishReason.ERROR and isinstance(failed.error, GenerationFailed)
    assert "the answer cannot be constrained" in str(failed.error) and "2000" in str(failed.error)
    assert as_request_error(failed.error).status == 422 and as_request_error(failed.error).field == "field"
    assert re.fullmatch(_WRITTEN, other.text)


def test_a_client_that_leaves_frees_its_sequence(model: PreTrainedModel, schema: CompiledConstraint) -> None:
    async def scenario(engine: EngineCore) -> None:
        stream = engine.submit(_asked(schema, 3))
        await anext(aiter(stream))
        stream.close()
        await until(lambda: idle(engine))

    run_with_engine(scenario, model, eos_token_ids=(EOS,))


def test_the_matchers_of_ended_answers_are_freed_without_a_garbage_collection(
    model: PreTrainedModel, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some answers end by themselves; for another one, the client leaves."""
    matchers = note_matchers(monkeypatch)
    constraint = _compiled(codec, "json_schema", _SCHEMA)

    async def leaves(engine: EngineCore) -> None:
        stream = engine.submit(_asked(constraint, 1))
        await anext(aiter(stream))
        stream.close()
        await until(lambda: idle(engine))

    gc.disable()
    try:
        with running(model, eos_token_ids=(EOS,)) as engine:
            _answers(engine, [*_asked(constraint, 1, n=2), replace(_asked(constraint, 1)[0], first_index=2)])
            run(leaves(engine))
            _answers(engine, [EngineRequest(prompt_of(3), SamplingParameters(max_tokens=3))])  # the last step is gone
            assert len(matchers) == 4 and [each() for each in matchers] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.long
@pytest.mark.parametrize("behind", ["/>", "<s>"], ids=["text", "a special token"])
def test_a_constraint_behind_a_text_begins_with_the_end_of_that_text(
    model: PreTrainedModel, codec: TextCodec, behind: str
) -> None:
    constraint = _compiled(codec, "choice", ["yes", "no"], ReasoningMarks(behind))
    tokenizer = byte_tokenizer()
    ends = tokenizer.encode(behind, add_special_tokens=False)
    bias = {token_id: 4.0 for token_id in ends}  # so that it comes some time
    found = 0
    with running(model, eos_token_ids=(EOS,)) as engine:
        asked = _asked(constraint, 8, logit_bias=bias, skip_special_tokens=False, max_tokens=200)
        for answer in _answers(engine, asked):
            if answer.finish_reason is FinishReason.STOP:
                reasoning, _, said = tokenizer.decode(answer.token_ids).rpartition(behind)
                assert said in ("yes", "no") and behind not in reasoning
                found += 1
    assert found > 0


@pytest.mark.parametrize("begin", ["<t>", "<s>", "<s>t>"], ids=["text", "a special token", "both"])
def test_an_answer_that_does_not_begin_to_reason_matches_from_its_start(codec: TextCodec, begin: str) -> None:
    constraint = _compiled(codec, "choice", ["yes", "no"], ReasoningMarks("/>", begin))
    for text, whole in (("yes", True), ("no", True), (f"{begin}Hm, no/>yes", True), ("Hm/>yes", False), (begin, False)):
        matcher = constraint.start.deep_copy()
        ids = byte_tokenizer().encode(text, add_special_tokens=False)
        assert (all(map(matcher.consume_token, ids)) and matcher.is_accepting()) == whole, text
