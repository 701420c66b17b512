"""Computes the logits of transformers' own forward once for all comparisons, and compares other logits with them."""

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

# The oldest positions weigh four times as much as all later ones together, because a window drops the oldest first. So
# a window that is off by one changes logits by 0.27 and more, whereas rounding changes them by at most 0.05 (in
# bfloat16, root mean square).
_HEAVY = 3
_WEIGHT = 4


class ExpectedLogits:
    """The expected logits of one model. Its weights must not change while this object is used."""

    def __init__(self, model: transformers.PreTrainedModel, dtype: torch.dtype | None = None) -> None:
        """``dtype`` is the dtype to which the compared forwards round; None means the model's dtype."""
        self.model = model
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.dtype = dtype or rounding_dtype(model)
        self._device = input_device(model)
        self._near: dict[tuple[int, ...], torch.Tensor] = {}
        self._far: dict[tuple[int, ...], torch.Tensor] = {}
        self._samples: dict[tuple[int, ...], DynamicCache] = {}

    def near(self, ids: Sequence[int]) -> torch.Tensor:
        """Returns the logits ``[len(ids), vocabulary]`` of a sequence, computed without other sequences or a cache."""
        key = tuple(ids)
        if key not in self._near:
            output = self.model(torch.tensor([ids], device=self._device), use_cache=False, return_dict=True)
            self._near[key] = output.logits[0]
        return self._near[key]

    def far(
        self, sample: Sequence[int], columns: int, repeated: torch.Tensor, tokens: Sequence[int], at_once: bool
    ) -> torch.Tensor:
        """Returns the logits ``[len(tokens), vocabulary]`` of tokens after a long cache.

        The cache consists of the last ``columns`` keys and values of ``sample``, in the order of the indices
        ``repeated``.
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
        """Returns transformers' own cache with repeated keys and values, and with the states after ``sample``."""
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
    """Returns keys and values at the indices ``repeated``, ``[kv_heads, positions, head_dim]``.

    The oldest values are enlarged, so that the result depends on them. The positions start at ``first``, in a sequence
    of ``length`` tokens; None means that they are the whole sequence.
    """
    indices = repeated.to(keys.device)
    keys, values = keys[:, indices], values[:, indices].clone()
    if first < _HEAVY:
        columns = len(repeated) if length is None else length
        values[:, : _HEAVY - first] *= 2.0 ** max(0, math.ceil(math.log2(_WEIGHT * columns / _HEAVY)))
    return keys, values


# Largest error, in standard deviations of the reference logits. A wrong mask, position or state is off by about one;
# float32 rounding stays under 1e-4 and bfloat16 under 0.1 on every family of the test matrix.
_TOLERANCE = {torch.float32: 5e-3, torch.float64: 5e-3}
_HALF_TOLERANCE = 0.35
# Our own kernels round in other places than transformers does, and a model may be sensitive to that: for SmolLM2 in
# bfloat16, single logits differ from the float32 ones by up to 0.09 standard deviations with our kernels and by 0.53
# with transformers (root mean square over a vocabulary: 0.045 and 0.165). A mistake in a layer gives a mean error of
# 0.5 and more over the check.
_HALF_MEAN_TOLERANCE = 0.2
# For kernels that round activations to int8 in blocks, compared with float32. With SmolLM2 in Q4_1, whose perplexity
# rises by less than 0.5 %, ten of twenty logits are off by more than 0.35, and at most by 0.76 (root mean square: 0.11,
# at most 0.27). With its weights in int8 and int4, compared with transformers in bfloat16 with the same weights, the
# largest errors are 0.64 and 0.79.
# The kernels' weights are compared with the file's while they are packed, so a wrong scale is found without logits.
_INT8_TOLERANCE = 1.0
# In a mixture of experts, rounding alone can send a token to another expert. Its logits then differ by 0.49 (a tiny
# gpt-oss); the logits of a different token differ by 1 and more. Rounding affects few tokens in this way, but wrong
# positions change the logits of half of the tokens.
_SINGLE_MEAN_TOLERANCE = 0.6
_MAX_OFF = 1 / 4
_FEW = 4


class Comparison:
    """Collects pairs of logits ``[vocabulary]``: the expected logits and the logits to check.

    ``dtype`` is the dtype that causes rounding: the dtype of the weights, or int8 if activations are rounded to it;
    None means the dtype of the logits. ``same_operations`` means that both logits come from the same operations.
    Otherwise, logits in half precision are judged by their mean error and by how many are beyond the tolerance.
    """

    def __init__(self, dtype: torch.dtype | None = None, *, same_operations: bool = True) -> None:
        self._dtype = dtype
        self._same_operations = same_operations
        self._tolerance = _HALF_TOLERANCE
        self._worst = 0.0
        self._means: list[float] = []
        self._off = 0  # logits beyond the tolerance

    def add(self, expected: torch.Tensor, got: torch.Tensor) -> None:
        """Compares one more pair of logits."""
        dtype = self._dtype or expected.dtype
        self._tolerance = _INT8_TOLERANCE if dtype is torch.int8 else _TOLERANCE.get(dtype, _HALF_TOLERANCE)
        expected, got = expected.float(), got.float().to(expected.device)
        error = ((got - expected).abs().max() / expected.std()).item()
        self._worst = max(self._worst, error if error == error else float("inf"))
        self._off += not error <= self._tolerance
        mean = ((got - expected).pow(2).mean().sqrt() / expected.std()).item()
        self._means.append(mean if mean == mean else float("inf"))

    @property
    def is_exact(self) -> bool:
        """Whether every single error must be within the tolerance, not only the mean error."""
        return self._tolerance in _TOLERANCE.values()

    @property
    def difference(self) -> str | None:
        """Describes how much the logits differ; None if rounding explains the difference."""
        error = self._error()
        return None if error is None else f"{error:.3g} standard deviations"

    def _error(self) -> float | None:
        if self._same_operations or self.is_exact:
            return None if self._worst <= self._tolerance else self._worst
        if max(self._means, default=0.0) > _SINGLE_MEAN_TOLERANCE:
            return max(self._means)
        if len(self._means) >= _FEW and self._off > _MAX_OFF * len(self._means):
            return self._worst
        mean = sum(self._means) / max(1, len(self._means))
        return None if mean <= _HALF_MEAN_TOLERANCE else mean
