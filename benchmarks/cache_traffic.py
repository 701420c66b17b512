"""Lengths of prompts and answers as they come in practice, drawn from a seed, and the worst that can come.

Knows nothing of caches. Prompt and answer are drawn apart: in Azure's traces their logarithms correlate by 0.09
(conversation) and 0.00 (code).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

Draw = Callable[[Random], int]
"""A number of tokens, at least 1."""

_SHARES = (0, 0.01, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95, 0.99, 1)


@dataclass(frozen=True, slots=True)
class Traffic:
    """``answer`` is where the model ends by itself; what a request allows (``max_tokens``) is another matter."""

    name: str
    what: str  # a line for tables: the lengths, and where they are from
    prompt: Draw
    answer: Draw


def quantiles(*values: int) -> Draw:
    """Between these quantiles of a trace, at ``_SHARES``, lengths are taken as log-uniform."""
    points = list(zip(_SHARES, values, strict=True))

    def draw(random: Random) -> int:
        share = random.random()
        (low, first), (high, last) = next(pair for pair in pairwise(points) if share < pair[1][0])
        return round(first * math.exp(math.log(last / first) * (share - low) / (high - low)))

    return draw


def uniform(low: int, high: int) -> Draw:
    return lambda random: random.randint(low, high)


def exponential(mean: float) -> Draw:
    return lambda random: max(1, round(random.expovariate(1 / mean)))


def lognormal(mean: float, sigma: float) -> Draw:
    """``sigma``: of the logarithm."""
    return lambda random: max(1, round(random.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))


def either(*lengths: int) -> Draw:
    return lambda random: random.choice(lengths)


# The quantiles are of AzureLLMInferenceTrace_conv.csv and _code.csv of 2023, 19,366 and 8,819 requests (CC-BY, Patel et
# al., Splitwise, ISCA 2024, github.com/Azure/AzurePublicDataset). Of ShareGPT the means are published (Kwon et al.,
# SOSP 2023, figure 11); the shapes are assumed: answers as in Alibaba's traces (ServeGen, arXiv 2505.09999), prompts
# as wide as Azure's conversation.
TRAFFIC = (
    Traffic(
        "alike",
        "prompts of 448 to 576 tokens, answers of 64 to 192: little is mixed",
        uniform(448, 576),
        uniform(64, 192),
    ),
    Traffic(
        "azure-conv",
        "Azure LLM inference trace 2023, conversation: prompts p50 1,020, p90 2,734, answers p50 129, p90 424",
        quantiles(2, 29, 181, 207, 387, 396, 403, 703, 1020, 1071, 1130, 1189, 1315, 2734, 4083, 4142, 14050),
        quantiles(7, 16, 41, 54, 77, 85, 91, 103, 129, 177, 384, 395, 400, 424, 451, 601, 1000),
    ),
    Traffic(
        "azure-code",
        "Azure LLM inference trace 2023, code: prompts p50 1,469, p90 5,187, answers p50 13, p90 55",
        quantiles(3, 17, 75, 147, 385, 578, 770, 1075, 1469, 1909, 2433, 2744, 3192, 5187, 7303, 7436, 7437),
        quantiles(6, 6, 6, 7, 8, 9, 9, 11, 13, 16, 20, 24, 29, 55, 90, 251, 1899),
    ),
    Traffic(
        "sharegpt",
        "ShareGPT: prompts of 161 tokens in the mean (log-normal, sigma 1), answers of 338 (exponential)",
        lognormal(161.31, 1.0),
        exponential(337.99),
    ),
    Traffic("uniform", "prompts uniform from 32 to 8,192, answers from 16 to 512", uniform(32, 8192), uniform(16, 512)),
    Traffic("bimodal", "prompts of 32 or 8,000, answers from 16 to 512", either(32, 8000), uniform(16, 512)),
)
