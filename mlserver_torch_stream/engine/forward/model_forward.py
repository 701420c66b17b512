"""Calls a transformers model on the new tokens of a batch, with the arguments that its forward takes.

Knows nothing of requests or of sampling. A model takes a batch in one of three ways; ``loading.selfcheck`` tries
them and keeps the first that gives the model's logits. Packed: all tokens in one row. Rows, for models with states:
each sequence with one new token is a row, and each chunk of a prompt runs alone. Rows with masks, for models whose
attention cannot be replaced: the same, over gathered keys and values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from enum import Enum
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.attention.paged_attention import (
    AttentionOptions,
    BatchTensors,
    PagedAttention,
    PageWriter,
    batch_tensors,
    packed_ids,
)
from mlserver_torch_stream.engine.attention.registered import CannotPage, give_attention_back, paged, take_attention
from mlserver_torch_stream.engine.attention.torch_attention import torch_attention
from mlserver_torch_stream.engine.batch import Batch
from mlserver_torch_stream.engine.devices import from_host, input_device, plain_forward, weight_device
from mlserver_torch_stream.engine.forward.latent_pages import expanded, has_latents
from mlserver_torch_stream.engine.forward.step_cache import HybridLayer, PagesLayer, StepCache
from mlserver_torch_stream.engine.kv_cache.paged_cache import LayerPages, PagedCache

_CPU = torch.device("cpu")


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
        self,
        model: PreTrainedModel,
        way: Way = Way.PACKED,
        attention: PagedAttention = torch_attention,
        write: PageWriter = LayerPages.write,
    ) -> None:
        """Replaces the model's attention, or gives it back its own for rows with masks. Raises CannotPage."""
        if way is Way.MASKED_ROWS:
            give_attention_back(model)
        else:
            take_attention(model)
        self.way = way
        self._attention = attention
        self._write = write
        self._forward = plain_forward(model)
        names = inspect.signature(model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in names else "cache_params"
        self._takes_positions = "position_ids" in names
        self._takes_mask = "attention_mask" in names
        keep = names.get("logits_to_keep")
        self._takes_keep = keep is not None
        self._takes_rows = keep is not None and "Tensor" in str(keep.annotation)
        self.device = input_device(model)
        self._model = model
        self._output_device = weight_device(model.get_output_embeddings(), self.device)

    @property
    def devices(self) -> set[torch.device]:
        """The devices of the model's weights."""
        return {parameter.device for parameter in self._model.parameters()}

    @property
    def attention(self) -> PagedAttention:
        return self._attention

    @property
    def has_latents(self) -> bool:
        return any(map(has_latents, self._model.modules()))

    def __call__(self, batch: Batch, cache: PagedCache) -> torch.Tensor:
        cache.prepare(batch)
        parts = [batch] if self.way is Way.PACKED else list(_rows(batch))
        steps = [_Step(part, cache, self.way, self._attention, self._write) for part in parts]
        logits = [self._run(step) for step in steps]
        for step in steps:  # after all of them: if one raises, no state has changed
            step.keep_states()
        return logits[0] if len(logits) == 1 else _in_order(batch, parts, logits)

    def packed_tokens(self, ids: torch.Tensor, on: TensorsOn, cache: PagedCache) -> torch.Tensor:
        """Returns the logits of tokens, ``[tokens]``, whose batch is on its devices already.

        It copies nothing from the host, and makes no copies of pages, so that a device can record it.
        """
        return self._call(ids[None], _Step(on(self.device).batch, cache, self.way, self._attention, self._write, on))[0]

    def _run(self, step: _Step) -> torch.Tensor:
        batch = step.batch
        ids = packed_ids(batch, self.device)
        if self.way is Way.PACKED:
            wanted = from_host(batch.wanted_rows, self._output_device, torch.long)
            if self._takes_rows:
                return self._call(ids[None], step, logits_to_keep=wanted)[0]
            return self._call(ids[None], step)[0, wanted]
        more: dict[str, Any] = {}
        if self._takes_keep:
            more["logits_to_keep"] = max(1, *(each.wanted for each in batch.sequences))
        if self._takes_mask:
            more["attention_mask"] = step.mask(self.device)
        logits = self._call(ids.reshape(len(batch.sequences), -1), step, **more)
        kept = logits.shape[1]
        return torch.cat([row[kept - each.wanted :] for row, each in zip(logits, batch.sequences, strict=True)])

    def _call(self, ids: torch.Tensor, step: _Step, **more: Any) -> torch.Tensor:
        """Calls the model. ``more``: arguments beside its ids, their positions and its cache."""
        if self._takes_mask and self.way is Way.PACKED:  # without one, GPT-2 waits for the ids to look for padding
            more["attention_mask"] = torch.ones_like(ids)
        if self._takes_positions:
            more["position_ids"] = step.on(self.device).positions.reshape(ids.shape)
        more[self._cache_name] = step.cache
        with paged(step.attend) if self.way is not Way.MASKED_ROWS else nullcontext():
            logits: torch.Tensor = self._forward(ids, use_cache=True, return_dict=True, **more).logits
        return logits


TensorsOn = Callable[[torch.device], BatchTensors]
"""Returns a batch as tensors on a device."""


class _Step:
    """One call of a model: its cache, its attention and its masks."""

    def __init__(
        self,
        batch: Batch,
        cache: PagedCache,
        way: Way,
        attention: PagedAttention,
        write: PageWriter,
        on: TensorsOn | None = None,
    ) -> None:
        """``on``: the batch's tensors by device, if they have been made already."""
        self.batch = batch
        self._pages = cache
        self._way = way
        self._attention = attention
        self._write = write
        self._tensors: dict[torch.device, BatchTensors] = {}
        self.on = on or self._copied
        self._longest = max(each.length for each in batch.sequences)
        self._states = self._take_states()
        self.cache = StepCache(self._layer(index) for index in range(len(cache.layout)))

    def _layer(self, index: int) -> object:
        pages, states = self._pages.layers.get(index), self._states.get(index)
        if pages is None:
            return _NoLayer() if states is None else states
        span = self._pages.groups[pages.group].span
        start = max(each.start for each in self.batch.sequences)
        store = self._store_and_gather if self._way is Way.MASKED_ROWS else self._store
        own = (pages, store, start, self._columns(span), span is not None)
        return PagesLayer(*own) if states is None else HybridLayer(states, *own)

    def _copied(self, device: torch.device) -> BatchTensors:
        if device not in self._tensors:
            if device == _CPU:
                self._tensors[device] = batch_tensors(
                    self.batch, self._pages.page_size, len(self._pages.groups), device
                )
            else:
                self._tensors[device] = self._copied(_CPU).to(device)
        return self._tensors[device]

    # --- states ---

    def _take_states(self) -> dict[int, Any]:
        if self._pages.states is None:
            return {}
        if self.batch.sequences[0].start == 0:
            return self._pages.states.fresh()
        return self._pages.states.take([each.state_slot for each in self.batch.sequences])

    def keep_states(self) -> None:
        if self._pages.states is not None:
            states = {index: self.cache.layers[index] for index in self._states}
            self._pages.states.put([each.state_slot for each in self.batch.sequences], states)

    # --- attention over pages ---

    def _store(self, layer: PagesLayer, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self.on(key.device).slots[layer.pages.group]
        self._write(layer.pages, key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1), slots)
        return key, value

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
        latent = has_latents(module)
        layer = self.cache.layers[module.layer_idx] if latent else self.cache.layer_of(key)
        if not isinstance(layer, PagesLayer) or layer.pages.keys is None:
            raise CannotPage("an attention's keys are not those of a cache layer")
        group = self._pages.groups[layer.pages.group]
        rows, heads, tokens, dim = query.shape
        device = layer.pages.keys.device  # another one than the query's where layers share keys
        pages, batch = layer.pages, self.on(device)
        if latent:
            pages, batch = expanded(module, pages, batch)
        given = AttentionOptions(
            scale=dim**-0.5 if scaling is None else scaling,
            window=_narrower(sliding_window, group.window) if group.chunk is None else None,
            chunk=group.chunk,
            softcap=softcap,
            sinks=None if s_aux is None else s_aux.to(device),
        )
        packed = query.transpose(1, 2).reshape(rows * tokens, heads, dim).to(device)
        output = self._attention(packed, pages, batch, given).to(query.device)
        return output.reshape(rows, tokens, heads, -1)

    # --- attention by masks ---

    def _columns(self, span: int | None) -> tuple[int, int]:
        """Returns how many positions a layer shows of each row, and the first one. Short rows are padded at left."""
        shown = self._longest
        if span is not None:
            shown = min(shown, span - 1 + max(each.count for each in self.batch.sequences))
        return shown, self._longest - shown

    def mask(self, device: torch.device) -> torch.Tensor | None:
        """Returns ``[rows, positions]``, 0 where a row is padded at its left; None if no row is."""
        if all(each.length == self._longest for each in self.batch.sequences):
            return None
        lengths = self.on(device).lengths
        return (torch.arange(self._longest, device=device) >= (self._longest - lengths)[:, None]).long()

    def _store_and_gather(
        self, layer: PagesLayer, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``[rows, kv_heads, positions, head_dim]`` with zeros where a row is padded."""
        self._store(layer, key, value)
        group, tensors = layer.pages.group, self.on(key.device)
        if ("columns", group) not in tensors.memo:
            tensors.memo["columns", group] = self._shown(group, tensors)
        slots, hidden = tensors.memo["columns", group]
        keys, values = layer.pages.gather(slots)
        return keys.masked_fill_(hidden, 0), values.masked_fill_(hidden, 0)

    def _shown(self, group: int, tensors: BatchTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the slots of the positions that a group shows, ``[rows, positions]``, and where they are padded."""
        shown, _ = self._columns(self._pages.groups[group].span)
        oldest = [self._pages.groups[group].oldest_seen(each.start) for each in self.batch.sequences]
        first = torch.tensor(oldest, device=tensors.positions.device)[:, None]  # older pages are given back
        last = tensors.lengths[:, None].long() - 1
        places = last - torch.arange(shown - 1, -1, -1, device=last.device)
        held = torch.minimum(torch.maximum(places, first), last)
        pages = tensors.tables[group].gather(1, held // self._pages.page_size).long()
        return pages * self._pages.page_size + held % self._pages.page_size, (places < first)[:, None, :, None]


def _narrower(window: int | None, other: int | None) -> int | None:
    return window if other is None else other if window is None else min(window, other)


class _NoLayer:
    """Stands for a layer of transformers' cache that holds nothing."""


def _rows(batch: Batch) -> list[Batch]:
    """Returns neighbours with one token as one batch, none of them fresh, and each other sequence alone.

    Their order stays: a sequence may read pages that one before it writes.
    """
    parts: list[Batch] = []
    for together, group in groupby(batch.sequences, lambda each: each.count == 1 and each.start > 0):
        sequences = tuple(group)
        parts += [Batch(sequences)] if together else [Batch((each,)) for each in sequences]
    return parts


def _in_order(batch: Batch, parts: Sequence[Batch], logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """Puts the logits of the parts into the order of the batch."""
    found: dict[int, torch.Tensor] = {}
    for part, rows in zip(parts, logits, strict=True):
        counts = [each.wanted for each in part.sequences]
        found.update((id(each), row) for each, row in zip(part.sequences, rows.split(counts), strict=True))
    return torch.cat([found[id(each)] for each in batch.sequences])


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
