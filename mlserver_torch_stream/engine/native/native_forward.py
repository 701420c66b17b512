"""Runs a model's forward in calls of our own kernels, over pages.

Knows nothing of requests, nor how tokens are drawn from its logits, nor whether these are right: the check at load
compares them.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mlserver_torch_stream.engine.batch import Batch
from mlserver_torch_stream.engine.forward.interface import Logits
from mlserver_torch_stream.engine.kv_cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.native import library as c
from mlserver_torch_stream.engine.native.groups import PANEL
from mlserver_torch_stream.engine.native.kernel_library import open_kernels
from mlserver_torch_stream.engine.native.native_draw import NativeDraw
from mlserver_torch_stream.engine.native.packed_batch import PackedBatch
from mlserver_torch_stream.engine.native.quantise import Rounding
from mlserver_torch_stream.engine.native.rotary import RotaryTable
from mlserver_torch_stream.engine.native.structure import Decoder, read_decoder
from mlserver_torch_stream.engine.native.weights import PackedWeights, in_large_pages

# Tokens of one call: their activations (1.5 MB at a width of 1536) should stay in the caches.
_MAX_TOKENS = 512


class NativeForward:
    """The ``Forward`` of the decoders that the kernels know. The next call overwrites its float32 logits.

    A sequence's logits are the same bits alone and in any batch, with pages of any size and however its prompt is cut.
    """

    def __init__(self, model: Any, threads: int, cache_dir: Path, rounded: Rounding | None = None) -> None:
        """Copies the weights of a model or of its ``Decoder``, rounded if a rounding is given.

        Raises NoKernels, UnsupportedLayout or LoadFailed.
        """
        decoder = model if isinstance(model, Decoder) else read_decoder(model)
        kernels, self.variant = open_kernels(cache_dir, c.open_library)
        self._rotary = RotaryTable(decoder.rotary)
        self._weights = PackedWeights(decoder, kernels, rounded)
        shape = self._weights.shape
        shape.rotated_half = self._rotary.half
        is_bf16 = decoder.dtype == torch.bfloat16
        handle = ctypes.c_void_p()
        kernels.native_create(
            *(ctypes.byref(shape), ctypes.byref(self._weights.structure), is_bf16, threads, ctypes.byref(handle))
        )
        self._handle = handle.value or 0
        self._run = kernels.native_step
        self._allocate = partial(in_large_pages, kernels=kernels)
        self._draw = NativeDraw(kernels, self._handle)
        weakref.finalize(self._draw, kernels.native_destroy, self._handle)  # results hold it too, and may draw later
        # The model of a pool's tensors: the kernels write to pools that no other forward has reserved.
        self._like = torch.empty((1, shape.kv_heads, 0, shape.head_dim), dtype=decoder.dtype)
        self._layers = int(shape.layers)
        self._vocab = int(shape.vocab)
        self._width = -(-self._vocab // PANEL) * PANEL  # of a row of logits
        self._pages = (c.KernelPages * self._layers)()
        self._cache: weakref.ref[PagedCache] | None = None  # whose pools ``_pages`` names
        self._step = c.KernelStep(pages=self._pages)
        self._make_room(0)

    def __call__(self, batch: Batch, cache: PagedCache) -> Logits:
        cache.prepare(batch)
        if self._cache is None or self._cache() is not cache:
            self._point_at(cache)
        packed = PackedBatch(batch, len(cache.groups))
        self._rotary.reach(packed.longest)
        if packed.wanted > len(self._argmax):
            self._make_room(packed.wanted)
        step, rows = self._step, 0
        step.cos, step.sin = self._rotary.cos.data_ptr(), self._rotary.sin.data_ptr()
        step.table_stride = packed.table_stride
        for part in packed.parts(_MAX_TOKENS):
            step.sequences, step.tokens, step.wanted = part.sequences, part.tokens, part.wanted
            step.ids, step.tables = part.ids, part.tables
            step.starts, step.counts, step.wants = part.starts, part.counts, part.wants
            step.logits = self._logits_address + rows * self._width * self._logits.itemsize
            step.argmax = self._argmax_address + rows * self._argmax.itemsize
            self._run(self._handle, ctypes.byref(step))
            rows += part.wanted
        return self._result(rows)

    def _result(self, rows: int) -> Logits:
        """Returns the first rows of logits. They are the same memory in each step, so a tensor is made only once."""
        if (result := self._results.get(rows)) is None:
            result = self._results[rows] = Logits(self._logits[:rows, : self._vocab], self._argmax, self._draw)
        return result

    def _make_room(self, rows: int) -> None:
        """Allocates so many rows of logits. The results of earlier steps keep their memory."""
        logits, argmax = torch.empty(rows, self._width), array("q", bytes(8 * rows))
        self._logits, self._argmax = logits, argmax  # both or none, if there is no memory
        self._logits_address, self._argmax_address = self._logits.data_ptr(), self._argmax.buffer_info()[0]
        self._results: dict[int, Logits] = {}

    def reserve(self, cache: PagedCache) -> None:
        """Allocates the pools of a cache that have no memory yet. Raises MemoryError."""
        cache.reserve(self._like, self._allocate)

    def _point_at(self, cache: PagedCache) -> None:
        """Names the pools of a cache, which it has for as long as it lives."""
        self._cache = None  # if a pool cannot be reserved, the next step names all of them anew
        self._step.page_size = cache.page_size
        self.reserve(cache)
        for index, entry in enumerate(self._pages):
            layer = cache.layers[index]
            assert layer.keys is not None and layer.values is not None
            entry.keys, entry.values = layer.keys.data_ptr(), layer.values.data_ptr()
            entry.stride = layer.keys.stride(0)
            entry.group, entry.window = layer.group, cache.groups[layer.group].window or 0
        self._cache = weakref.ref(cache)
