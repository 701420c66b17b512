"""Defines the bounds of the scheduler, and which requests can never run within them.

Knows nothing of requests that run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlserver_torch_stream.engine.kv_cache.cache_spec import CacheSpec


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """``pages`` bounds the pages of each group of layers, ``cache_bytes`` the pages of all groups and the states.

    ``token_budget`` bounds the prompt tokens and drafts of one step; None: no bound. The newest token of a sequence
    that decodes counts as nothing, as it never waits for a prompt. A chunk of a prompt counts as ``prefill_floor``
    tokens at least: where each chunk is a forward of its own, many short ones would hold up the others. With
    ``whole_prompts`` a step takes one prompt at most, and takes it whole.

    ``beside_budget`` bounds those of a step in which sequences decode, which wait for its end; None: no further bound.

    ``prefix_bytes`` bounds the pages that only the prefix cache holds. ``stages`` batches can be in flight at a time.
    """

    max_num_seqs: int
    token_budget: int | None
    pages: tuple[int, ...]
    cache_bytes: int
    prefix_bytes: int = 0
    stages: int = 1
    whole_prompts: bool = False
    prefill_floor: int = 1
    beside_budget: int | None = None

    def budget(self, *, decodes: bool) -> float:
        """Returns the prompt tokens and drafts of one step; ``decodes``: whether sequences decode in it."""
        budgets = (self.token_budget, self.beside_budget if decodes else None)
        return min((each for each in budgets if each is not None), default=math.inf)

    def chunk(self, tokens: int) -> int:
        """Returns the most of so many tokens that one step computes."""
        return tokens if self.whole_prompts or self.token_budget is None else min(self.token_budget, tokens)


def pages_alone(spec: CacheSpec, limits: SchedulerLimits, sequences: int, prompt: int, final: int) -> list[int]:
    """Returns the most pages of each group that the ``sequences`` of one request hold, of ``final`` tokens each.

    The sequences share the full pages of the prompt.
    """
    step, pages = limits.chunk(final), []
    for group in range(len(spec.groups)):
        one = spec.most_pages(group, final, step)
        shared = min(one, prompt // spec.page_size) if spec.groups[group].span is None else 0
        pages.append(one + (sequences - 1) * (one - shared))
    return pages


def fits_alone(spec: CacheSpec, limits: SchedulerLimits, sequences: int, prompt: int, final: int) -> bool:
    """Whether a request could run on an idle engine to its last token."""
    return sequences <= limits.max_num_seqs and _fit(
        spec, limits, sequences, pages_alone(spec, limits, sequences, prompt, final)
    )


def _fit(spec: CacheSpec, limits: SchedulerLimits, sequences: int, pages: Sequence[int]) -> bool:
    held = sum(count * spec.page_bytes(group) for group, count in enumerate(pages)) + sequences * spec.state_bytes
    return held <= limits.cache_bytes and all(count <= most for count, most in zip(pages, limits.pages, strict=True))


def longest_sequence(spec: CacheSpec, limits: SchedulerLimits, max_model_len: int) -> int:
    """Returns the most tokens, prompt included, of a single sequence that the cache can hold."""
    low, high = 0, max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits_alone(spec, limits, 1, middle, middle) else (low, middle - 1)
    return low
