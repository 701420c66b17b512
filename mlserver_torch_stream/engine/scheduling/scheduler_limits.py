"""Defines the bounds of the scheduler, and which requests can never run within them.

Knows nothing of requests that run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlserver_torch_stream.engine.kv_cache.cache_spec import CacheSpec
from mlserver_torch_stream.engine.kv_cache.page_counts import largest


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """``pages`` bounds the pages of each group of layers, ``cache_bytes`` the pages of all groups and the states.

    ``token_budget`` bounds the prompt tokens and drafts of one step, ``beside_budget`` those of a step in which
    sequences decode, which wait for its end; None: no bound. The newest token of a sequence that decodes does not
    count, as it never waits for a prompt. A chunk of a prompt counts as ``prefill_floor`` tokens at least: where each
    chunk is a separate forward, many short ones would delay the sequences that decode. With ``whole_prompts`` a step
    takes one prompt at most, and takes it whole.

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


def fits_alone(spec: CacheSpec, limits: SchedulerLimits, sequences: int, prompt: int, final: int) -> bool:
    """Whether a request of ``sequences`` of ``final`` tokens could run on an idle engine to its last token.

    The sequences share the full pages of the prompt.
    """
    pages = []
    for one, group in zip(spec.most_pages(final, limits.chunk(final)), spec.groups, strict=True):
        shared = min(one, prompt // spec.page_size) if group.span is None else 0
        pages.append(one + (sequences - 1) * (one - shared))
    return (
        sequences <= limits.max_num_seqs
        and spec.bytes_of(pages, sequences) <= limits.cache_bytes
        and all(count <= most for count, most in zip(pages, limits.pages, strict=True))
    )


def longest_sequence(spec: CacheSpec, limits: SchedulerLimits, max_model_len: int) -> int:
    """Returns the most tokens, prompt included, of a single sequence that the cache can hold."""
    return largest(max_model_len, lambda length: fits_alone(spec, limits, 1, length, length))
