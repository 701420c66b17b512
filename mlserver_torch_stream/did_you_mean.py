"""Finds the known name that is nearest to an unknown one, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the known name that is most similar to ``name``, or None. ``cutoff`` is the least similarity, from 0 to
    1, as in ``difflib``.
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], show: Callable[[str], str] = repr) -> str:
    """Returns ``"; did you mean 'x'?"``, or an empty string if no known name is near. ``show`` formats the name."""
    near = nearest_name(name, known)
    return "" if near is None else f"; did you mean {show(near)}?"


def did_you_mean_or_known(name: str, known: Iterable[str], show: Callable[[str], str] = repr) -> str:
    """Returns the same as ``did_you_mean``, or a list of all known names if none is near."""
    known = list(known)
    return did_you_mean(name, known, show) or f"; known: {', '.join(known)}"
