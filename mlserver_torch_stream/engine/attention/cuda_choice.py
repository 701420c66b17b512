"""Chooses how the layers of a model on CUDA attend to their pages, and checks each choice before its first use.

Knows nothing of models. Varlen attention is tried first, then FlexAttention, then plain torch; what is chosen for a
kind of layer must give the numbers of ``reference_attention`` on that device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import torch

from mlserver_torch_stream.engine.attention.cuda_flex import FlexAttention
from mlserver_torch_stream.engine.attention.cuda_gathered import gathered_attention
from mlserver_torch_stream.engine.attention.cuda_varlen import PAGE_MULTIPLE, VarlenAttention, find_varlen
from mlserver_torch_stream.engine.attention.paged_attention import (
    AttentionOptions,
    BatchTensors,
    PagedAttention,
    batch_tensors,
)
from mlserver_torch_stream.engine.attention.reference import reference_attention
from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.kv_cache.paged_cache import LayerPages

CUDA_PAGE_SIZE = PAGE_MULTIPLE
_TRIAL_TOKENS = 10_000  # of the longest sequence of a trial
_CHUNK = 70  # new tokens of a prompt in a trial
# Largest error of an output, in standard deviations of the reference's. A key too many or too few is off by far more.
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


_Kind = tuple[object, ...]
"""What layers have in common that take the same choice."""


class CudaAttention:
    """A ``PagedAttention`` that takes for each kind of layer the first candidate that is right.

    The first layer of a kind pays for its check. A capture cannot: a plain forward has to come first.
    """

    def __init__(self, candidates: Iterable[tuple[str, Candidate]] | None = None) -> None:
        """``candidates``: by name, the last of which takes every layer."""
        self._candidates = list(candidates) if candidates is not None else _candidates()
        self._chosen: dict[_Kind, tuple[str, Candidate, str]] = {}

    def __call__(
        self, query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
    ) -> torch.Tensor:
        kind = _kind(query, layer, options)
        if kind not in self._chosen:
            self._chosen[kind] = self._choose(query, layer, options)
        return self._chosen[kind][1](query, layer, batch, options)

    @property
    def summary(self) -> str:
        """What was chosen so far, and why nothing before it was."""
        found = dict.fromkeys(f"{name} ({reason})" if reason else name for name, _, reason in self._chosen.values())
        return ", ".join(found) or "not chosen yet"

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


def _candidates() -> list[tuple[str, Candidate]]:
    return [
        ("varlen", VarlenAttention(find_varlen())),
        ("FlexAttention", FlexAttention(torch.compile)),
        ("gathered keys", GatheredAttention()),
    ]


def _kind(query: torch.Tensor, layer: LayerPages, options: AttentionOptions) -> _Kind:
    assert layer.keys is not None and layer.values is not None
    shapes = query.shape[1:], layer.keys.shape[1], layer.values.shape[-1], layer.page_size
    return (
        query.device,
        query.dtype,
        *shapes,
        options.scale,
        options.window,
        options.chunk,
        options.softcap,
        (options.sinks is not None),
    )


def find_problem(
    candidate: PagedAttention, query: torch.Tensor, layer: LayerPages, options: AttentionOptions
) -> str | None:
    """Returns why a candidate is not right for a layer like this one, on random numbers; None if it is."""
    try:
        error = max(_errors(candidate, query, layer, options))
    except Exception as failure:  # a kernel that is not built for this device, or a compiler that fails
        return f"{type(failure).__name__}: {failure}".splitlines()[0]
    if error <= _TOLERANCE.get(query.dtype, _HALF_TOLERANCE):
        return None
    return f"its output differs from the reference's by {error:.3g} standard deviations"


def _errors(
    candidate: PagedAttention, query: torch.Tensor, like: LayerPages, options: AttentionOptions
) -> Iterable[float]:
    """Yields errors for single tokens of unlike lengths, a chunk of a prompt, and both in one batch."""
    generator = torch.Generator(query.device).manual_seed(0)
    span = min(options.window or options.chunk or 0, _TRIAL_TOKENS)
    size = like.page_size
    lengths = (1, size, size + 1, span + 2 * size + 3)
    single = [(length - 1, 1) for length in lengths]
    chunks = [(span + size + 3, _CHUNK), (0, _CHUNK)]
    for parts in (single, chunks, [*single, *chunks], single[:1]):
        layer, batch = _pages(parts, like, generator)
        tensors = batch_tensors(batch, size, 1, query.device)
        queries = torch.randn(
            (batch.tokens, *query.shape[1:]), dtype=query.dtype, device=query.device, generator=generator
        )
        expected = reference_attention(queries, layer, tensors, options).float()
        found = candidate(queries, layer, tensors, options).float()
        error = float((found - expected).abs().max() / expected.std())
        yield error if error == error else float("inf")


def _pages(parts: list[tuple[int, int]], like: LayerPages, generator: torch.Generator) -> tuple[LayerPages, Batch]:
    """Returns pages of random numbers that sequences with these starts and new tokens hold, one in turn with the other.

    They are NaN behind the end of a sequence.
    """
    assert like.keys is not None and like.values is not None
    counts = [-(-(start + count) // like.page_size) for start, count in parts]
    free = iter(torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist())
    tables = [[next(free) for _ in range(count)] for count in counts]
    layer = replace(like, group=0, pages=sum(counts), keys=None, values=None)
    layer.reserve(like.keys, like.values)
    for pool in (layer.keys, layer.values):
        assert pool is not None
        pool.fill_(torch.nan)
        pool[layer.spare] = 0
    for (start, count), table in zip(parts, tables, strict=True):
        key, value = (
            torch.randn(
                (start + count, pool.shape[1], pool.shape[3]), dtype=pool.dtype, device=pool.device, generator=generator
            )
            for pool in (like.keys, like.values)
        )
        slots = [table[at // like.page_size] * like.page_size + at % like.page_size for at in range(start + count)]
        layer.write(key, value, torch.tensor(slots, device=key.device))
    batch = Batch(
        tuple(BatchSequence([0] * count, start, (table,)) for (start, count), table in zip(parts, tables, strict=True))
    )
    return layer, batch
