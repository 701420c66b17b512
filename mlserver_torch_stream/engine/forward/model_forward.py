"""Calls a transformers model on the new tokens of a batch, with the arguments that its forward accepts.

A model gets a batch in one of three forms; ``checks.selfcheck`` chooses the first form that reproduces the model's
logits. In the packed form all tokens are in one row. The form with rows is for models with states: each sequence with
one new token is a row, and each chunk of a prompt runs in a separate call. The form with rows and masks is for models
whose attention cannot be replaced: it has the same rows, with masks over gathered keys and values.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import torch
import transformers

from mlserver_torch_stream.engine.attention.gathered import GatheredAttention
from mlserver_torch_stream.engine.attention.paged_attention import PagedAttention, packed_ids
from mlserver_torch_stream.engine.attention.registered import give_attention_back, paged, take_attention
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch
from mlserver_torch_stream.engine.devices import from_host, input_device, plain_forward, weight_device
from mlserver_torch_stream.engine.forward.interface import MODELS_OWN, LoadedForward, Logits
from mlserver_torch_stream.engine.forward.model_step import ModelStep, MovedCache, Way


class ModelForward(LoadedForward):
    """The ``Forward`` of any transformers model.

    Accelerate's hooks move the inputs to each layer's device; the pages of a layer are on the device of its keys. The
    logits are on the device of the model's last module.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        way: Way = Way.PACKED,
        attention: PagedAttention | None = None,
    ) -> None:
        """Replaces the model's attention, or restores the model's own attention for rows with masks.

        If ``attention`` is None, torch's operators compute attention. Raises CannotPage if the model's attention cannot
        be replaced.
        """
        if way is Way.MASKED_ROWS:
            give_attention_back(model)
        else:
            take_attention(model)
        self.way = way
        self.attention: PagedAttention = GatheredAttention() if attention is None else attention
        self._forward = plain_forward(model)
        names = inspect.signature(model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in names else "cache_params"
        self._takes_positions = "position_ids" in names
        self._takes_mask = "attention_mask" in names
        keep = names.get("logits_to_keep")
        self._takes_keep = keep is not None
        self._takes_rows = keep is not None and "Tensor" in str(keep.annotation)
        self.device = input_device(model)
        self._output_device = weight_device(model.get_output_embeddings(), self.device)
        self._states_device: torch.device | None = None  # of the last hidden states; None until a call has shown it
        self._watched = None if (base := model.base_model) is model else base.register_forward_hook(self._see_states)

    def _see_states(self, base: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Records the device of the last hidden states; a tied head can be on another device than the last norm."""
        self._states_device = output[0].device
        if self._watched is not None:
            self._watched.remove()

    @property
    def packs(self) -> bool:
        return self.way is Way.PACKED

    @property
    def attention_name(self) -> str:
        return MODELS_OWN if self.way is Way.MASKED_ROWS else self.attention.name

    def describe(self) -> str:
        attention = "" if self.way is Way.MASKED_ROWS else f" with {self.attention.describe()}"
        return f"steps {self.way.value}{attention}"

    def __call__(self, batch: Batch, cache: PagedCache) -> Logits:
        cache.prepare(batch)
        parts = [batch] if self.way is Way.PACKED else list(_rows(batch))
        steps = [ModelStep(part, cache, self.way, self.attention) for part in parts]
        logits = [self._run(step) for step in steps]
        for step in steps:  # after all of them: if one raises, no state has changed
            step.keep_states()
        return Logits(logits[0] if len(logits) == 1 else _in_order(batch, parts, logits))

    def tried(self, batch: Batch, cache: PagedCache, more: int = 0) -> tuple[torch.Tensor, bool]:
        """Returns the logits of sequences that fit in one call, without changing their states.

        The cache reports ``more`` tokens in addition to those that it has. The second result says whether the model's
        code reads this number of tokens.
        """
        step = ModelStep(batch, cache, self.way, self.attention, moved=more)
        return self._run(step), isinstance(step.cache, MovedCache) and step.cache.was_read

    def _run(self, step: ModelStep) -> torch.Tensor:
        batch = step.batch
        ids = packed_ids(batch, self.device)
        if self.way is Way.PACKED:
            if self._takes_rows:
                # An index on the CPU works with every device, but the call then waits for the device.
                device = self._states_device or torch.device("cpu")
                return self._call(ids[None], step, logits_to_keep=from_host(batch.wanted_rows, device, torch.long))[0]
            return self._call(ids[None], step)[0, from_host(batch.wanted_rows, self._output_device, torch.long)]
        more: dict[str, Any] = {}
        if self._takes_keep:
            more["logits_to_keep"] = max(1, *(each.wanted for each in batch.sequences))
        if self._takes_mask:
            more["attention_mask"] = step.mask(self.device)
        logits = self._call(ids.reshape(len(batch.sequences), -1), step, **more)
        kept = logits.shape[1]
        return torch.cat([row[kept - each.wanted :] for row, each in zip(logits, batch.sequences, strict=True)])

    def _call(self, ids: torch.Tensor, step: ModelStep, **more: Any) -> torch.Tensor:
        """Calls the model. ``more`` are arguments in addition to the ids, their positions and the cache."""
        if self._takes_mask and self.way is Way.PACKED:  # else GPT-2 waits for the device to find padding in the ids
            more["attention_mask"] = torch.ones_like(ids)
        if self._takes_positions:
            more["position_ids"] = step.on(self.device).positions.reshape(ids.shape)
        more[self._cache_name] = step.cache
        with paged(step.attend) if self.way is not Way.MASKED_ROWS else nullcontext():
            logits: torch.Tensor = self._forward(ids, use_cache=True, return_dict=True, **more).logits
        return logits


def _rows(batch: Batch) -> list[Batch]:
    """Splits a batch for the ways in which the model gets sequences as rows.

    Consecutive sequences that only decode one token stay together; every other sequence becomes a batch of its own. The
    order is kept, because a sequence may read pages that an earlier sequence writes.
    """
    parts: list[Batch] = []
    for together, group in groupby(batch.sequences, lambda each: each.count == 1 and each.start > 0):
        sequences = tuple(group)
        parts += [Batch(sequences)] if together else [Batch((each,)) for each in sequences]
    return parts


def _in_order(batch: Batch, parts: Sequence[Batch], logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """Puts the logits of the parts into the order of the batch."""
    by_sequence: dict[int, torch.Tensor] = {}
    for part, rows in zip(parts, logits, strict=True):
        counts = [each.wanted for each in part.sequences]
        by_sequence.update((id(each), row) for each, row in zip(part.sequences, rows.split(counts), strict=True))
    return torch.cat([by_sequence[id(each)] for each in batch.sequences])


def give_contiguous_states(model: transformers.PreTrainedModel) -> None:
    """Makes the output embeddings copy the hidden states of a prompt's last token before they use them.

    The hidden states of a prompt's last token are a slice ``[rows, 1, hidden]`` of all hidden states, with their
    strides. To multiply such a slice on a CPU, torch copies the whole weight matrix. For 49,152 tokens of 576
    dimensions in bfloat16, this copy takes 95 ms and the product itself 3 ms (torch 2.13, two cores with AMX). The
    tensor method ``contiguous`` would not help, because it ignores the stride of a single row.
    """

    def contiguous(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0].clone(memory_format=torch.contiguous_format), *inputs[1:]) if inputs else inputs

    if (output_embeddings := model.get_output_embeddings()) is not None:
        output_embeddings.register_forward_pre_hook(contiguous)
