"""Computes the least time that a machine needs for a step: the roofline of its memory's speed and its units' peaks.

The limit is the longer of two times: reading the weights, keys and values once at the speed of the memory, and doing
all multiplications at the peak of the unit that does them. No program can be faster, and not every one can do both at
once (Williams, Waterman, Patterson: Roofline, CACM 2009). Knows neither torch nor servers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UNITS = ("matrix", "bf16", "fp32")  # the first one that the CPU has multiplies weights in bf16
INT8 = "int8"
_CASE = re.compile(r"c(?P<streams>\d+)|p(?P<prompt>\d+)")


@dataclass(frozen=True)
class Limits:
    """The limits of all threads: ``read`` is in bytes/s, ``peaks`` has the operations/s of each unit (0: missing)."""

    read: float
    peaks: Mapping[str, float]

    def bf16_unit(self) -> str:
        return next(unit for unit in UNITS if self.peaks[unit])

    def packed_unit(self) -> str:
        """Returns the unit that multiplies packed weights; without VNNI it is the one for bf16."""
        return INT8 if self.peaks[INT8] else self.bf16_unit()


@dataclass(frozen=True)
class Work:
    """The least work of a step: the bytes that it must read, and the operations that it must compute."""

    bytes: float
    operations: float

    def least_ms(self, limits: Limits, unit: str) -> float:
        """Returns the milliseconds that the step must take."""
        return 1000 * max(self.bytes / limits.read, self.operations / limits.peaks[unit])


@dataclass(frozen=True)
class Model:
    """A dense decoder. ``projections`` and ``head`` count the weights of the layers' matrices and of the last one."""

    projections: int
    head: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    weight_bytes: float  # of projections and head together
    cache_item: int = 2  # bytes of a number in the KV cache

    def decode(self, rows: int, context: float) -> Work:
        """Returns the work of a step of ``rows`` sequences, each with ``context`` tokens in the cache."""
        seen = rows * (context + 1) * self.layers * self.head_dim
        cached = 2 * seen * self.kv_heads * self.cache_item
        operations = 2 * rows * (self.projections + self.head) + 4 * seen * self.heads
        return Work(self.weight_bytes + cached, operations)

    def prefill(self, tokens: int) -> Work:
        pairs = tokens * (tokens + 1) / 2 * self.layers * self.head_dim
        operations = 2 * (tokens * self.projections + self.head) + 4 * pairs * self.heads
        return Work(self.weight_bytes, operations)


def share(case: str, figures: Mapping[str, float], prompt: int, new: int, roofline: Mapping[str, Any]) -> float | None:
    """Returns the least time divided by the measured one, for a decode step (cases like ``c16``, while all streams
    decode) or a first token (cases like ``p2000``); otherwise None. A stream has ``prompt`` and ``new`` tokens.
    """
    match = _CASE.fullmatch(case)
    if match is None:
        return None
    model, limits = Model(**roofline["model"]), Limits(**roofline["limits"])
    if match["prompt"]:
        work, measured = model.prefill(int(match["prompt"])), figures.get("ttft_p50_ms")
    else:
        rows, rate = int(match["streams"]), figures.get("steady_tokens_per_s")
        work, measured = model.decode(rows, prompt + new / 2), 1000 * rows / rate if rate else None
    return work.least_ms(limits, roofline["unit"]) / measured if measured else None
