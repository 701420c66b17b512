"""The scheduler alone, driven by random arrivals, steps, failures, ends and departures: what must hold at every moment.

`make test` tries 50 schedules. For 10,000: ``SCHEDULES=10000 pytest --hypothesis-profile random`` on this file.
"""

from __future__ import annotations

import os
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mlserver_torch_stream.engine.kv_cache.cache_spec import CacheSpec, LayerGroup
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.scheduling.scheduler_limits import SchedulerLimits

from .schedule_model import CONTEXT, ModelledEngine, choice, key_after, request_of

FULL = LayerGroup((0,), token_bytes=4)
SPEC = CacheSpec(4, (FULL,))


def limits_of(spec: CacheSpec = SPEC, *, pages: int = 200, **more: Any) -> SchedulerLimits:
    given = {"max_num_seqs": 8, "token_budget": 16, "pages": (pages,) * len(spec.groups), "cache_bytes": 10**9}
    return SchedulerLimits(**{**given, "prefix_bytes": 10**9, **more})


def engine_of(spec: CacheSpec = SPEC, drafts: Any = None, **more: Any) -> ModelledEngine:
    return ModelledEngine(limits_of(spec, **more), spec, drafts)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def some_drafts(sequence: SequenceState) -> list[int]:
    """Guesses up to three tokens; every fifth guess is wrong."""
    key = 0
    for token in [*sequence.request.prompt, *sequence.tokens]:
        key = key_after(key, token)
    drafts = []
    for step in range(key % 4):
        drafts.append(choice(key, sequence.index) + ((key >> 9) % 5 == step))
        key = key_after(key, drafts[-1])
    return drafts


Job = tuple[int, int, int, int, int, int]
GROUPS = [
    (FULL,),
    (LayerGroup((0,), window=9, token_bytes=4),),
    (FULL, LayerGroup((1,), window=5, token_bytes=12)),
    (FULL, LayerGroup((1,), chunk=6, token_bytes=2)),
    (LayerGroup((0,), window=3, token_bytes=4), LayerGroup((1,), chunk=8, token_bytes=4), FULL),
]


def engine_from(dice: random.Random) -> ModelledEngine:
    """Returns an engine with memory for a few sequences, so that they are preempted often."""
    spec = CacheSpec(dice.choice([1, 2, 4, 16]), dice.choice(GROUPS), dice.choice([0, 0, 0, 40]))
    sequences, least = dice.randint(1, 7), spec.pages(dice.randint(60, CONTEXT)) + 1
    pages = tuple(least + dice.randint(0, least) for _ in spec.groups)
    everything = sum(count * spec.page_bytes(group) for group, count in enumerate(pages)) + sequences * spec.state_bytes
    limits = SchedulerLimits(
        max_num_seqs=sequences,
        token_budget=dice.choice([None, dice.randint(1, 8), dice.randint(8, 60)]),
        pages=pages,
        cache_bytes=dice.randint(everything * 2 // 3, everything),
        prefix_bytes=dice.choice([0, everything // 4, everything]),
        stages=dice.choice([1, 1, 2, 3]),
        whole_prompts=dice.random() < 0.25,
        prefill_floor=dice.choice([1, 8]),
    )
    return ModelledEngine(limits, spec, some_drafts if dice.random() < 0.5 else None)


def job_from(dice: random.Random) -> Job:
    """Returns a text, its tokens, tokens of its own, tokens to generate, sequences and the priority."""
    n = dice.choice([1, 1, 1, 2, 3])
    tokens = dice.randint(1, 60 // n), dice.randint(0, 3), dice.randint(1, 50 // n)
    return (dice.randint(0, 2), *tokens, n, dice.choice([0, 1, 1, 2]))


def event_from(dice: random.Random) -> tuple[str, Any]:
    event = dice.choices(
        ["request", "open", "grow", "seal", "cancel", "fail", "nan", "steps"], [6, 2, 4, 2, 1, 1, 1, 8]
    )[0]
    return event, job_from(dice) if event in ("request", "open") else dice.randint(1, 60 if event == "seal" else 12)


TEXTS = [prompt_of(CONTEXT, seed) for seed in range(3)]


class Visitors:
    """Turns events into what clients do to an engine."""

    def __init__(self, engine: ModelledEngine) -> None:
        self.engine = engine
        self.growing: list[tuple[RequestState, list[int]]] = []  # open requests, and what their prompts become
        self.number = 0

    def happens(self, event: str, value: Any) -> None:
        getattr(self, event)(value)

    def request(self, job: Job, *, is_open: bool = False) -> None:
        text, shared, own, tokens, n, priority = job
        self.number += 1
        prompt = [*TEXTS[text][:shared], *(2000 + self.number for _ in range(own))][: CONTEXT - 1]
        request = request_of([] if is_open else prompt, tokens, n, is_open=is_open, priority=priority)
        if self.engine.add(request) and is_open:
            self.growing.append((request, prompt))

    def open(self, job: Job) -> None:
        self.request(job, is_open=True)

    def grow(self, count: int) -> None:
        for request, text in self.growing[-2:]:
            known = len(request.prompt)
            if not self.engine.refuses(request, text[: known + count]):
                request.grow(text[known : known + count], False)

    def seal(self, changed: int) -> None:
        """The whole prompt is what was announced, or differs from some place on, or is shorter."""
        if self.growing:
            request, text = self.growing.pop()
            whole = [*text[:changed], *(token + 5000 for token in text[changed : changed + 30])]
            self.end(request, text if changed > 40 else whole)

    def end(self, request: RequestState, prompt: list[int]) -> None:
        if self.engine.refuses(request, prompt) or not prompt:
            self.engine.cancel(request)
        elif not request.finished:
            request.grow(prompt, True)

    def cancel(self, index: int) -> None:
        if self.engine.requests:
            self.engine.cancel(self.engine.requests[index % len(self.engine.requests)])

    def fail(self, culprit: int) -> None:
        self.engine.fail_next = culprit

    def nan(self, index: int) -> None:
        """The logits of a running sequence hold NaN: it ends, and nobody goes on from its keys."""
        running = [each for each in self.engine.scheduler._accounts if each.tokens and each not in self.engine.busy]
        if running:
            self.engine.forget(running[index % len(running)])

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()


@settings(max_examples=int(os.environ.get("SCHEDULES", "50")), deadline=None)
@given(seed=st.integers(0, 2**40), count=st.integers(0, 60))
def test_whatever_comes_and_goes_every_sequence_gets_its_tokens(seed: int, count: int) -> None:
    """No page is lost or written by two, a query sees the keys of its own tokens, and everything ends.

    The model of the forward checks each read and write (`schedule_model.py`), and counts references after each step.
    """
    dice = random.Random(seed)
    engine = engine_from(dice)
    visitors = Visitors(engine)
    for _ in range(count):
        visitors.happens(*event_from(dice))
    engine.fail_next = None
    for request, text in visitors.growing:
        visitors.end(request, text)
    engine.run()
    engine.check_end()


def test_a_step_without_work_has_an_empty_plan() -> None:
    assert not engine_of().scheduler.schedule()
