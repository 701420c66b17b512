"""Checks far positions at load: just below and just above each length that the model's config names.

Computes no long sequence: it fills transformers' own cache and ours with the keys and values of a short sequence, over
and over. The next tokens must get the same logits over both. Knows no family by name.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward, input_device
from mlserver_torch_stream.engine.kv_cache.bytes_per_token import CacheCost
from mlserver_torch_stream.engine.kv_cache.memory_budget import free_bytes
from mlserver_torch_stream.engine.kv_cache.row_cache import CacheLayout, RowCache
from mlserver_torch_stream.engine.kv_cache.slab import Columns, SlabLayer
from mlserver_torch_stream.engine.loading.comparison import Comparison
from mlserver_torch_stream.engine.loading.config_fields import named_lengths
from mlserver_torch_stream.engine.loading.context_length import comparable_context
from mlserver_torch_stream.engine.loading.host_limits import read_host

logger = logging.getLogger(__name__)

# The oldest columns, which a window loses at the positions that are compared, are made to weigh as much as all others:
# a window that is off by one is then off by 0.33 and more, rounding by up to 0.05 (in bfloat16, root mean square).
_HEAVY = 3
_AFTER = 5  # tokens after the filled ones
# One row may take a quarter of the weights' bytes and of the free memory: a check holds three of them at a time.
_PART = 4


def far_lengths(
    model: PreTrainedModel, layout: CacheLayout, costs: Mapping[torch.device, CacheCost], near: int, room: int | None
) -> list[int]:
    """Returns the lengths beyond ``near`` tokens and within the context whose caches are small enough to compare.

    ``room`` bytes are free for caches; None: as many as the devices have now.
    """
    config = model.config.get_text_config(decoder=True)
    named = named_lengths(config) | {window for window in layout.windows if window is not None}
    wanted = [length for length in sorted(named) if near < length < comparable_context(model)]
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    room = min(free_bytes(costs, read_host()).values(), default=0) if room is None else room
    cost, most = sum(costs.values(), CacheCost()), min(weights, room) // _PART
    lengths = [length for length in wanted if cost.of(1, length) <= most]
    if len(lengths) < len(wanted):
        logger.info("not compared at load, for the size of its cache: positions from %d on", wanted[len(lengths)])
    return lengths


def compare_far(
    model: PreTrainedModel,
    forward: Forward,
    length: int,
    *,
    short: RowCache,
    ids: Sequence[int] | None,
    chunked: bool,
) -> dict[int, Comparison]:
    """Compares the last token below the length, the first above it and, if ``chunked``, a chunk above it.

    The forward has filled ``short``, whose keys and values fill the far caches. With ``ids``, ``short`` is in the batch
    too.
    """
    counts = [2, 1, 2] if chunked else [1, 1]
    if length + 3 > comparable_context(model):
        counts = counts[:2]
    first = length - counts[0]
    ours, theirs = _stretched(short, _OwnLayout(model.config).cache(), first)
    if ids is not None:
        ours = _joined(ours, short)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    tokens = [((first + number) * 7919 + 13) % vocabulary for number in range(sum(counts))]
    expected = _expected(model, theirs, tokens, at_once=chunked)
    compared = {}
    for end, count in zip(accumulate(counts), counts, strict=True):
        got = forward([tokens[end - count : end]] * len(ours.lengths), ours)
        compared[first + end - 1] = comparison = Comparison()
        comparison.add(expected[end - 1], got[0])
    if ids is not None:
        alone = model(torch.tensor([[*ids, *tokens]], device=input_device(model)), use_cache=False, return_dict=True)
        comparison.add(alone.logits[0, -1], got[1])
    return compared


def _expected(model: PreTrainedModel, cache: RowCache, tokens: Sequence[int], at_once: bool) -> torch.Tensor:
    """Returns the logits ``[tokens, vocabulary]`` of transformers' own cache."""
    forward = ModelForward(model)
    if at_once:
        return forward.logits([tokens], cache, len(tokens))[0]
    return torch.cat([forward([[token]], cache) for token in tokens])


def _stretched(short: RowCache, theirs: RowCache, columns: int) -> tuple[RowCache, RowCache]:
    """Returns a cache like ``short`` and transformers' own, of so many tokens. States know no positions and stay."""
    ours = short.layout.cache(capacity=columns + _AFTER)
    for index, sample in enumerate(short.cache.layers):
        if not isinstance(sample, SlabLayer):
            ours.cache.layers[index], theirs.cache.layers[index] = copy.deepcopy(sample), copy.deepcopy(sample)
        elif sample.is_initialized:
            keys, values = (_repeated(tensor, columns) for tensor in sample.read(0, short.lengths[0]))
            values[:, :, :_HEAVY] *= 2.0 ** max(0, math.ceil(math.log2(columns / _HEAVY)))
            for cache in (ours, theirs):
                cache.cache.layers[index].update(keys, values)
    for cache in (ours, theirs):
        cache.begin_row()
        cache.commit(columns)
    return ours, theirs


def _repeated(row: torch.Tensor, columns: int) -> torch.Tensor:
    """Repeats the columns of ``[kv_heads, columns, head_dim]``, in another order."""
    return row[None, :, (torch.arange(columns, device=row.device) * 5 + 3) % row.shape[1]]


def _joined(long: RowCache, short: RowCache) -> RowCache:
    batch = short.layout.cache(rows=2, capacity=long.lengths[0] + _AFTER)
    batch.join(long)
    batch.join(short)
    return batch


class _OwnLayout(CacheLayout):
    """Builds transformers' own cache, of one row."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self._config = config

    def build(self, columns: Columns, rows: int, capacity: int) -> Cache:
        return DynamicCache(config=self._config)
