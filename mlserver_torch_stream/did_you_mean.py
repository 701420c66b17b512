"""Finds the known name that is nearest to an unknown one, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the known name that is most like ``name``, or None. ``cutoff``, from 0 to 1, says how alike they must be,
    as in ``difflib``.
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], show: Callable[[str], str] = repr) -> str:
    """Returns ``"; did you mean 'x'?"``, or an empty string if no known name is near. ``show`` says how the name is
    written.
    """
    near = nearest_name(name, known)
    return "" if near is None else f"; did you mean {show(near)}?"


def did_you_mean_or_known(name: str, known: Iterable[str], show: Callable[[str], str] = repr) -> str:
    """As ``did_you_mean``; if no known name is near, all known names."""
    known = list(known)
    return did_you_mean(name, known, show) or f"; known are {', '.join(known)}"
