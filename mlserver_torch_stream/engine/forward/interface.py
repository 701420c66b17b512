"""Defines a forward: one call of a model on the packed new tokens of a batch, over pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch
from mlserver_torch_stream.engine.sampling.candidates import RowDraw


@dataclass(frozen=True, slots=True)
class Logits:
    """The logits ``[wanted rows, vocabulary]`` of a batch, in the model's dtype or in float32.

    ``argmax`` is the id of each row's first largest logit, over all columns of ``tensor``, or -1 where that is NaN or
    infinite; None: not computed. It may be longer than ``tensor`` has rows. ``row_draw`` draws tokens on
    the threads of the forward; None: torch draws them.
    """

    tensor: torch.Tensor
    argmax: Sequence[int] | None = None
    row_draw: RowDraw | None = None

    def is_finite(self, row: int) -> bool:
        """Whether the largest logit of a row is neither NaN nor infinite."""
        return self.argmax[row] >= 0 if self.argmax is not None else bool(self.tensor[row].max().isfinite())


class Forward(Protocol):
    """Returns the logits of a batch. The next call may overwrite them.

    It makes the batch's copies, and writes the keys and values of the new tokens to their pages. If it raises, those
    pages hold anything, and states are as before, so that the same tokens can be tried again.
    """

    def __call__(self, batch: Batch, cache: PagedCache) -> Logits:
        """Computes the new tokens of ``batch`` over the pages of ``cache``."""


class LoadedForward(Forward, Protocol):
    """The forward of a loaded model, with what an engine asks of it."""

    has_threads: bool = False  # of its own: torch's would be in their way, and it enters no module of the model

    @property
    def packs(self) -> bool:
        """Whether it computes all new tokens of a batch together, so that a few more of them cost little."""
        return True

    def reserve(self, cache: PagedCache) -> None:
        """Allocates what it can of a cache before the first batch. Raises MemoryError."""
        return None

    def describe(self) -> str:
        """Returns how it runs, for the summary of a load."""
        ...
