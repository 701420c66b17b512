"""Paged attention in plain torch, one sequence at a time, written independently of the package's own."""

from __future__ import annotations

import torch

from mlserver_torch_stream.engine.attention.paged_attention import AttentionOptions, BatchTensors, PagedAttention
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages
from mlserver_torch_stream.engine.cache.pages import BatchSequence


class ReferenceAttention(PagedAttention):
    """Computes scores and sums in float32."""

    name = "reference"

    def __call__(
        self, query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
    ) -> torch.Tensor:
        parts = query.split([sequence.count for sequence in batch.batch.sequences])
        pairs = zip(parts, batch.batch.sequences, strict=True)
        return torch.cat([_attend(part, layer, sequence, options) for part, sequence in pairs])

    def describe(self) -> str:
        return "the reference"


reference_attention = ReferenceAttention()


def _attend(query: torch.Tensor, layer: LayerPages, sequence: BatchSequence, options: AttentionOptions) -> torch.Tensor:
    seen = torch.arange(sequence.start, sequence.length, device=query.device)[:, None]
    oldest = options.oldest_seen(seen)
    first = int(oldest[0])
    keys, values = (part.float() for part in layer.read(sequence.tables[layer.group], first, sequence.length))
    heads, kv_heads = query.shape[1], keys.shape[0]
    keys, values = (part.repeat_interleave(heads // kv_heads, 0) for part in (keys, values))
    scores = torch.einsum("qhd,hkd->hqk", query.float(), keys) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    position = torch.arange(first, sequence.length, device=query.device)
    scores = scores.masked_fill((position > seen) | (position < oldest), float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().reshape(heads, 1, 1).expand(heads, len(query), 1)
        probabilities = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    else:
        probabilities = torch.softmax(scores, -1)
    return torch.einsum("hqk,hkd->qhd", probabilities, values).to(query.dtype)
