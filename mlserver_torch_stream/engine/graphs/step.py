"""One decode step of so many rows, recorded in parts between the model's attentions, and run again.

Knows nothing of batches or of which device records. The attentions run as ever, on the cache's own slabs: these move
and grow, and a recording holds on to addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.cache.rows import RowCache
from mlserver_torch_stream.engine.graphs.attention import (
    EAGER,
    Attend,
    CannotCut,
    PassingCache,
    attention_of,
    cut_at_attention,
)
from mlserver_torch_stream.engine.graphs.recorder import Recorder

Replay = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Attention:
    """One attention between two parts: its tensors are those that the parts were recorded on, of all rows."""

    attend: Attend
    module: torch.nn.Module
    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    options: dict[str, Any]

    def run(self, rows: int, cache: RowCache, masks: Masks) -> None:
        keys, values = cache.cache.update(self.key[:rows], self.value[:rows], self.layer)
        mask = masks.over(keys.shape[2])
        output, _ = self.attend(self.module, self.query[:rows], keys, values, mask, **self.options)
        self.output[:rows].copy_(output)


class Masks:
    """Of one step of a batch, by how many columns a layer shows: full layers all, those with a window fewer."""

    def __init__(self, lengths: Sequence[int], positions: torch.Tensor, added: torch.dtype | None) -> None:
        """``positions``: ``[rows, 1]``, the length of each row, on the device. ``added``: dtype of masks to add."""
        self._shortest = min(lengths)
        self._positions = positions
        self._added = added
        self._made: dict[int, torch.Tensor | None] = {}

    def over(self, columns: int) -> torch.Tensor | None:
        """``[rows, 1, 1, columns]``, false (or the least number) where a row is padded at its left; None if none is."""
        if columns not in self._made:
            padded = self._shortest < columns - 1
            self._made[columns] = self._make(columns) if padded else None
        return self._made[columns]

    def _make(self, columns: int) -> torch.Tensor:
        numbers = torch.arange(columns, device=self._positions.device)
        seen = (numbers >= columns - 1 - self._positions)[:, None, None, :]
        if self._added is None:
            return seen
        least = torch.finfo(self._added).min
        return torch.zeros_like(seen, dtype=self._added).masked_fill_(~seen, least)


class RecordedStep:
    """``run`` takes the tokens of at most ``rows`` rows and gives their logits."""

    def __init__(self, model: PreTrainedModel, recorder: Recorder, rows: int, windows: Sequence[int | None]) -> None:
        """Raises CannotCut, or what the model or the device raises."""
        device = model.get_input_embeddings().weight.device
        self.rows = rows
        self._implementation = model.config._attn_implementation
        # Tokens and positions in one tensor: one copy to the device for both.
        self._inputs = torch.zeros((2, rows, 1), dtype=torch.long, device=device)
        self._host = torch.zeros_like(self._inputs, device="cpu", pin_memory=device.type == "cuda")
        self._parts: list[Replay] = []
        self._attentions: list[_Attention] = []
        self._record(model, recorder, windows)

    def _record(self, model: PreTrainedModel, recorder: Recorder, windows: Sequence[int | None]) -> None:
        passing = PassingCache(list(windows))

        def cut(
            module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **more: Any
        ) -> tuple[torch.Tensor, None]:
            layer = passing.layer_of(key, value)
            self._parts.append(recorder.end())
            attend = attention_of(self._implementation, module)
            output = attend(module, query, key, value, None, **more)[0].clone(memory_format=torch.contiguous_format)
            self._attentions.append(_Attention(attend, module, layer, query, key, value, output, more))
            recorder.begin()
            return output, None

        with cut_at_attention(model, cut), recorder.recording():
            recorder.begin()
            output = model(
                input_ids=self._inputs[0],
                position_ids=self._inputs[1],
                past_key_values=passing,
                use_cache=True,
                return_dict=True,
            )
            self._logits = output.logits[:, -1]
            self._parts.append(recorder.end())
        if sorted(attention.layer for attention in self._attentions) != list(range(len(windows))):
            raise CannotCut(f"{len(self._attentions)} attentions over {len(windows)} cache layers")

    def run(self, tokens: Sequence[Sequence[int]], cache: RowCache) -> torch.Tensor:
        """Logits ``[rows, vocabulary]`` of the model's dtype. Does not count the tokens in ``cache``."""
        rows = len(tokens)
        self._host[0, :rows] = torch.tensor(tokens)
        self._host[1, :rows, 0] = torch.tensor(cache.lengths)
        self._inputs.copy_(self._host, non_blocking=True)
        added = self._logits.dtype if self._implementation == EAGER else None
        masks = Masks(cache.lengths, self._inputs[1, :rows], added)
        for part, attention in zip(self._parts[:-1], self._attentions, strict=True):
            part()
            attention.run(rows, cache, masks)
        self._parts[-1]()
        return self._logits[:rows].clone()
