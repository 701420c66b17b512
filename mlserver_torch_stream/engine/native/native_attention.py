"""Computes paged attention on CPUs with our own kernels, for any model, on the threads that torch's operators use."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from mlserver_torch_stream.engine.attention.gathered import GatheredAttention
from mlserver_torch_stream.engine.attention.paged_attention import AttentionOptions, BatchTensors, PagedAttention
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages
from mlserver_torch_stream.engine.native.kernel_library import open_kernels
from mlserver_torch_stream.engine.native.library import KernelPagesCall, KernelWriteCall, open_library, torch_pool

_STORED_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # StoredType of ``parallel_pages.h``


class NativeAttention(PagedAttention):
    """Paged attention by our own kernels. Each call uses as many threads as torch has.

    With other devices and dtypes, torch's operators compute the attention.
    """

    name = "kernels"

    def __init__(self, cache_dir: Path) -> None:
        """Opens the kernels. Raises NoKernels or LoadFailed as ``open_kernels`` does."""
        library, self.variant = open_kernels(cache_dir, open_library)
        self._attend = library.native_attend_pages
        self._write = library.native_write_pages
        self._gathered = GatheredAttention()
        self._pool = torch_pool()

    def describe(self) -> str:
        threads = "torch's OpenMP threads" if self._pool is not None else "one thread, as torch has no libgomp here"
        return f"attention kernels ({self.variant}, {threads})"

    def refusal(self, query: torch.Tensor, layer: LayerPages, options: AttentionOptions) -> str | None:
        assert layer.keys is not None and layer.values is not None
        known = _known(query, layer.keys, layer.values)
        return None if known else f"the kernels do not support {query.dtype} on {query.device}"

    def __call__(
        self, query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
    ) -> torch.Tensor:
        keys, values = layer.keys, layer.values
        assert keys is not None and values is not None
        if not _known(query, keys, values):
            return self._gathered(query, layer, batch, options)
        if query.stride(2) != 1:
            query = query.contiguous()
        table = batch.tables[layer.group]
        sinks = None if options.sinks is None else options.sinks.detach().float().contiguous()
        out = query.new_empty((*query.shape[:2], values.shape[3]))
        call = KernelPagesCall(
            *(tensor.data_ptr() for tensor in (query, out, keys, values, table, batch.starts, batch.cumulative)),
            None if sinks is None else sinks.data_ptr(),
            *query.stride()[:2],
            *table.shape,
            query.shape[1],
            *keys.shape[1:],
            values.shape[3],
            options.window or 0,
            options.chunk or 0,
            _STORED_TYPES[query.dtype],
            options.scale,
            options.softcap or 0.0,
        )
        self._attend(ctypes.byref(call), self._pool, torch.get_num_threads())
        return out

    def write(self, layer: LayerPages, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        layer.reserve(key.transpose(0, 1), value.transpose(0, 1))
        assert layer.keys is not None and layer.values is not None
        if not _known(key, layer.keys, layer.values) or value.dtype != key.dtype:
            return layer.write(key, value, slots)
        key, value = (part if part.stride(2) == 1 else part.contiguous() for part in (key, value))
        slots, size = slots.contiguous(), key.element_size()
        call = KernelWriteCall(
            *(tensor.data_ptr() for tensor in (key, value, layer.keys, layer.values, slots)),
            *(stride * size for part in (key, value) for stride in part.stride()[:2]),
            *key.shape[:2],
            layer.page_size,
            key.shape[2] * size,
            value.shape[2] * size,
        )
        self._write(ctypes.byref(call), self._pool, torch.get_num_threads())


def _known(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Returns whether the kernels support this device, these dtypes and the memory layout of these pages."""
    return (
        query.device.type == keys.device.type == values.device.type == "cpu"
        and query.dtype == keys.dtype == values.dtype
        and query.dtype in _STORED_TYPES
        and keys.is_contiguous()
        and values.is_contiguous()
    )
