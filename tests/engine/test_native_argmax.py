"""The kernels return the index of each row's first largest logit, and sequences get the same tokens as without it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.forward.interface import Forward, Logits
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.quantise import ROUNDED
from mlserver_torch_stream.engine.sampling.candidates import UNDECIDED
from mlserver_torch_stream.engine.sampling.row_sampler import LogitAdjuster, RowSampler
from mlserver_torch_stream.engine.sampling.sampler import SampledToken, sample
from mlserver_torch_stream.engine.step.drafts import PromptLookup
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.types import Constraint, ConstraintKind, SamplingParameters
from tests.engine.argmax_check import check_argmax, give_ties_and_infinities
from tests.engine.tiny import byte_tokenizer, collect, greedy, prompt_of, run, running, tokens_of
from tests.engine.tiny_models import tiny_model


@pytest.mark.parametrize("vocab_size", [288, 259, 1031])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_argmax_is_that_of_the_logits(vocab_size: int, kind: str, threads: int, folder: Path) -> None:
    """Steps have any number of rows, with ties, NaN and infinities; 259 and 1031 tokens need columns of padding."""
    model = tiny_model("llama", vocab_size=vocab_size, tie_word_embeddings=False)
    give_ties_and_infinities(model, infinite=kind != "int8")
    model = model.to(torch.float32 if kind == "float32" else torch.bfloat16)
    with torch.inference_mode():
        forward = NativeForward(model, KernelOptions(threads, folder), ROUNDED["int8"] if kind == "int8" else None)
        found = check_argmax(model, forward)
    assert -1 in found and len(set(found)) > 10
    assert max(found) < -(-vocab_size // 2), "the first of two equal logits"


def test_logits_below_zero_lose_to_no_padding(folder: Path) -> None:
    """The padding's logits are 0."""
    model = tiny_model("llama", vocab_size=259, tie_word_embeddings=False)
    model.get_output_embeddings().weight.data.zero_()
    model.get_output_embeddings().weight.data[:, 0] = torch.linspace(1, 2, 259)
    with torch.inference_mode():
        forward = NativeForward(model, KernelOptions(2, folder))
        found = check_argmax(model, forward)
    assert {0, 258} == set(found), "the first hidden value has either sign"


class Bare:
    """A forward whose logits have neither the largest indices nor draws."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __call__(self, batch: Batch, cache: PagedCache) -> Logits:
        return Logits(self._forward(batch, cache).tensor)


class Noted:
    """Records the token ids that the forward's draws have chosen."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.decided: list[int] = []

    def __call__(self, batch: Batch, cache: PagedCache) -> Logits:
        logits = self._forward(batch, cache)

        def noted(tensor: torch.Tensor, indices: Sequence[int], rows: Sequence[RowSampler]) -> list[int]:
            assert logits.row_draw is not None
            token_ids = logits.row_draw(tensor, indices, rows)
            self.decided += [token_id for token_id in token_ids if token_id != UNDECIDED]
            return token_ids

        return replace(logits, row_draw=noted)


def sampled(**changes: Any) -> SamplingParameters:
    return SamplingParameters(**{"max_tokens": 20, "temperature": 1.0, "seed": 4, **changes})


def test_all_sequences_get_the_tokens_that_they_get_from_torch_alone(folder: Path) -> None:
    """Greedy rows run beside sampled, edited, constrained and drafted ones, and beside a prompt in chunks."""
    model = tiny_model("llama")
    constraint = Constraint(ConstraintKind.REGEX, "hello [a-e]{9}", "field")
    compiled = TextCodec(byte_tokenizer()).submit(constraint).result()
    repeated = [5, 6, 7, 8] * 6
    requests = [
        *(EngineRequest(prompt_of(length, length), greedy(20)) for length in (3, 40, 9)),
        EngineRequest(tuple(repeated), greedy(30)),
        EngineRequest(prompt_of(5), greedy(20, repetition_penalty=1.4)),
        EngineRequest(prompt_of(6), greedy(20, logprobs=True)),
        EngineRequest(prompt_of(6), greedy(20, min_tokens=4, stop_token_ids=tuple(range(60)))),
        EngineRequest(prompt_of(6), greedy(20, logit_bias={7: 30.0})),
        EngineRequest(prompt_of(7), sampled(n=2)),
        EngineRequest(tuple(repeated), sampled(temperature=0.3, top_p=0.9)),
        EngineRequest(prompt_of(4), sampled(min_p=0.02, repetition_penalty=1.2)),
        EngineRequest(prompt_of(4), sampled(top_k=30, logprobs=True)),
        EngineRequest(prompt_of(8), greedy(20), constraint=compiled),
    ]

    noted: list[Noted] = []

    def with_notes(forward: Forward) -> Noted:
        noted.append(Noted(forward))
        return noted[0]

    def answers(wrap: Any) -> list[dict[int, tuple[int, ...]]]:
        async def scenario() -> list[Any]:
            return await asyncio.gather(*(collect(engine, [request]) for request in requests))

        with torch.inference_mode():
            forward = wrap(NativeForward(model, KernelOptions(2, folder)))
        with running(model, forward=forward, prefill_tokens=16, lookup=PromptLookup(4)) as engine:
            ends = run(scenario())
        return [{index: event.token_ids for index, event in end.items()} for end in ends]

    assert answers(with_notes) == answers(Bare)
    assert noted[0].decided, "the engine does not use the draws"


@pytest.mark.parametrize("beyond", ["large", "NaN"])
def test_logits_beyond_the_tokenizer_change_no_token(beyond: str, folder: Path) -> None:
    """The kernels compare the logits of all 288 rows of the head, while the tokenizer has only 200 ids."""
    model = tiny_model("llama", tie_word_embeddings=False)
    with torch.inference_mode():
        findings = check_batching(model)
        table = model.get_output_embeddings().weight
        table[250:252] = torch.nan if beyond == "NaN" else torch.stack([table[5], -table[5]]) * 1e3
        forward = NativeForward(model, KernelOptions(2, folder))

    def tokens(forward: Forward) -> list[int]:
        with running(model, forward=forward, findings=findings, vocab_size=200) as engine:
            return run(tokens_of(engine, prompt_of(9), greedy(20)))  # type: ignore[no-any-return]

    expected = tokens(Bare(forward))
    assert tokens(forward) == expected and max(expected) < 200


def test_only_greedy_rows_without_edits_or_logprobs_take_the_argmax() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    plain = [{}, {}, {"logprobs": True}, {"presence_penalty": 0.1}, {"min_tokens": 2}, {"temperature": 1.0, "top_k": 1}]
    rows = []
    for settings in plain:
        params = SamplingParameters(**settings)
        adjuster = LogitAdjuster(params, prompt_ids=(1,), vocab_size=50, end_ids=(2,))
        rows.append(RowSampler(params, adjuster, 50, 0, 0))
    indices = [4, 0, 5, 1, 3, 2]
    known = sample(logits, rows, indices, [40 + row for row in range(6)])
    ids = [choice.token_id for choice in known if isinstance(choice, SampledToken)]
    assert ids == [44, 40, *logits[indices[2:]].argmax(-1).tolist()]
    logits[4] = torch.nan
    failed, *others = sample(logits, rows, indices, [0, 0, 0, 0, -1, 0])
    assert "not finite" in str(failed) and all(isinstance(choice, SampledToken) for choice in others)
