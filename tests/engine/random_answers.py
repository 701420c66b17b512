"""Random answers that satisfy a constraint: tokens drawn uniformly among those allowed, without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from mlserver_torch_stream.engine.constraints.token_matcher import CompiledConstraint

_ENDS = 0.3  # the chance that an answer ends where it may


def random_answer(compiled: CompiledConstraint, end_id: int, seed: int, most: int = 400) -> Sequence[int] | None:
    """Returns the tokens of an answer without its end token; None if the answer has not ended after ``most`` tokens."""
    draw, matcher, tokens = random.Random(seed), compiled.matcher([end_id], compiled.vocab_size), list[int]()
    while not matcher.complete and len(tokens) < most:
        allowed = np.flatnonzero(np.unpackbits(matcher.mask(), bitorder="little")).tolist()
        if end_id in allowed and (len(allowed) == 1 or draw.random() < _ENDS):
            return tokens
        chosen = draw.choice([token_id for token_id in allowed if token_id != end_id])
        tokens.append(chosen)
        matcher.accept(chosen)
    return tokens if matcher.complete else None
