"""What a model answers to each prompt alone, and a check that batched sequences over pages get the same answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.forward.model_step import Way
from tests.engine.page_driver import Driven, PageDriver
from tests.engine.tiny_models import prompt_of, reference

COMMON = 34  # tokens at the beginning of two prompts
Right = Callable[..., None]


class Answers:
    """The model's tokens and logits for each prompt alone, computed once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._tokens: dict[tuple[int, ...], list[int]] = {}
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}

    def to(self, prompt: Sequence[int]) -> list[int]:
        if tuple(prompt) not in self._tokens:
            self._tokens[tuple(prompt)] = reference(self._model, prompt, 12)
        return self._tokens[tuple(prompt)]

    def check(self, sequence: Driven) -> None:
        """Raises unless the tokens equal those of ``generate``, and all logits those of one call without a cache."""
        assert (len(sequence.prompt), sequence.answer) == (
            len(sequence.prompt),
            self.to(sequence.prompt)[: len(sequence.answer)],
        )
        tokens = tuple(sequence.tokens)
        if tokens not in self._logits:
            with torch.inference_mode():
                self._logits[tokens] = self._model(torch.tensor([tokens]), use_cache=False).logits[0]
        for position, logits in sequence.logits.items():
            torch.testing.assert_close(logits, self._logits[tokens][position], rtol=1e-3, atol=2e-3)


def check(model: PreTrainedModel, way: Way, page_size: int, answers: Answers, chunked: bool = True) -> None:
    """Raises if a sequence gets other tokens or logits than it gets alone."""
    driver = PageDriver(model, way, page_size, chunked=chunked)

    def right(*sequences: Driven) -> None:
        for each in sequences:
            answers.check(each)

    joins_and_leaves(driver, right)
    goes_on_after_a_preemption(driver, right)
    if not driver.has_states:
        shares_a_beginning(driver, right)
        verifies_drafts(driver, right, answers.to(prompt_of(17, 1)))


def joins_and_leaves(driver: PageDriver, right: Right) -> None:
    """Computes chunks of prompts, of several sizes, beside decoding in changing orders; two answers to one prompt."""
    a, b, c, d, e = (driver.join(prompt_of(length, seed)) for seed, length in enumerate((5, 17, 3, 23, 1)))
    driver.step([(a, 5), driver.some(b, 7)])
    driver.step([(a, 1), driver.some(b, 6), (c, 3)])
    driver.step([driver.some(b, 4), (c, 1), (a, 1)])
    driver.leave(c)
    driver.step([driver.some(d, 11), (e, 1), (a, 1), (b, 1)])
    driver.step([driver.some(d, 12), (a, 1), (b, 1), (e, 1)])
    driver.leave(a)
    twin = driver.fork(b)
    for _ in range(4):
        driver.step([(b, 1), (d, 1), (twin, 1), (e, 1)])
    right(a, b, c, d, e, twin)
    for each in (b, d, e, twin):
        driver.leave(each)


def goes_on_after_a_preemption(driver: PageDriver, right: Right) -> None:
    a, b = driver.join(prompt_of(9, 5)), driver.join(prompt_of(17, 1))
    driver.step([(a, 9), (b, 17)])
    for _ in range(3):
        driver.step([(a, 1), (b, 1)])
    driver.preempt(a)
    driver.step([(b, 1)])
    driver.step([(b, 1), driver.some(a, 10)])  # the prompt and a part of the answer
    driver.step([driver.some(a, 3), (b, 1)])
    driver.step([(a, 1), (b, 1)])
    right(a, b)
    driver.leave(a)
    driver.leave(b)


def shares_a_beginning(driver: PageDriver, right: Right) -> None:
    """At every page boundary, a sequence shares all pages before it with another, and computes the others."""
    begin = list(prompt_of(COMMON, 6))
    first = driver.join([*begin, 1, 2, 3], keeps=True)
    driver.step([(first, 20)])
    driver.step([(first, len(first.tokens) - 20)])
    beside = [
        driver.join_beside(first, [*begin, 9, 8], shared)
        for shared in range(driver.page_size, COMMON + 1, driver.page_size)
    ]
    driver.step([(first, 1), *((each, len(each.tokens) - each.computed) for each in beside)])
    for _ in range(2):
        driver.step([(each, 1) for each in (first, *beside)])
    right(first, *beside)
    for each in (first, *beside):
        driver.leave(each)


def verifies_drafts(driver: PageDriver, right: Right, known: list[int]) -> None:
    """Requests the logits of several tokens of one step; the key and value of a wrong draft are overwritten."""
    drafted, other = driver.join(prompt_of(17, 1)), driver.join(prompt_of(5, 0))
    driver.step([(drafted, 17), (other, 5)])
    drafted.answer += [*known[1:3], (known[3] + 1) % 250]
    logits = driver.step([(other, 1), (drafted, 4)], wanted={1: 4})
    assert logits[1:4].argmax(-1).tolist() == known[1:4]
    drafted.computed -= 1
    drafted.answer[3:] = known[3:4]
    del drafted.logits[drafted.computed]
    driver.step([(drafted, 1), (other, 1)])
    right(drafted, other)
    driver.leave(drafted)
    driver.leave(other)
