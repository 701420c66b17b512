"""Computes the logits of transformers' own forward, each once for all forwards that are compared with them."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from mlserver_torch_stream.engine.devices import input_device
from mlserver_torch_stream.engine.loading.quantised import rounding_dtype

# The oldest positions, which a window loses where logits are compared, weigh four times as much as all later ones
# together: then a window that is off by one changes logits by 0.27 and more, and rounding by up to 0.05 (in bfloat16,
# root mean square).
_HEAVY = 3
_WEIGHT = 4


class ExpectedLogits:
    """The logits of one model. Its weights must not change in between."""

    def __init__(self, model: transformers.PreTrainedModel, dtype: torch.dtype | None = None) -> None:
        """``dtype``: the type to which the compared forwards round; None: the model's type."""
        self.model = model
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.dtype = dtype or rounding_dtype(model)
        self._device = input_device(model)
        self._near: dict[tuple[int, ...], torch.Tensor] = {}
        self._far: dict[tuple[int, ...], torch.Tensor] = {}
        self._samples: dict[tuple[int, ...], DynamicCache] = {}

    def near(self, ids: Sequence[int]) -> torch.Tensor:
        """Returns the logits ``[len(ids), vocabulary]`` of a sequence, alone and without cache."""
        key = tuple(ids)
        if key not in self._near:
            output = self.model(torch.tensor([ids], device=self._device), use_cache=False, return_dict=True)
            self._near[key] = output.logits[0]
        return self._near[key]

    def far(
        self, sample: Sequence[int], columns: int, repeated: torch.Tensor, tokens: Sequence[int], at_once: bool
    ) -> torch.Tensor:
        """Returns the logits ``[len(tokens), vocabulary]`` of tokens after a long cache.

        The cache holds the last ``columns`` keys and values of ``sample``, in the order of the indices ``repeated``.
        """
        key = (len(sample), columns, len(repeated), int(at_once), *tokens)
        if key not in self._far:
            cache = self._filled(sample, columns, repeated)
            parts = [tokens] if at_once else [[token] for token in tokens]
            logits, start = [], len(repeated)
            for part in parts:
                logits.append(self._over(cache, part, start))
                start += len(part)
            self._far[key] = torch.cat(logits)
        return self._far[key]

    def _over(self, cache: DynamicCache, ids: Sequence[int], start: int) -> torch.Tensor:
        names = inspect.signature(self.model.forward).parameters
        name = "past_key_values" if "past_key_values" in names else "cache_params"
        inputs: dict[str, Any] = {name: cache, "use_cache": True, "return_dict": True}
        if "position_ids" in names:
            inputs["position_ids"] = torch.arange(start, start + len(ids), device=self._device)[None]
        logits: torch.Tensor = self.model(torch.tensor([ids], device=self._device), **inputs).logits[0]
        return logits

    def _filled(self, sample: Sequence[int], columns: int, repeated: torch.Tensor) -> DynamicCache:
        """Returns transformers' own cache. States know no positions and stay."""
        key = tuple(sample)
        if key not in self._samples:
            self._samples[key] = DynamicCache(config=self.model.config)
            self._over(self._samples[key], sample, 0)
        filled = DynamicCache(config=self.model.config)
        for index, layer in enumerate(self._samples[key].layers):
            if isinstance(layer, LinearAttentionLayer):
                filled.layers[index] = copy.deepcopy(layer)
            elif layer.is_initialized:
                filled.layers[index].update(
                    *(
                        part[None]
                        for part in far_columns(layer.keys[0, :, -columns:], layer.values[0, :, -columns:], repeated)
                    )
                )
        return filled


def far_columns(
    keys: torch.Tensor, values: torch.Tensor, repeated: torch.Tensor, first: int = 0, length: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys and values ``[kv_heads, positions, head_dim]`` of these indices, the oldest values made heavy.

    They begin at position ``first`` of a sequence of ``length`` tokens; None: they are the whole sequence.
    """
    indices = repeated.to(keys.device)
    keys, values = keys[:, indices], values[:, indices].clone()
    if first < _HEAVY:
        columns = len(repeated) if length is None else length
        values[:, : _HEAVY - first] *= 2.0 ** max(0, math.ceil(math.log2(_WEIGHT * columns / _HEAVY)))
    return keys, values
