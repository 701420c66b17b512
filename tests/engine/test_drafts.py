"""Drafts, right or wrong, many or few, change no token, no end, no penalty and no log-probability."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.step.drafts import PromptLookup
from mlserver_torch_stream.types import FinishReason, SamplingParameters, TokenEvent
from tests.engine.tiny import (
    collect,
    dictated,
    greedy,
    prompt_of,
    reference,
    run,
    running,
    spelled,
    tiny_model,
    tokens_of,
)

PROMPT = prompt_of(9, 1)


class Told(PromptLookup):
    """Drafts the next four tokens of the known answers, with wrong tokens at positions where ``wrong`` is true."""

    def __init__(
        self, answers: dict[tuple[int, ...], Sequence[int]], wrong: Callable[[int], bool] = lambda position: False
    ) -> None:
        super().__init__(4)
        self._answers = answers
        self._wrong = wrong

    def drafts(self, sequence: SequenceState, running: int) -> list[int]:
        done, answer = len(sequence.tokens), self._answers[tuple(sequence.request.prompt)]
        ahead = enumerate(answer[done : done + 4], start=done)
        return [(token + 1) % 250 if self._wrong(position) else token for position, token in ahead]


def told(answer: Sequence[int], wrong: Callable[[int], bool] = lambda position: False) -> Told:
    return Told({PROMPT: answer}, wrong)


def ask(
    model: PreTrainedModel, params: SamplingParameters, lookup: PromptLookup | None = None, **more: Any
) -> tuple[TokenEvent, int]:
    """Returns the merged events of one answer, and the number of its decode steps."""
    with running(model, prefill_tokens=64, lookup=lookup, **more) as engine:
        event = run(collect(engine, [EngineRequest(PROMPT, params)]))[0]
        return event, engine.stats().decode_steps


@pytest.mark.parametrize(
    "wrong", [lambda at: False, lambda at: True, lambda at: at % 3 == 0], ids=["no", "all", "some"]
)
def test_greedy_tokens_are_those_without_drafts(model: PreTrainedModel, wrong: Callable[[int], bool]) -> None:
    expected = reference(model, PROMPT, 40)
    event, steps = ask(model, greedy(40), told(expected, wrong))
    assert list(event.token_ids) == expected
    assert (steps < 12) == (not wrong(1) and not wrong(0))


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "top_p": 0.9, "seed": 8, "logprobs": True, "top_logprobs": 2},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 6},
    ],
    ids=["sampled", "log-probabilities", "penalties"],
)
def test_sampled_tokens_and_their_log_probabilities_are_those_without_drafts(
    model: PreTrainedModel, more: dict[str, Any]
) -> None:
    params = SamplingParameters(max_tokens=30, ignore_eos=True, **more)
    plain, steps = ask(model, params)
    event, fewer = ask(model, params, told(plain.token_ids, lambda position: position % 5 == 4))
    assert event.token_ids == plain.token_ids and fewer < steps
    assert [each.logprob for each in event.logprobs] == pytest.approx(
        [each.logprob for each in plain.logprobs], abs=1e-4
    )


def test_an_answer_ends_in_the_middle_of_its_drafts(model: PreTrainedModel) -> None:
    answer, findings = spelled("one two three four"), check_batching(model)
    with dictated(model, answer, len(PROMPT)):
        stop, _ = ask(model, greedy(15, stop=("thr",)), told(answer), findings=findings)
        assert stop.text == "one two " and stop.stop_reason == "thr" and len(stop.token_ids) == len("one two thr")
        end, _ = ask(model, greedy(15, stop_token_ids=(answer[6],)), told(answer), findings=findings)
        assert list(end.token_ids) == answer[: answer.index(answer[6]) + 1] and end.finish_reason is FinishReason.STOP
        length, _ = ask(model, greedy(7), told(answer), findings=findings)
        assert length.text == "one two" and length.finish_reason is FinishReason.LENGTH


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "bloom"])
def test_windows_and_rows_take_drafts_beside_other_sequences(family: str) -> None:
    model = tiny_model(family)
    prompts = [prompt_of(5, 2), prompt_of(17, 3), PROMPT]
    expected = [reference(model, prompt, 24) for prompt in prompts]
    answers = dict(zip(map(tuple, prompts), expected, strict=True))

    async def together(engine: Any) -> list[list[int]]:
        return list(await asyncio.gather(*(tokens_of(engine, prompt, greedy(24)) for prompt in prompts)))

    lookup = Told(answers, lambda position: position % 4 == 1)
    with running(model, prefill_tokens=64, lookup=lookup) as engine:
        assert run(together(engine)) == expected
