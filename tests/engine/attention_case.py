"""Random attention over pages, for tests and for a process that they start. Imports no transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mlserver_torch_stream.engine.attention.paged_attention import AttentionOptions, AttentionShape, batch_tensors
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages
from mlserver_torch_stream.engine.checks.attention import fill_randomly, random_batch
from mlserver_torch_stream.engine.native.native_attention import NativeAttention
from tests.engine.reference_attention import reference_attention

CPU = torch.device("cpu")
# (tokens in the cache, new ones): lengths around pages, windows and blocks of 64 queries, 256 keys or 12 rows.
MIXED = [(0, 1), (0, 70), (15, 1), (16, 3), (300, 1), (255, 1), (256, 1), (130, 150), (513, 12), (40, 11)]


class Case:
    """A layer of random pages in shuffled order, with NaN in every slot without a token, and a batch that uses it."""

    def __init__(
        self,
        parts: Sequence[tuple[int, int]] = MIXED,
        dims: tuple[int, int, int, int] = (4, 2, 64, 64),
        dtype: torch.dtype = torch.float32,
        page_size: int = 16,
        **options: Any,
    ) -> None:
        generator, heads, key_dim = torch.Generator().manual_seed(7), dims[0], dims[2]

        def numbers(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(dtype)

        batch, pages = random_batch(parts, page_size)
        self.batch = batch_tensors(batch, page_size, 1, CPU)
        self.layer = LayerPages(0, pages, page_size)
        fill_randomly(self.layer, batch, AttentionShape(*dims, dtype, 1.0), numbers)
        self.query = numbers(batch.tokens, heads, key_dim)
        if options.pop("sinks", False):
            options["sinks"] = torch.randn(heads, generator=generator) + 2
        self.options = AttentionOptions(1.5 * key_dim**-0.5, **options)

    def run(self, attention: Callable[..., torch.Tensor]) -> torch.Tensor:
        return attention(self.query, self.layer, self.batch, self.options)

    def error(self, attention: NativeAttention) -> float:
        """Returns the largest error of any query and head, relative to the norm of its exact output."""
        assert self.layer.keys is not None and self.layer.values is not None
        wide = replace(self.layer, keys=self.layer.keys.float(), values=self.layer.values.float())
        exact = reference_attention(self.query.float(), wide, self.batch, self.options)
        ours = self.run(attention)
        assert ours.dtype == self.query.dtype and ours.shape == exact.shape
        return float(((ours.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def kernels_alone(folder: Path) -> NativeAttention:
    """Returns the attention kernels; a layer that they would leave to torch raises AssertionError."""

    def never(*_: object) -> torch.Tensor:
        raise AssertionError("the kernels were to attend")

    native = NativeAttention(folder)
    native._gathered = never  # type: ignore[assignment]
    return native
