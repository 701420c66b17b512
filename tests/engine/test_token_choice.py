"""An error in choosing one token ends only its sequence, and the earlier tokens of that sequence are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.constraints.token_matcher import CompiledConstraint
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.types import Constraint, ConstraintKind, FinishReason, GenerationRules, TokenEvent
from tests.engine.tiny import byte_tokenizer, collect, greedy, idle, prompt_of, run, running, until

PROMPT = 5


class BrokenGrammar:
    """A matcher that raises when it consumes a token."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def deep_copy(self) -> BrokenGrammar:
        return BrokenGrammar(self._matcher.deep_copy())

    def consume_tokens(self, token_ids: Sequence[int]) -> None:
        if token_ids:
            raise ValueError("the grammar is broken")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


class BrokenId(int):
    """A token id in a model's rules that raises when it is compared with the id that a constraint forces."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the rule is broken")


def compiled(expression: str) -> CompiledConstraint:
    return TextCodec(byte_tokenizer()).submit(Constraint(ConstraintKind.REGEX, expression, "field")).result()


def both(engine: EngineCore, constraint: CompiledConstraint) -> tuple[TokenEvent, TokenEvent]:
    """Returns the last events of two answers in the same steps, one with the constraint and one without."""

    async def scenario() -> tuple[TokenEvent, TokenEvent]:
        failing, other = await asyncio.gather(
            collect(engine, [EngineRequest(prompt_of(PROMPT), greedy(20), constraint=constraint)]),
            collect(engine, [EngineRequest(prompt_of(9, 1), greedy(20))]),
        )
        await until(lambda: idle(engine), "an idle engine")
        return failing[0], other[0]

    failing, other = run(scenario())
    assert other.finish_reason is FinishReason.LENGTH, other.error
    assert failing.finish_reason is FinishReason.ERROR
    assert engine.stats().generation_tokens == len(failing.token_ids) + len(other.token_ids)
    return failing, other


def test_a_matcher_that_cannot_accept_a_token_ends_its_sequence_alone(model: PreTrainedModel) -> None:
    constraint = compiled("[a-e]{20}")
    broken = replace(constraint, start=BrokenGrammar(constraint.start))  # type: ignore[arg-type]
    with running(model, prefill_tokens=64) as engine:
        failing, _ = both(engine, broken)
    assert "ValueError" in str(failing.error) and not failing.token_ids


def test_a_rule_that_cannot_judge_a_forced_token_ends_its_sequence_alone(model: PreTrainedModel) -> None:
    rules = GenerationRules(suppressed=(BrokenId(7),))
    with running(model, prefill_tokens=64, rules=rules) as engine:
        failing, _ = both(engine, compiled("hello [a-e]{20}"))
    assert "ValueError" in str(failing.error) and not failing.token_ids


@contextmanager
def nan_at(model: PreTrainedModel, position: int) -> Iterator[None]:
    """Sets the logits at this position to NaN, in all sequences."""

    def spoil(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        kept = kwargs["logits_to_keep"]  # the packed tokens whose logits are wanted
        output.logits[0, kwargs["position_ids"][0, kept] == position] = torch.nan
        return output

    hook = model.register_forward_hook(spoil, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("forced", ["hello world", "hi"])
def test_forced_tokens_before_a_row_that_fails_are_counted(model: PreTrainedModel, forced: str) -> None:
    """The first token is sampled, forced ones follow in the next step, and the logits after the last are NaN."""
    last = PROMPT + len(forced)  # the position of the last forced token
    with running(model, prefill_tokens=64) as engine, nan_at(model, last):
        request = EngineRequest(prompt_of(PROMPT), greedy(30), constraint=compiled(f"[ab]{forced}[ab]{{5}}"))
        event = run(collect(engine, [request]))[0]
        stats = engine.stats()
    assert event.finish_reason is FinishReason.ERROR and event.usage is not None
    assert stats.forced_tokens == len(forced)
    assert stats.generation_tokens == event.usage.num_output_tokens == len(event.token_ids) == 1 + len(forced)
