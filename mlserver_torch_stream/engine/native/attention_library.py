"""Declares the C interface of attention over pages: the structures of ``kernels/parallel_pages.h``, field by field.

Knows nothing of batches. The caller keeps the memory of a structure's pointers alive.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from mlserver_torch_stream.engine.native.compile_kernels import NoKernels
from mlserver_torch_stream.engine.native.library import open_library

STORED_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class KernelPagesCall(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("queries", "out", "keys", "values", "tables", "starts", "ends", "sinks")),
        *((name, c_int64) for name in ("token_stride", "head_stride", "sequences", "table_width")),
        *((name, c_int64) for name in ("heads", "kv_heads", "page_size", "key_dim", "value_dim")),
        *((name, c_int64) for name in ("window", "chunk", "type")),
        *((name, c_float) for name in ("scale", "cap")),
    ]


class KernelWriteCall(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values", "key_pages", "value_pages", "slots")),
        *((name, c_int64) for name in ("key_token_stride", "key_head_stride")),
        *((name, c_int64) for name in ("value_token_stride", "value_head_stride")),
        *((name, c_int64) for name in ("tokens", "kv_heads", "page_size", "key_bytes", "value_bytes")),
    ]


def open_attention_library(path: Path) -> ctypes.CDLL:
    """Returns the kernels' functions with their types. A call releases the GIL while it runs. Raises NoKernels."""
    library = open_library(path)
    try:
        attend, write = library.native_attend_pages, library.native_write_pages
    except AttributeError as error:
        raise NoKernels(f"the kernels are of another version: {error}") from None
    attend.argtypes = [POINTER(KernelPagesCall), c_void_p, c_int]
    write.argtypes = [POINTER(KernelWriteCall), c_void_p, c_int]
    attend.restype = write.restype = c_int
    return library
