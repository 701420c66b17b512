"""Marks which families of models the fast tests use."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.engine.tiny_models import FAMILIES


def fast(*families: str, long: Collection[str] = ()) -> pytest.MarkDecorator:
    """Parametrizes a test by family: ``families`` are fast, those in ``long`` are marked long, and all others slow."""
    marks = {each: pytest.mark.long if each in long else pytest.mark.slow for each in FAMILIES if each not in families}
    others = [pytest.param(each, marks=mark) for each, mark in marks.items()]
    return pytest.mark.parametrize("family", [*families, *others])
