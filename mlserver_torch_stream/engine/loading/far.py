"""The part of the checks at load that looks at far positions: just below and above each length that the config names.

Nothing that long is computed: both caches, transformers' own and ours, are filled with the same keys and values, taken
from a short prompt in some order. What follows must give the same logits. Knows no family by name.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from mlserver_torch_stream.engine.budget import free_bytes
from mlserver_torch_stream.engine.cache.cost import CacheCost
from mlserver_torch_stream.engine.cache.rows import CacheLayout, RowCache
from mlserver_torch_stream.engine.cache.slab import Columns
from mlserver_torch_stream.engine.forward import Forward, ModelForward
from mlserver_torch_stream.engine.loading.comparison import Comparison
from mlserver_torch_stream.engine.loading.config import named_lengths
from mlserver_torch_stream.engine.loading.context import comparable_context
from mlserver_torch_stream.engine.loading.host import read_host

logger = logging.getLogger(__name__)

_PROMPT = 8
# The oldest columns are those that a window loses: so many are made to weigh as much as all others.
_HEAVY = 8
_AFTER = 3  # tokens that follow
# Of the weights' bytes, and of the free memory, that one row may take. A check has three of them at a time; reading
# and writing them takes a tenth of the time that the check at near positions takes to read the weights.
_PART = 4


def far_lengths(
    model: PreTrainedModel, layout: CacheLayout, costs: Mapping[torch.device, CacheCost], near: int, room: int | None
) -> list[int]:
    """Those beyond ``near`` tokens and within the model's context whose caches are not too large to compare.

    ``room``: bytes that are free for caches; None: what the devices have now.
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
    model: PreTrainedModel, layout: CacheLayout, forward: Forward, length: int, *, chunked: bool, beside: bool
) -> Comparison:
    """The last token below the length, then one above it, in a piece with the first if prompts go in by pieces.

    ``beside``: there is a short row in the batch too.
    """
    trial, comparison = _FarTrial(model, layout, forward), Comparison()
    ours, theirs = trial.stretched(length - 1)
    if beside:
        ours = trial.joined(ours)
    above = 2 if chunked and length + 2 <= comparable_context(model) else 1
    after = [trial.token(length + number) for number in range(1 + above)]
    for tokens in (after[:1], after[1:]):
        got = forward([tokens] * len(ours.lengths), ours)
        comparison.add(trial.model_forward([tokens], theirs)[0], got[0])
    if beside:
        comparison.add(trial.alone(after), got[1])
    return comparison


class _FarTrial:
    """A short prompt, and caches as long as wanted of its keys and values: a forward's, and transformers' own."""

    def __init__(self, model: PreTrainedModel, layout: CacheLayout, forward: Forward) -> None:
        self._layout = layout
        self._forward = forward
        self.model_forward = ModelForward(model)
        self._own_layout = _OwnLayout(model.config)
        self._vocab = int(model.get_input_embeddings().weight.shape[0])
        _, self._sample = self._prefilled(self._own_layout, self.model_forward)

    def joined(self, ours: RowCache) -> RowCache:
        """A batch of that row and the short prompt."""
        batch = self._layout.cache(rows=2, capacity=ours.lengths[0] + _AFTER)
        batch.join(ours)
        batch.join(self._prefilled(self._layout, self._forward)[1])
        return batch

    def alone(self, more: Sequence[int]) -> torch.Tensor:
        """The model's logits after the short prompt and more tokens."""
        return self._prefilled(self._own_layout, self.model_forward, more)[0]

    def _prefilled(
        self, layout: CacheLayout, forward: Forward, more: Sequence[int] = ()
    ) -> tuple[torch.Tensor, RowCache]:
        """The short prompt in one piece."""
        tokens = [*(self.token(i) for i in range(_PROMPT)), *more]
        cache = layout.cache(capacity=len(tokens))
        cache.begin_row()
        return forward([tokens], cache)[0], cache

    def token(self, seed: int) -> int:
        return (seed * 7919 + 13) % self._vocab

    def stretched(self, columns: int) -> tuple[RowCache, RowCache]:
        """Caches of so many tokens; states, which know no positions, are those after the prompt."""
        ours, theirs = self._layout.cache(capacity=columns + _AFTER), self._own_layout.cache()
        for index, sample in enumerate(self._sample.cache.layers):
            for cache in (ours, theirs):
                if not isinstance(sample, DynamicLayer):
                    cache.cache.layers[index] = copy.deepcopy(sample)
                elif sample.is_initialized:
                    cache.cache.layers[index].update(*_stretch(sample, columns))
        for cache in (ours, theirs):
            cache.begin_row()
            cache.commit(columns)
        return ours, theirs


class _OwnLayout(CacheLayout):
    """Builds transformers' own cache, of one row."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self._config = config

    def build(self, columns: Columns, rows: int, capacity: int) -> Cache:
        return DynamicCache(config=self._config)


def _stretch(sample: DynamicLayer, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    held = sample.keys.shape[2]
    order = (torch.arange(columns, device=sample.keys.device) * 5 + 3) % held
    keys, values = sample.keys[:, :, order], sample.values[:, :, order]
    values[:, :, :_HEAVY] *= 2.0 ** max(0, math.ceil(math.log2(columns / _HEAVY)))
    return keys, values
