"""Which families of models the fast tests take."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.engine.tiny_models import FAMILIES


def fast(*families: str, long: Collection[str] = ()) -> pytest.MarkDecorator:
    """Every family, of which these are in the fast tests; those of ``long`` are marked so, and the others slow."""
    marks = {each: pytest.mark.long if each in long else pytest.mark.slow for each in FAMILIES if each not in families}
    others = [pytest.param(each, marks=mark) for each, mark in marks.items()]
    return pytest.mark.parametrize("family", [*families, *others])
