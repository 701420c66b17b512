"""Defines the interface of a forward, which is one call of a model on the packed new tokens of a batch, over pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch
from mlserver_torch_stream.engine.sampling.candidates import RowDraw

MODELS_OWN = "transformers"  # the name of a model's own attention


@dataclass(frozen=True, slots=True)
class Logits:
    """The logits ``[wanted rows, vocabulary]`` of a batch, in the model's dtype or in float32.

    ``argmax`` has, for each row, the id of its first largest logit over all columns of ``tensor``, or -1 if that logit
    is NaN or infinite; None means that it was not computed. ``argmax`` may have more entries than ``tensor`` has rows.
    ``row_draw`` draws tokens on the forward's threads; None means that torch draws them.
    """

    tensor: torch.Tensor
    argmax: Sequence[int] | None = None
    row_draw: RowDraw | None = None

    def is_finite(self, row: int) -> bool:
        """Returns whether the largest logit of a row is neither NaN nor infinite."""
        return self.argmax[row] >= 0 if self.argmax is not None else bool(self.tensor[row].max().isfinite())


class Forward(Protocol):
    """Returns the logits of a batch. The next call may overwrite these logits.

    A forward executes the batch's copies, and writes the keys and values of the new tokens to their pages. If a forward
    raises an error, what it wrote to pages is undefined, but the states are unchanged, so the same tokens can be tried
    again.
    """

    def __call__(self, batch: Batch, cache: PagedCache) -> Logits:
        """Computes the new tokens of ``batch`` over the pages of ``cache``."""


class LoadedForward(Forward, Protocol):
    """The forward of a loaded model, with the properties that an engine needs."""

    # Whether it has its own threads, which torch's threads would slow down. If so, it calls no module of the model.
    has_threads: bool = False

    @property
    def attention_name(self) -> str:
        """The name of its attention, one word for metadata and metrics."""
        ...

    @property
    def packs(self) -> bool:
        """Whether the forward computes all new tokens of a batch together, so that a few more tokens cost little."""
        return True

    def reserve(self, cache: PagedCache) -> None:
        """Allocates as much of a cache as is possible before the first batch. Raises MemoryError if that fails."""
        return None

    def describe(self) -> str:
        """Returns a description of the forward, for the summary that is logged after a load."""
        ...
