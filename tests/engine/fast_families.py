"""Which families of models the fast tests take."""

from __future__ import annotations

import pytest

from tests.engine.tiny_models import FAMILIES


def fast(*families: str) -> pytest.MarkDecorator:
    """Every family, of which these are in the fast tests."""
    slow = [pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES if each not in families]
    return pytest.mark.parametrize("family", [*families, *slow])
