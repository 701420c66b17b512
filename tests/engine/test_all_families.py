"""Every type of causal language model that transformers knows is served in the way that docs/families.md says."""

from __future__ import annotations

import pytest
import transformers

from tests.engine.all_families import TYPES, page_version, row_of, rows

# The class of real Gemma 4 checkpoints, which has encoders of images and sound, and layers with unequal heads.
LONG = ("gemma4",)

pytestmark = pytest.mark.skipif(
    transformers.__version__ != page_version(), reason="the page's table is of another version of transformers"
)


def test_the_page_has_a_row_for_each_type() -> None:
    assert tuple(rows()) == TYPES


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(each, marks=pytest.mark.long if each in LONG else pytest.mark.slow) for each in TYPES],
)
def test_the_type_is_served_as_the_page_says_with_the_tokens_of_generate(model_type: str) -> None:
    assert row_of(model_type) == rows()[model_type]
