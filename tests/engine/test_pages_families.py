"""In every family, sequences driven over pages get the tokens of ``generate`` for each prompt alone."""

import re
from itertools import product

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.forward.model_step import Way
from tests.engine.all_families import HEADING, PAGE
from tests.engine.fast_families import fast
from tests.engine.page_answers import Answers, check
from tests.engine.tiny_models import FAMILIES, KINDS, SERIAL_FAMILIES, tiny_model


def way_of(model: PreTrainedModel, answers: Answers) -> tuple[Way, bool] | None:
    """Returns the first way of batching that gives the right tokens, and whether it accepts prompts in chunks."""
    for way, chunked in product(Way, (True, False)):
        try:
            check(model, way, 16, answers, chunked)
        except Exception:  # a model's code can raise anything for a cache that it does not know
            continue
        return way, chunked
    return None


def table() -> dict[str, tuple[str, str]]:
    """Returns the rows of the page's table: how each family handles batching and prompts."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|", PAGE.read_text().partition(HEADING)[0], re.MULTILINE)
    return {family: (way.strip(), prompts.strip()) for family, way, prompts in rows}


def test_the_page_has_a_row_for_each_family_that_is_tried() -> None:
    assert sorted(table()) == sorted([*FAMILIES, *SERIAL_FAMILIES])


@fast(*KINDS, long=FAMILIES)
def test_every_family_gets_its_tokens_over_pages_in_the_way_that_the_page_says(family: str) -> None:
    check_as_the_page_says(family, 16)


def check_as_the_page_says(family: str, *page_sizes: int) -> None:
    model = tiny_model(family)
    answers, (way, prompts) = Answers(model), table()[family]
    for page_size in page_sizes:
        check(model, Way(way), page_size, answers, prompts == "in chunks")


@pytest.mark.long
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


@pytest.mark.long
@fast("gemma3_text", "llama4_chunked", "bloom", "qwen3_next")
def test_pages_may_be_of_any_size(family: str) -> None:
    check_as_the_page_says(family, 1, 256)


@pytest.mark.parametrize("way", [Way.ROWS, pytest.param(Way.MASKED_ROWS, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "family",
    ["gemma3_text", *(pytest.param(each, marks=pytest.mark.slow) for each in ("llama", "llama4_chunked", "gpt_oss"))],
)
def test_models_that_can_be_packed_take_rows_too(family: str, way: Way) -> None:
    """Windows and chunks are computed by masks here, over pages that have been freed.

    The scale by position is turned off, as transformers' Llama 4 supports it only in a packed row.
    """
    model = tiny_model(family, **({"attn_temperature_tuning": False} if family == "llama4_chunked" else {}))
    check(model, way, 1, Answers(model))


@pytest.mark.parametrize("family", SERIAL_FAMILIES)
def test_families_that_keep_states_in_their_modules_are_found_out(family: str) -> None:
    model = tiny_model(family)
    assert way_of(model, Answers(model)) is None
    assert table()[family][0] == "serial"
