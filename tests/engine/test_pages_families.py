"""Token for token: every family over pages, driven batch by batch, against one-by-one ``generate``."""

import re
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.loading.selfcheck import check_batching
from tests.engine.fast_families import fast
from tests.engine.page_driver import Driven, PageDriver
from tests.engine.tiny_models import FAMILIES, SERIAL_FAMILIES, prompt_of, reference, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
COMMON = 34  # tokens at the beginning of two prompts
Right = Callable[..., None]


class Answers:
    """What the model says to each prompt alone, computed once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._tokens: dict[tuple[int, ...], list[int]] = {}
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}

    def to(self, prompt: Sequence[int]) -> list[int]:
        if tuple(prompt) not in self._tokens:
            self._tokens[tuple(prompt)] = reference(self._model, prompt, 12)
        return self._tokens[tuple(prompt)]

    def check(self, sequence: Driven) -> None:
        """Raises unless the tokens are those of ``generate``, and all logits those of one call without a cache."""
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
    """Raises if a sequence does not get what it gets alone."""
    driver = PageDriver(model, way, page_size, chunked=chunked)

    def right(*sequences: Driven) -> None:
        for each in sequences:
            answers.check(each)

    joins_and_leaves(driver, right)
    goes_on_after_a_preemption(driver, right)
    if not driver.has_states:
        shares_a_beginning(driver, right)
        verifies_drafts(driver, right, answers.to(prompt_of(17, 1)))


def way_of(model: PreTrainedModel, answers: Answers) -> tuple[Way, bool] | None:
    """Returns the first way that gives the right tokens, and whether it takes prompts in chunks."""
    for way, chunked in product(Way, (True, False)):
        try:
            check(model, way, 16, answers, chunked)
        except Exception:  # a model's code can raise anything for a cache that it does not know
            continue
        return way, chunked
    return None


def table() -> dict[str, tuple[str, str]]:
    """The page's rows: how a family takes batches and prompts."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    return {family: (way.strip(), prompts.strip()) for family, way, prompts in rows}


def test_the_page_has_a_row_for_each_family_that_is_tried() -> None:
    assert sorted(table()) == sorted([*FAMILIES, *SERIAL_FAMILIES])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gets_its_tokens_over_pages_in_the_way_that_the_page_says(family: str) -> None:
    check_as_the_page_says(family, 16)


def check_as_the_page_says(family: str, *page_sizes: int) -> None:
    model = tiny_model(family)
    answers, (way, prompts) = Answers(model), table()[family]
    for page_size in page_sizes:
        check(model, Way(way), page_size, answers, prompts == "in chunks")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_at_load_finds_that_way(family: str) -> None:
    model = tiny_model(family)
    with torch.inference_mode():
        found = check_batching(model)
    assert (found.problem, found.way.value, "in chunks" if found.chunked else "whole") == (None, *table()[family])


@fast("bloom", "jamba")
def test_that_way_is_the_first_that_gives_them(family: str) -> None:
    model = tiny_model(family)
    found = way_of(model, Answers(model))
    assert found is not None
    way, chunked = found
    assert table()[family] == (way.value, "in chunks" if chunked else "whole")


@fast("gemma3_text", "llama4_chunked", "bloom", "qwen3_next")
def test_pages_may_be_of_any_size(family: str) -> None:
    check_as_the_page_says(family, 1, 256)


@pytest.mark.parametrize("way", [Way.ROWS, Way.MASKED_ROWS])
@pytest.mark.parametrize(
    "family",
    ["gemma3_text", *(pytest.param(each, marks=pytest.mark.slow) for each in ("llama", "llama4_chunked", "gpt_oss"))],
)
def test_models_that_can_be_packed_take_rows_too(family: str, way: Way) -> None:
    """Windows and chunks are those of masks here, over pages that have been given back.

    Not with a scale for each position, which transformers' Llama 4 gives only to a packed row.
    """
    model = tiny_model(family, **({"attn_temperature_tuning": False} if family == "llama4_chunked" else {}))
    check(model, way, 1, Answers(model))


@pytest.mark.parametrize("family", SERIAL_FAMILIES)
def test_families_that_keep_states_in_their_modules_are_found_out(family: str) -> None:
    model = tiny_model(family)
    assert way_of(model, Answers(model)) is None
    assert table()[family][0] == "serial"


def joins_and_leaves(driver: PageDriver, right: Right) -> None:
    """Chunks of several sizes beside decode, in changing orders; two answers to one prompt."""
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
    """At every boundary of pages, one sequence takes all pages before it from another, and computes the rest."""
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
    """The logits of several tokens of one step; a wrong draft is written over."""
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
