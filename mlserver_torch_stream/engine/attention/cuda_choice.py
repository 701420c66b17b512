"""Chooses how the layers of a model on CUDA attend to their pages, and checks each choice before its first use.

Varlen attention is tried first, then plain torch. The chosen attention of a kind of layer must give
the results of ``reference_attention`` on that device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from mlserver_torch_stream.engine.attention.cuda_gathered import gathered_attention
from mlserver_torch_stream.engine.attention.cuda_varlen import VarlenAttention, find_varlen
from mlserver_torch_stream.engine.attention.paged_attention import AttentionOptions, BatchTensors, PagedAttention
from mlserver_torch_stream.engine.attention.reference import AttentionShape, farthest
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages
from mlserver_torch_stream.engine.failures import in_a_line

_TRIAL_TOKENS = 10_000  # of the longest sequence of a trial
_CHUNK = 70  # new tokens of a prompt in a trial
# Largest error of a query's and a head's output, against its size. A key too many or too few is off by far more.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_TOLERANCE = 0.1


class Candidate(PagedAttention, Protocol):
    """A ``PagedAttention`` that may not take every layer."""

    def refusal(self, query: torch.Tensor, layer: LayerPages, options: AttentionOptions) -> str | None:
        """Returns why it cannot take such a layer; None if it can."""


class GatheredAttention:
    """Plain torch, which takes every layer."""

    def refusal(self, query: torch.Tensor, layer: LayerPages, options: AttentionOptions) -> str | None:
        return None

    def __call__(
        self, query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
    ) -> torch.Tensor:
        return gathered_attention(query, layer, batch, options)


_Kind = tuple[torch.device, AttentionShape, int]
"""What layers have in common that take the same choice; the number is the size of a page."""


class CudaAttention:
    """A ``PagedAttention`` that takes for each kind of layer the first candidate that is right.

    The first layer of a kind pays for the check. A capture cannot check: a plain forward must run before it.
    """

    def __init__(self, candidates: Iterable[tuple[str, Candidate]] | None = None) -> None:
        """``candidates``: attentions with their names, in the order of trial; the last one must take every layer."""
        self._candidates = list(candidates) if candidates is not None else _candidates()
        self._chosen: dict[_Kind, tuple[str, Candidate, str]] = {}

    def __call__(
        self, query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
    ) -> torch.Tensor:
        kind = query.device, AttentionShape.of(query, layer, options), layer.page_size
        if kind not in self._chosen:
            self._chosen[kind] = self._choose(query, layer, options)
        return self._chosen[kind][1](query, layer, batch, options)

    @property
    def summary(self) -> str:
        """What was chosen so far, and why nothing before it was."""
        names = dict.fromkeys(f"{name} ({reason})" if reason else name for name, _, reason in self._chosen.values())
        return ", ".join(names) or "not chosen yet"

    @property
    def copies_keys(self) -> bool:
        """Whether some layers copy all pages of a table: then a table should be no wider than it has to be."""
        return any(isinstance(each, GatheredAttention) for _, each, _ in self._chosen.values())

    def _choose(self, query: torch.Tensor, layer: LayerPages, options: AttentionOptions) -> tuple[str, Candidate, str]:
        reasons: list[str] = []
        for name, candidate in self._candidates:
            reason = candidate.refusal(query, layer, options) or find_problem(candidate, query, layer, options)
            if reason is None:
                return name, candidate, "; ".join(reasons)
            reasons.append(reason)
        raise RuntimeError(f"no attention for a layer of this model: {'; '.join(reasons)}")


def copies_keys(attention: PagedAttention) -> bool:
    """Whether an attention is a ``CudaAttention`` some of whose layers copy all pages of a table."""
    return isinstance(attention, CudaAttention) and attention.copies_keys


def _candidates() -> list[tuple[str, Candidate]]:
    return [("varlen", VarlenAttention(find_varlen())), ("gathered keys", GatheredAttention())]


def find_problem(
    candidate: PagedAttention, query: torch.Tensor, layer: LayerPages, options: AttentionOptions
) -> str | None:
    """Returns why a candidate is not right for a layer like this one, on random numbers; None if it is.

    It takes single tokens of unlike lengths, chunks of prompts, both in one batch, and a single token alone.
    """
    shape, size = AttentionShape.of(query, layer, options), layer.page_size
    span = min(options.window or options.chunk or 0, _TRIAL_TOKENS)
    single = [(length - 1, 1) for length in (1, size, size + 1, span + 2 * size + 3)]
    chunks = [(span + size + 3, _CHUNK), (0, _CHUNK)]
    try:
        error = max(
            farthest(candidate, shape, size, parts, query.device, layer.tokens_first)
            for parts in (single, chunks, [*single, *chunks], single[:1])
        )
    except Exception as failure:  # a kernel that is not built for this device, or a compiler that fails
        return in_a_line(failure)
    if error <= _TOLERANCE.get(query.dtype, _HALF_TOLERANCE):
        return None
    return f"its output differs from the reference's by {error:.3g} of its size"
