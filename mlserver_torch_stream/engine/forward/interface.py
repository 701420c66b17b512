"""Defines a forward: one call of a model on new tokens over a KV cache.

Knows no implementation, so that batchers, checks and faults import none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from mlserver_torch_stream.engine.kv_cache.row_cache import RowCache


class Forward(Protocol):
    """Takes tokens ``[rows][queries]`` and their cache; returns the logits ``[rows, vocabulary]`` of the last tokens.

    A call adds the tokens to the cache. If it raises, the cache holds none of them.
    """

    def __call__(self, tokens: Sequence[Sequence[int]], cache: RowCache) -> torch.Tensor: ...


@runtime_checkable
class JointForward(Forward, Protocol):
    """A forward that also takes the rows of several caches in one call, and so reads the weights once for all."""

    def together(self, parts: Sequence[tuple[Sequence[Sequence[int]], RowCache]]) -> list[torch.Tensor]:
        """Returns the logits of each part. All rows have equally many tokens. If it raises, no cache has advanced."""
