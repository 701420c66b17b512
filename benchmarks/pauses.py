"""Simulates the pauses of a stream while sixteen prompts of 128 to 2,000 tokens arrive, for several `step_target`.

``python -m benchmarks.pauses`` prints the table of docs/scaling.md. The batcher, the scheduler and the cost model are
the real code. The model computes nothing and only moves the clock, by a time that follows from the step's tokens.
"""

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

from mlserver_torch_stream.engine import request_state
from mlserver_torch_stream.engine.api import EngineRequest, Mailbox
from mlserver_torch_stream.engine.cache.pages import Batch, CacheSpec, LayerGroup
from mlserver_torch_stream.engine.forward.interface import Logits
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.sampling.sampler import SamplerFactory
from mlserver_torch_stream.engine.scheduler.queue import SchedulerLimits
from mlserver_torch_stream.engine.step import continuous
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.types import SamplingParameters
from tests.engine.schedule_model import LOOP
from tests.engine.tiny import spelled
from tests.engine.tiny_models import VOCAB, byte_tokenizer

# Milliseconds of a step, of a row, of a prompt token, and of a prompt token for each key before it, on two cores.
COSTS = {"135 million": (12, 1.5, 0.45, 0.00014), "1.1 billion": (90, 9, 4.2, 0.0008)}
CODEC = TextCodec(byte_tokenizer())
PROMPTS, ANSWER, RUNS = 16, 16, 10


class SimulatedModel:
    """A forward whose answers repeat one character. It stands for the module ``time``, too: ``now`` is in seconds."""

    def __init__(self, name: str, character: str, dice: random.Random) -> None:
        self.now, self._costs, self._ids, self._dice = 0.0, COSTS[name], spelled(character), dice

    def monotonic(self) -> float:
        return self.now

    def __call__(self, batch: Batch, cache: object) -> Logits:
        chunks = [(each.count, each.start + each.count / 2) for each in batch.sequences if each.wanted < each.count]
        tokens, keys = sum(count for count, _ in chunks), sum(count * before for count, before in chunks)
        base, per_row, per_token, per_key = self._costs
        milliseconds = base + per_row * (batch.tokens - tokens) + per_token * tokens + per_key * keys
        self.now += self._dice.uniform(0.95, 1.05) * milliseconds / 1000
        ends = [end for each in batch.sequences for end in range(each.length - each.wanted, each.length)]
        return Logits(torch.empty(len(ends), VOCAB), [self._ids[(end + 1) % len(self._ids)] for end in ends])


def simulate(name: str, target: float | None, character: str, seed: int) -> tuple[float, float]:
    """Returns the stream's longest pause in ms and the tokens per second, until every prompt has its first token.

    ``target`` is in ms; None means that `step_target` is not set.
    """
    dice, arrivals, requests = random.Random(seed), list[float](), list[RequestState]()
    model, step_target = SimulatedModel(name, character, dice), (target or 500) / 1000
    cache: Any = None  # the model reads none
    limits = SchedulerLimits(32, 512, (4000,), 10**9, beside_budget=None if target else 128)
    spec, samplers = CacheSpec(16, (LayerGroup((0,), token_bytes=1),)), SamplerFactory(CODEC, VOCAB)

    def add(size: float, answer: int) -> SequenceState:
        prompt = tuple(dice.choices(range(VOCAB), k=3 * round(size / 3)))  # the answer begins with a whole character
        sampling = SamplingParameters(max_tokens=answer, temperature=0.0, ignore_eos=True)
        requests.append(RequestState(EngineRequest(prompt, sampling), Mailbox(LOOP, 1, id), CODEC, (), 10**6))
        batcher.add(requests[-1])
        return requests[-1].sequences[0]

    def step_until_all_have(tokens: int) -> None:
        while any(len(request.sequences[0].tokens) < min(tokens, request.max_tokens) for request in requests):
            batcher.step(deliver, lambda: None, lambda: None)

    def deliver(sequences: Sequence[SequenceState]) -> None:
        if any([each.take_events() and each is stream for each in sequences]):
            arrivals.append(model.now)

    with torch.inference_mode(), patch.object(continuous, "time", model), patch.object(request_state, "time", model):
        batcher = continuous.ContinuousBatcher(model, cache, samplers, limits, spec, step_target=step_target)
        stream = add(60, 10**5)
        step_until_all_have(20)
        add(2000, 1)  # shows what prompts cost
        step_until_all_have(20)
        step_until_all_have(len(stream.tokens) + 100)
        began, tokens = model.now, -batcher.stats.prefill_tokens - batcher.stats.generation_tokens
        for _ in range(PROMPTS):
            add(math.exp(dice.uniform(math.log(128), math.log(2000))), ANSWER)
        step_until_all_have(1)
        tokens += batcher.stats.prefill_tokens + batcher.stats.generation_tokens
        rate = tokens / (model.now - began)
        step_until_all_have(len(stream.tokens) + 3)  # ends the last pause
    return 1000 * max(later - earlier for earlier, later in pairwise(arrivals) if later > began), rate


def main() -> None:
    heads = [f"{name}: longest pause | characters of three tokens | tokens/s" for name in COSTS]
    print(f"| `step_target` | {' | '.join(heads)} |\n|{'---|' * (1 + 3 * len(heads))}")
    usual = dict[str, float]()
    for target in (None, 1000, 500, 250, 100):
        cells = [f"{target:,}" if target else "not set"]
        for name in COSTS:
            one, three = ([simulate(name, target, text, seed) for seed in range(RUNS)] for text in "a日")
            rate = sum(rate for _, rate in one)
            cells += [f"{max(pause for pause, _ in runs):,.0f} ms" for runs in (one, three)]
            cells += [f"{rate / usual.setdefault(name, rate):.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
