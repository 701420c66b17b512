"""The check, at load, that batching a model's rows gives the logits that the model gives each sequence alone.

Knows no family by name: it runs the real model on a few tokens, with rows that join and leave, and compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.cache.cost import CacheCost, cost_by_device
from mlserver_torch_stream.engine.cache.rows import CacheLayout, RowCache, UnsupportedCache
from mlserver_torch_stream.engine.forward import Forward, ModelForward, input_device

# Largest error, in standard deviations of the reference logits. A wrong mask, position or state is off by about one;
# float32 rounding stays under 1e-4 and bfloat16 under 0.1 on every family of the test matrix.
_TOLERANCE = {torch.float32: 5e-3, torch.float64: 5e-3}
_HALF_TOLERANCE = 0.35
# Our own kernels round elsewhere than transformers does, and a model may be touchy: of SmolLM2 in bfloat16 single
# logits are off the float32 ones by up to 0.09 of them with our kernels and by 0.53 with transformers (root mean
# square over a vocabulary: 0.045 and 0.165). A mistake in a layer is off by 0.5 and more in the mean over the check.
_HALF_MEAN_TOLERANCE = 0.2
_LENGTHS = (6, 9, 3)
# Our own kernels work in blocks of 12 queries and of 16 and 32 keys: one row crosses all of them.
_KERNEL_LENGTHS = (6, 50, 3)


@dataclass(frozen=True, slots=True)
class Findings:
    """``chunked``: a prompt may be prefilled in pieces. ``problem``: why rows cannot be batched, or None.

    ``costs``: of a row's cache, by the devices that it is on.
    """

    problem: str | None
    chunked: bool = False
    costs: Mapping[torch.device, CacheCost] = field(default_factory=dict)

    @property
    def cost(self) -> CacheCost | None:
        """In all; None if rows cannot be batched."""
        return sum(self.costs.values(), CacheCost()) if self.problem is None else None


def logits_tolerance(dtype: torch.dtype) -> float:
    """The largest error of a logit that rounding explains, in standard deviations of the logits."""
    return _TOLERANCE.get(dtype, _HALF_TOLERANCE)


def check_batching(model: PreTrainedModel) -> Findings:
    """Runs the check in pieces, then with whole prompts if pieces fail; never raises for what the model does."""
    try:
        layout = CacheLayout(model.config)
    except UnsupportedCache as error:
        return Findings(problem=str(error))
    problem = None
    for chunked in (True, False):
        try:
            trial = _Trial(model, layout, ModelForward(model), _LENGTHS)
            trial.run(chunked)
        except Exception as error:  # whatever a model's code raises, the serial engine is the answer
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        if trial.worst <= trial.tolerance:
            return Findings(problem=None, chunked=chunked, costs=trial.costs)
        problem = f"batched logits differ from single ones by {trial.worst:.3g} standard deviations"
    return Findings(problem=problem)


def check_forward(model: PreTrainedModel, forward: Forward) -> str | None:
    """Why ``forward`` must not stand in for the model's own; None if its logits are the model's."""
    trial = _Trial(model, CacheLayout(model.config), forward, _KERNEL_LENGTHS)
    trial.run(chunked=True)
    exact = trial.tolerance != _HALF_TOLERANCE
    error, tolerance = (trial.worst, trial.tolerance) if exact else (trial.mean, _HALF_MEAN_TOLERANCE)
    if error <= tolerance:
        return None
    return f"its logits differ from the model's by {error:.3g} standard deviations"


class _Trial:
    """Three sequences over one row cache: the second joins longer than the first, the third shorter, one leaves."""

    def __init__(self, model: PreTrainedModel, layout: CacheLayout, forward: Forward, lengths: tuple[int, ...]) -> None:
        self._model = model
        self._layout = layout
        self._forward = forward
        self._lengths = lengths
        self._vocab = int(model.get_input_embeddings().weight.shape[0])
        self._device = input_device(model)
        self._rows: list[list[int]] = []
        self._batch = RowCache(layout, rows=len(lengths), capacity=4 * max(lengths))
        self.worst = 0.0
        self._means: list[float] = []
        self.tolerance = _HALF_TOLERANCE
        self.costs: Mapping[torch.device, CacheCost] = {}

    @property
    def mean(self) -> float:
        return sum(self._means) / len(self._means)

    def run(self, chunked: bool) -> None:
        for length in self._lengths:
            self._admit(length, chunked)
            self._decode()
        self._rows = [self._rows[row] for row in self._batch.leave({0})]
        self._decode()
        self._decode()

    def _token(self, seed: int) -> int:
        return (seed * 7919 + 13) % self._vocab

    def _admit(self, length: int, chunked: bool) -> None:
        ids = [self._token(100 * length + i) for i in range(length)]
        single = RowCache(self._layout, capacity=length)
        single.begin_row()
        pieces = [ids[:2], ids[2:]] if chunked else [ids]
        for piece in pieces:
            logits = self._forward([piece], single)
        self._compare(logits[0], ids)
        self.costs = cost_by_device(single.cache.layers)
        self._batch.join(single)
        self._rows.append(ids)

    def _decode(self) -> None:
        tokens = [self._token(len(ids) + row) for row, ids in enumerate(self._rows)]
        logits = self._forward([[token] for token in tokens], self._batch)
        for row, token in enumerate(tokens):
            self._rows[row].append(token)
            self._compare(logits[row], self._rows[row])

    def _compare(self, logits: torch.Tensor, ids: Sequence[int]) -> None:
        output = self._model(torch.tensor([ids], device=self._device), use_cache=False, return_dict=True)
        expected = output.logits[0, -1]
        self.tolerance = logits_tolerance(expected.dtype)
        expected, got = expected.float(), logits.float().to(expected.device)
        error = ((got - expected).abs().max() / expected.std()).item()
        self.worst = max(self.worst, error if error == error else float("inf"))
        self._means.append(((got - expected).pow(2).mean().sqrt() / expected.std()).item())
