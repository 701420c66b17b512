"""Calls a transformers model on the new tokens of a batch, with the arguments that its forward takes.

Knows nothing of requests or of sampling. A model takes a batch in one of three ways, the first that gives its logits
(``loading.selfcheck`` tries them): packed, all tokens in one row; in rows, one token each, and chunks of prompts
alone, as states need it; in rows with masks, for models whose attention cannot be replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.attention.interface import (
    AttentionOptions,
    BatchTensors,
    PagedAttention,
    batch_tensors,
)
from mlserver_torch_stream.engine.attention.reference import reference_attention
from mlserver_torch_stream.engine.attention.registered import CannotPage, paged, take_attention
from mlserver_torch_stream.engine.batch import Batch
from mlserver_torch_stream.engine.devices import from_host
from mlserver_torch_stream.engine.forward.step_cache import PagesLayer, StepCache
from mlserver_torch_stream.engine.kv_cache.paged_cache import PagedCache


class Way(str, Enum):
    """How a model takes the tokens of a batch."""

    PACKED = "packed"
    ROWS = "rows"
    MASKED_ROWS = "rows with masks"


class ModelForward:
    """The ``Forward`` of any transformers model.

    Accelerate's hooks move the inputs to each layer's device, and a layer's pages are on the device of its keys. The
    logits are on the device of the model's last module.
    """

    def __init__(
        self, model: PreTrainedModel, way: Way = Way.PACKED, attention: PagedAttention = reference_attention
    ) -> None:
        """Raises CannotPage."""
        if way is not Way.MASKED_ROWS:
            take_attention(model)
        self.way = way
        self._attention = attention
        self._forward = plain_forward(model)
        names = inspect.signature(model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in names else "cache_params"
        self._takes_positions = "position_ids" in names
        self._takes_mask = "attention_mask" in names
        self._takes_keep = "logits_to_keep" in names
        self.device = input_device(model)
        self._model = model

    @property
    def devices(self) -> set[torch.device]:
        """Where the model's weights are."""
        return {parameter.device for parameter in self._model.parameters()}

    def __call__(self, batch: Batch, cache: PagedCache) -> torch.Tensor:
        cache.prepare(batch)
        parts = [batch] if self.way is Way.PACKED else list(_rows(batch))
        logits = [self._run(part, cache) for part in parts]
        return logits[0] if len(logits) == 1 else _in_order(batch, parts, logits)

    def packed_tokens(self, ids: torch.Tensor, on: TensorsOn, cache: PagedCache) -> torch.Tensor:
        """Returns the logits of tokens, ``[tokens]``, that are on the device with the numbers of their batch.

        It copies nothing from the host and makes no copies of pages, so that a device can record it.
        """
        step = _Step(on(self.device).batch, cache, Way.PACKED, self._attention, on)
        inputs = self._inputs(step)
        if self._takes_positions:
            inputs["position_ids"] = on(self.device).positions[None]
        with paged(step.attend):
            logits: torch.Tensor = self._forward(ids[None], **inputs).logits
        return logits[0]

    def _inputs(self, step: _Step) -> dict[str, Any]:
        return {self._cache_name: step.cache, "use_cache": True, "return_dict": True}

    def _run(self, batch: Batch, cache: PagedCache) -> torch.Tensor:
        step = _Step(batch, cache, self.way, self._attention)
        inputs = self._inputs(step)
        packed = self.way is Way.PACKED
        shape = (1, -1) if packed else (len(batch.sequences), -1)
        tensors = step.on(self.device)
        ids = from_host([token for each in batch.sequences for token in each.token_ids], self.device)
        wanted = from_host(batch.wanted_rows, self.device, torch.long)
        if self._takes_keep:
            inputs["logits_to_keep"] = wanted if packed else 1 + max(each.wanted for each in batch.sequences)
        if self._takes_mask and not packed:
            inputs["attention_mask"] = step.mask(self.device)
        if self._takes_positions:
            inputs["position_ids"] = tensors.positions.reshape(shape)
        with paged(step.attend):
            output = self._forward(ids.reshape(shape), **inputs)
        step.keep_states()
        logits: torch.Tensor = output.logits
        if packed:
            return logits[0] if self._takes_keep else logits[0, wanted.to(logits.device)]
        kept = logits.shape[1]
        return torch.cat([row[kept - each.wanted :] for row, each in zip(logits, batch.sequences, strict=True)])


TensorsOn = Callable[[torch.device], BatchTensors]
"""Returns a batch as tensors on a device."""


class _Step:
    """One call of a model: its cache, its attention and its masks."""

    def __init__(
        self, batch: Batch, cache: PagedCache, way: Way, attention: PagedAttention, on: TensorsOn | None = None
    ) -> None:
        """``on``: the batch's tensors, if they are there already."""
        self._batch = batch
        self._pages = cache
        self._attention = attention
        self._tensors: dict[torch.device, BatchTensors] = {}
        self.on = on or self._copied
        self._longest = max(each.length for each in batch.sequences)
        self._states = self._take_states()
        layers: list[Any] = []
        for index in range(len(cache.layout)):
            pages = cache.layers.get(index)
            if pages is None:
                layers.append(self._states.get(index) or _NoLayer())
                continue
            columns = self._columns(cache.groups[pages.group].span)
            seen = self._gather if way is Way.MASKED_ROWS else _as_given
            start = max(each.start for each in batch.sequences)
            window = cache.groups[pages.group].span
            layers.append(PagesLayer(pages, partial(self._slots, pages.group), start, seen, columns, window))
        self.cache = StepCache(layers)

    def _slots(self, group: int, device: torch.device) -> torch.Tensor:
        return self.on(device).slots[group]

    def _copied(self, device: torch.device) -> BatchTensors:
        if device not in self._tensors:
            self._tensors[device] = batch_tensors(self._batch, self._pages.page_size, len(self._pages.groups), device)
        return self._tensors[device]

    # --- states ---

    def _take_states(self) -> dict[int, Any]:
        if self._pages.states is None:
            return {}
        if self._batch.sequences[0].start == 0:
            return self._pages.states.fresh()
        return self._pages.states.take([each.state_slot for each in self._batch.sequences])

    def keep_states(self) -> None:
        if self._pages.states is not None:
            self._pages.states.put([each.state_slot for each in self._batch.sequences], self._states)

    # --- attention over pages ---

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        layer = self.cache.layer_of(key)
        if layer is None:
            raise CannotPage("an attention's keys are not those of a cache layer")
        group = self._pages.groups[layer.pages.group]
        rows, heads, tokens, dim = query.shape
        given = AttentionOptions(
            scale=dim**-0.5 if scaling is None else scaling,
            window=sliding_window if sliding_window is not None and group.chunk is None else group.window,
            chunk=group.chunk,
            softcap=softcap,
            sinks=s_aux,
        )
        packed = query.transpose(1, 2).reshape(rows * tokens, heads, dim)
        output = self._attention(packed, layer.pages, self.on(query.device), given)
        return output.reshape(rows, tokens, heads, -1)

    # --- attention by masks ---

    def _columns(self, span: int | None) -> tuple[int, int]:
        """Returns how many columns a layer shows, and the first of them, for rows aligned at their newest token."""
        shown = self._longest
        if span is not None:
            shown = min(shown, span - 1 + max(each.count for each in self._batch.sequences))
        return shown, self._longest - shown

    def mask(self, device: torch.device) -> torch.Tensor | None:
        """Returns ``[rows, columns]``, 0 where a row is padded at its left; None if no row is."""
        lengths = self.on(device).lengths
        if all(each.length == self._longest for each in self._batch.sequences):
            return None
        return (torch.arange(self._longest, device=device) >= (self._longest - lengths)[:, None]).long()

    def _gather(self, layer: PagesLayer, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``[rows, kv_heads, columns, head_dim]`` with zeros where a row is padded."""
        shown, _ = self._columns(self._pages.groups[layer.pages.group].span)
        keys = key.new_zeros((*key.shape[:2], shown, key.shape[3]))
        values = value.new_zeros((*value.shape[:2], shown, value.shape[3]))
        for row, each in enumerate(self._batch.sequences):
            first = max(0, each.length - shown)
            part = layer.pages.read(each.tables[layer.pages.group], first, each.length)
            keys[row, :, shown - (each.length - first) :], values[row, :, shown - (each.length - first) :] = part
        return keys, values


class _NoLayer:
    """Stands for a layer of transformers' cache that holds nothing."""


def _as_given(layer: PagesLayer, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return key, value


def _rows(batch: Batch) -> list[Batch]:
    """Returns the sequences with one token as one batch, and each other one alone; none of the first is fresh."""
    single = tuple(each for each in batch.sequences if each.count == 1 and each.start > 0)
    others = [Batch((each,)) for each in batch.sequences if each.count > 1 or each.start == 0]
    return [Batch(single), *others] if single else others


def _in_order(batch: Batch, parts: Sequence[Batch], logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """Puts the logits of the parts into the order of the batch."""
    found: dict[int, torch.Tensor] = {}
    for part, rows in zip(parts, logits, strict=True):
        counts = [each.wanted for each in part.sequences]
        found.update((id(each), row) for each, row in zip(part.sequences, rows.split(counts), strict=True))
    return torch.cat([found[id(each)] for each in batch.sequences])


def plain_forward(model: PreTrainedModel) -> Callable[..., Any]:
    """Returns the model without accelerate's outermost hook, which copies the output to the device of the input.

    Between GPUs that copy waits for all work that is queued on either of them, also for that of other batches.
    """
    hook = getattr(model, "_hf_hook", None)
    fetches = any(getattr(part, "offload", False) for part in getattr(hook, "hooks", (hook,)))
    forward: Callable[..., Any] = model if hook is None or fetches else model._old_forward
    return forward


def input_device(model: PreTrainedModel) -> torch.device:
    """Returns the device of a model's token ids. Only the hook of an offloaded embedding knows it."""
    embedding = model.get_input_embeddings()
    device: torch.device = embedding.weight.device
    if device.type != "meta":
        return device
    return torch.device(getattr(getattr(embedding, "_hf_hook", None), "execution_device", None) or "cpu")


def give_contiguous_states(model: PreTrainedModel) -> None:
    """Copies the hidden states of a prompt's last token before the output embeddings take them.

    They are a slice of the prompt's, ``[rows, 1, hidden]`` with its strides. On a CPU torch multiplies such a slice by
    a copy of the whole matrix: 95 ms for 49,152 tokens of 576 dimensions in bfloat16, where the product takes 3 ms
    (torch 2.13, two cores with AMX). ``contiguous`` looks past the stride of a single row.
    """

    def contiguous(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0].clone(memory_format=torch.contiguous_format), *inputs[1:]) if inputs else inputs

    if (output_embeddings := model.get_output_embeddings()) is not None:
        output_embeddings.register_forward_pre_hook(contiguous)
