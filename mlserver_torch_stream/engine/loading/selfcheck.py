"""Checks at load that a batch gets the logits that the model gives each of its sequences alone.

Knows no family by name: it runs the real model on a few tokens, with sequences that join and leave, and compares. Then
it does the same at the far positions that the model's config names (``far_positions``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, PreTrainedModel

from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward, input_device
from mlserver_torch_stream.engine.kv_cache.bytes_per_token import CacheCost, cost_by_device
from mlserver_torch_stream.engine.kv_cache.row_cache import CacheLayout, RowCache, UnsupportedCache
from mlserver_torch_stream.engine.loading.comparison import Comparison, ErrorOf, in_deviations
from mlserver_torch_stream.engine.loading.far_positions import compare_far, far_lengths
from mlserver_torch_stream.errors import LoadFailed

_LENGTHS = (6, 9, 3)
# Our own kernels work in blocks of 12 queries and of 16 and 32 keys: one sequence crosses all of them.
_KERNEL_LENGTHS = (6, 50, 3)


@dataclass(frozen=True, slots=True)
class SelfCheckResult:
    """``problem`` says why the model cannot be batched, None if it can; ``chunked`` whether prefill can be chunked.

    ``costs`` are those of a sequence's cache, by device.
    """

    problem: str | None
    chunked: bool = False
    costs: Mapping[torch.device, CacheCost] = field(default_factory=dict)

    @property
    def cost(self) -> CacheCost | None:
        """The cost on all devices together; None if the model cannot be batched."""
        return sum(self.costs.values(), CacheCost()) if self.problem is None else None


def check_batching(model: PreTrainedModel, room: int | None = None) -> SelfCheckResult:
    """Checks prompts in chunks and, if those fail, whole prompts. ``room`` is that of ``far_lengths``.

    Raises LoadFailed if a device has no memory left or is lost, which says nothing of the model.
    """
    try:
        layout = CacheLayout(model.config)
    except UnsupportedCache as error:
        return SelfCheckResult(problem=str(error))
    problem = None
    for chunked in (True, False):
        trial = _Trial(model, layout, ModelForward(model), _LENGTHS)
        try:
            differing = trial.run(chunked, lambda each: each.error, room, beside=True)
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError) as error:
            raise LoadFailed(f"the check of the model at load failed: {_in_a_line(error)}") from error
        except Exception as error:  # a model's code can raise any error for a cache that it does not know
            problem = _in_a_line(error)
            continue
        if differing is None:
            return SelfCheckResult(problem=None, chunked=chunked, costs=trial.costs)
        problem = f"batched logits differ from single ones by {differing}"
    return SelfCheckResult(problem=problem)


def check_generate(model: PreTrainedModel) -> None:
    """Runs ``generate`` as the serial engine does, for a model that cannot be batched. Raises LoadFailed if it fails.

    So an error of the check above that has nothing to do with batching ends the load.
    """
    ids = torch.ones((1, 3), dtype=torch.long, device=input_device(model))
    config = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0)
    try:
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    except Exception as error:
        raise LoadFailed(f"the model cannot generate: {_in_a_line(error)}") from error


def check_forward(model: PreTrainedModel, forward: Forward) -> str | None:
    """Returns why ``forward`` must not replace the model's own; None if its logits are the model's."""
    trial = _Trial(model, CacheLayout(model.config), forward, _KERNEL_LENGTHS)
    differing = trial.run(True, lambda each: each.error_of_kernels)
    return None if differing is None else f"its logits differ from the model's by {differing}"


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


class _Trial:
    """Runs three sequences over one cache: the second joins longer than the first, the third shorter, one leaves."""

    def __init__(self, model: PreTrainedModel, layout: CacheLayout, forward: Forward, lengths: tuple[int, ...]) -> None:
        self._model = model
        self._layout = layout
        self._forward = forward
        self._lengths = lengths
        self._vocab = int(model.get_input_embeddings().weight.shape[0])
        self._device = input_device(model)
        self._rows: list[list[int]] = []
        self._batch = RowCache(layout, rows=len(lengths), capacity=4 * max(lengths))
        self._got: list[tuple[list[int], int, torch.Tensor]] = []  # a sequence, how many of its tokens, their logits
        self.costs: Mapping[torch.device, CacheCost] = {}

    def run(self, chunked: bool, error_of: ErrorOf, room: int | None = None, *, beside: bool = False) -> str | None:
        """Returns by how much logits differ and where. ``beside`` adds a short sequence to the batch of a far one."""
        for length in self._lengths:
            self._admit(length, chunked)
            self._decode()
        self._rows = [self._rows[row] for row in self._batch.leave({0})]
        self._decode()
        self._decode()
        if (error := error_of(self._near())) is not None:
            return in_deviations(error)
        short, ids = self._batch.extract(0), self._rows[0] if beside else None
        for length in far_lengths(self._model, self._layout, self.costs, max(self._lengths), room):
            far = compare_far(self._model, self._forward, length, short=short, ids=ids, chunked=chunked)
            for position, comparison in far.items():
                if (error := error_of(comparison)) is not None:
                    return f"{in_deviations(error)} at position {position}"
        return None

    def _token(self, seed: int) -> int:
        return (seed * 7919 + 13) % self._vocab

    def _admit(self, length: int, chunked: bool) -> None:
        ids = [self._token(100 * length + i) for i in range(length)]
        single = RowCache(self._layout, capacity=length)
        single.begin_row()
        chunks = [ids[:2], ids[2:]] if chunked else [ids]
        for chunk in chunks:
            logits = self._forward([chunk], single)
        self._got.append((ids, len(ids), logits[0].clone()))
        self.costs = cost_by_device(single.cache.layers)
        self._batch.join(single)
        self._rows.append(ids)

    def _decode(self) -> None:
        tokens = [self._token(len(ids) + row) for row, ids in enumerate(self._rows)]
        logits = self._forward([[token] for token in tokens], self._batch)
        for row, token in enumerate(tokens):
            self._rows[row].append(token)
            self._got.append((self._rows[row], len(self._rows[row]), logits[row].clone()))

    def _near(self) -> Comparison:
        """Compares all logits so far with those of one call of the model for each sequence, alone and without cache."""
        comparison = Comparison()
        for ids in {id(ids): ids for ids, _, _ in self._got}.values():
            output = self._model(torch.tensor([ids], device=self._device), use_cache=False, return_dict=True)
            for sequence, length, logits in self._got:
                if sequence is ids:
                    comparison.add(output.logits[0, length - 1], logits)
        return comparison
