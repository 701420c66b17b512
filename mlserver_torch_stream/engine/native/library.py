"""Declares the kernels' C interface: the structures of ``kernels/model.h``, field by field, and the functions.

Knows nothing of transformers. The caller keeps the memory of a structure's pointers alive.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p
from pathlib import Path

from mlserver_torch_stream.engine.native.compile_kernels import NoKernels

NO_QK_NORM, PER_HEAD, WHOLE = range(3)
SILU, GELU_TANH = range(2)


class KernelMatrix(Structure):
    _fields_ = [("panels", c_void_p), ("n", c_int64), ("k", c_int64), ("bias", c_void_p), ("format", c_int64)]


class KernelShape(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("hidden", "inner", "vocab", "layers")),
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "rotated_half")),
        *((name, c_int64) for name in ("qk_norm", "activation")),
        *((name, c_float) for name in ("eps", "attention_scale", "attention_cap")),
        *((name, c_float) for name in ("embedding_scale", "residual_scale", "logit_scale", "logit_cap")),
    ]


class KernelNorms(Structure):
    NAMES = ("before_attention", "after_attention", "before_mlp", "after_mlp", "query", "key")
    _fields_ = [(name, c_void_p) for name in NAMES]


class KernelLayer(Structure):
    _fields_ = [
        *((name, KernelMatrix) for name in ("qkv", "out", "gate_up", "down")),
        ("norms", KernelNorms),
        ("rotates", c_int64),
    ]


class KernelWeights(Structure):
    _fields_ = [
        ("layers", POINTER(KernelLayer)),
        ("embedding", c_void_p),
        ("head", KernelMatrix),
        ("table", KernelMatrix),
        ("last_norm", c_void_p),
    ]


class KernelPages(Structure):
    _fields_ = [("keys", c_void_p), ("values", c_void_p), ("group", c_int64), ("window", c_int64)]


class KernelStep(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("sequences", "tokens", "wanted")),
        *((name, c_void_p) for name in ("ids", "starts", "counts", "wants", "tables")),
        ("table_stride", c_int64),
        ("pages", POINTER(KernelPages)),
        ("page_size", c_int64),
        *((name, c_void_p) for name in ("cos", "sin", "logits")),
    ]


def open_library(path: Path) -> ctypes.CDLL:
    """Returns the kernels' functions with their types. A call releases the GIL while it runs. Raises NoKernels."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoKernels(f"the kernels cannot be loaded: {error}") from None
    library.native_create.argtypes = [POINTER(KernelShape), POINTER(KernelWeights), c_int, c_int]
    library.native_create.restype = c_void_p
    library.native_step.argtypes = [c_void_p, POINTER(KernelStep)]
    library.native_step.restype = c_int
    library.native_multiply.argtypes = [POINTER(KernelMatrix), c_void_p, c_int64, c_void_p, c_int]
    library.native_multiply.restype = c_int
    library.native_destroy.argtypes = [c_void_p]
    library.native_destroy.restype = None
    library.native_use_large_pages.argtypes = [c_void_p, c_int64]
    library.native_use_large_pages.restype = None
    return library
