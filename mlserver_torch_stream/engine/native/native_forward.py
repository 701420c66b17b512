"""Runs a model's forward in one call of our own kernels.

Knows nothing of requests or of sampling, nor whether its logits are right: the check at load compares them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlserver_torch_stream.engine.kv_cache.row_cache import RowCache
from mlserver_torch_stream.engine.native import library as c
from mlserver_torch_stream.engine.native.kernel_library import open_kernels
from mlserver_torch_stream.engine.native.rotary import RotaryTable
from mlserver_torch_stream.engine.native.structure import read_decoder
from mlserver_torch_stream.engine.native.weights import PANEL, PackedWeights

# Tokens of one call: their activations (1.5 MB at a width of 1536) should stay in the caches.
_MAX_TOKENS = 512
_NO_MEMORY = 1  # of native_step


class NativeForward:
    """The ``JointForward`` of the decoders that the kernels know. The next call overwrites its float32 logits."""

    def __init__(self, model: Any, threads: int, cache_dir: Path, int8: bool = False) -> None:
        """Copies the weights, with ``int8`` rounded. Raises NoKernels, UnsupportedLayout or LoadFailed."""
        decoder = read_decoder(model)
        kernels, self.variant = open_kernels(cache_dir, c.open_library)
        self._rotary = RotaryTable(decoder.rotary)
        self._weights = PackedWeights(decoder, kernels, int8)
        shape = self._weights.shape
        shape.rotated_half = self._rotary.half
        is_bf16 = decoder.dtype == torch.bfloat16
        self._handle = kernels.native_create(
            ctypes.byref(shape), ctypes.byref(self._weights.structure), is_bf16, threads
        )
        if not self._handle:
            raise MemoryError("no memory for the decoder")
        self._run = kernels.native_step
        weakref.finalize(self, kernels.native_destroy, self._handle)
        # The model of a slab's tensors: the kernels write to slabs that transformers has not initialized.
        self._like = torch.empty((1, shape.kv_heads, 0, shape.head_dim), dtype=decoder.dtype)
        self._vocab = int(shape.vocab)
        self._slabs = (c.KernelSlab * shape.layers)()
        self._logits = torch.empty(0)

    def __call__(self, tokens: Sequence[Sequence[int]], cache: RowCache) -> Tensor:
        rows, queries = len(tokens), len(tokens[0])
        at_once = max(1, _MAX_TOKENS // rows)
        for first in range(0, queries, at_once):
            chunk = [row[first : first + at_once] for row in tokens] if at_once < queries else tokens
            self._step([(chunk, cache)], wanted=first + at_once >= queries)
        return self._logits[:rows, : self._vocab]

    def together(self, parts: Sequence[tuple[Sequence[Sequence[int]], RowCache]]) -> list[Tensor]:
        self._step(parts, wanted=True)
        ends = list(accumulate(len(tokens) for tokens, _ in parts))
        return [self._logits[begin:end, : self._vocab] for begin, end in pairwise([0, *ends])]

    def _step(self, parts: Sequence[tuple[Sequence[Sequence[int]], RowCache]], wanted: bool) -> None:
        """All rows of all caches have equally many tokens."""
        tokens = [row for some, _ in parts for row in some]
        try:
            self._run_step(tokens, [cache for _, cache in parts], wanted)
        except BaseException:
            for _, cache in parts:
                cache.rollback()
            raise
        for _, cache in parts:
            cache.commit(len(tokens[0]))

    def _run_step(self, tokens: Sequence[Sequence[int]], caches: Sequence[RowCache], wanted: bool) -> None:
        rows, queries = len(tokens), len(tokens[0])
        known = [length for cache in caches for length in cache.lengths]
        self._rotary.reach(max(known) + queries)
        if rows > self._logits.shape[0]:
            self._logits = torch.empty(rows, -(-self._vocab // PANEL) * PANEL)
        ids = (ctypes.c_int64 * (rows * queries))(*(token for row in tokens for token in row))
        lengths = (ctypes.c_int64 * rows)(*known)
        spots = [spot for n, cache in enumerate(caches) for row in range(len(cache.lengths)) for spot in (n, row)]
        places = (ctypes.c_int64 * (2 * rows))(*spots)
        self._point_at(caches, queries)
        step = c.KernelStep(
            rows,
            queries,
            ctypes.addressof(ids),
            ctypes.addressof(lengths),
            ctypes.addressof(places),
            self._slabs,
            self._rotary.cos.data_ptr(),
            self._rotary.sin.data_ptr(),
            self._logits.data_ptr() if wanted else None,
        )
        status = self._run(self._handle, ctypes.byref(step))
        if status == _NO_MEMORY:
            raise MemoryError("no memory for the activations of a step")
        if status:
            raise RuntimeError("a step of the kernels failed")

    def _point_at(self, caches: Sequence[RowCache], queries: int) -> None:
        slabs = [slab for cache in caches for slab in cache.slabs]
        if len(slabs) > len(self._slabs):
            self._slabs = (c.KernelSlab * len(slabs))()
        for entry, slab in zip(self._slabs, slabs, strict=False):
            if not slab.is_initialized:
                slab.lazy_initialization(self._like, self._like)
            entry.start = slab.extend(queries)
            entry.keys, entry.values = slab.keys.data_ptr(), slab.values.data_ptr()
            entry.capacity = slab.keys.shape[2]
            entry.window = slab.window or 0
