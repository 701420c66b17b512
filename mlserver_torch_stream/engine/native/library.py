"""Declares the kernels' C interface, and chooses the threads that they run on.

The caller must keep alive the memory that a structure points to. The kernels use libgomp's threads, as torch does.
After each operator, libgomp's threads spin for a while; the threads of a second pool would compete with them for the
cores.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int64, c_uint64, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from mlserver_torch_stream.engine.native.compile_kernels import NoKernels

NO_QK_NORM, PER_HEAD, WHOLE = range(3)
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")  # in the order of Activation in ``kernels/model.h``
_NO_MEMORY = 1  # a status of ``status_of`` in ``library.cpp``


class KernelRun(Structure):
    """Outputs [n] of a matrix whose panels follow each other in memory, and the number of their format."""

    _fields_ = [("panels", c_void_p), ("n", c_int64), ("format", c_int64)]


class KernelMatrix(Structure):
    """A weight [n, k] that is packed in panels, its bias or null, and its runs of panels in one format."""

    RUNS = 3
    _fields_ = [("n", c_int64), ("k", c_int64), ("bias", c_void_p), ("runs", KernelRun * RUNS)]

    @classmethod
    def of(cls, inputs: int, *runs: KernelRun, bias: int | None = None) -> KernelMatrix:
        """Returns a matrix; all runs but the last must have whole panels."""
        return cls(sum(run.n for run in runs), inputs, bias, (KernelRun * cls.RUNS)(*runs))


class KernelPackCall(Structure):
    """Rows of GGUF's blocks or of dense weights, and the panels that are made from them.

    ``rows`` has, for each output of the panels, the address of its row or null, and the number of its kind of blocks.
    ``groups`` is the number of groups of 32 inputs in a row, or of 32-bit words in a dense row; ``format`` is the
    format of the panels.
    """

    _fields_ = [
        ("rows", c_void_p),
        *((name, c_int64) for name in ("outputs", "groups", "format")),
        ("panels", c_void_p),
    ]


class KernelShape(Structure):
    """The sizes and constants of a decoder: widths, counts, the kinds of norm and activation, scales and softcaps."""

    _fields_ = [
        *((name, c_int64) for name in ("hidden", "vocab", "layers")),
        *((name, c_int64) for name in ("experts", "experts_used", "experts_normalised")),
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "rotated_half", "ropes")),
        *((name, c_int64) for name in ("qk_norm", "activation")),
        *((name, c_float) for name in ("eps", "attention_scale", "attention_cap")),
        *((name, c_float) for name in ("embedding_scale", "residual_scale", "logit_scale", "logit_cap")),
        *((name, c_float) for name in ("swiglu_alpha", "swiglu_limit")),
    ]


class KernelNorms(Structure):
    """The float32 weights of a layer's norms, padded to whole panels; null for each norm that the layer lacks."""

    NAMES = ("before_attention", "after_attention", "before_mlp", "after_mlp", "query", "key")
    _fields_ = [(name, c_void_p) for name in NAMES]


class KernelLayer(Structure):
    """The weights of one decoder layer.

    ``gate_up`` and ``down`` are of all experts, one after the other. ``router`` has no outputs if there is one expert.
    ``rope`` is the number of the layer's rotary table, counted from 1; 0 means no rotary positions. ``sinks`` has an
    additional score in the softmax for each head, or is null.
    """

    _fields_ = [
        *((name, KernelMatrix) for name in ("qkv", "out", "gate_up", "down", "router")),
        ("norms", KernelNorms),
        ("rope", c_int64),
        ("sinks", c_void_p),
    ]


class KernelWeights(Structure):
    """All weights of a decoder. ``embedding`` [table.n, hidden] is null if the embedding is in ``table`` instead."""

    _fields_ = [
        ("layers", POINTER(KernelLayer)),
        ("embedding", c_void_p),
        ("head", KernelMatrix),
        ("table", KernelMatrix),
        ("last_norm", c_void_p),
    ]


class KernelPages(Structure):
    """The pages of one layer, [pages, kv heads, page size, head dim] for keys and for values, in the model's type.

    ``stride`` is the number of elements from one page to the next. ``group`` says which block tables the layer uses.
    ``window`` is 0 if the layer has no window.
    """

    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        *((name, c_int64) for name in ("stride", "group", "window")),
    ]


class KernelStep(Structure):
    """The new tokens of several sequences, their block tables, and the place for the logits [wanted, vocab].

    The call sets ``argmax`` [wanted] to the id of each row's largest logit; the id is negative if the row is not
    finite.
    """

    _fields_ = [
        *((name, c_int64) for name in ("sequences", "tokens", "wanted")),
        *((name, c_void_p) for name in ("ids", "starts", "counts", "wants", "tables")),
        ("table_stride", c_int64),
        ("pages", POINTER(KernelPages)),
        ("page_size", c_int64),
        *((name, c_void_p) for name in ("cos", "sin", "logits", "argmax")),
    ]


class KernelDrawCall(Structure):
    """Rows of float32 logits [count, vocab], their sampling parameters, and the place for the drawn ids [count]."""

    _fields_ = [
        ("logits", c_void_p),
        *((name, c_int64) for name in ("stride", "vocab", "count")),
        ("rows", c_char_p),
        ("chosen", c_void_p),
    ]


class KernelPagesCall(Structure):
    """One attention call: the queries [tokens, heads, key dim], the output, the pages of a layer, and the block tables.

    ``starts`` has the number of each sequence's tokens in the pages before the step. ``ends`` has, for each sequence,
    the index of its first query, and at the end the number of queries. Strides are in elements.
    """

    _fields_ = [
        *((name, c_void_p) for name in ("queries", "out", "keys", "values", "tables", "starts", "ends", "sinks")),
        *((name, c_int64) for name in ("token_stride", "head_stride", "sequences", "table_width")),
        *((name, c_int64) for name in ("heads", "kv_heads", "page_size", "key_dim", "value_dim")),
        *((name, c_int64) for name in ("window", "chunk", "type")),
        *((name, c_float) for name in ("scale", "cap")),
    ]


class KernelWriteCall(Structure):
    """One call that writes the keys and values of new tokens into their slots of the pages. Strides are in bytes."""

    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values", "key_pages", "value_pages", "slots")),
        *((name, c_int64) for name in ("key_token_stride", "key_head_stride")),
        *((name, c_int64) for name in ("value_token_stride", "value_head_stride")),
        *((name, c_int64) for name in ("tokens", "kv_heads", "page_size", "key_bytes", "value_bytes")),
    ]


# The arguments and the result of each function.
_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "native_create": ([POINTER(KernelShape), POINTER(KernelWeights), c_int, c_int, POINTER(c_void_p)], c_int),
    "native_step": ([c_void_p, POINTER(KernelStep)], c_int),
    "native_draw": ([c_void_p, POINTER(KernelDrawCall)], c_int),
    "native_multiply": ([POINTER(KernelMatrix), c_void_p, c_int64, c_void_p, c_int, c_void_p, c_int], c_int),
    "native_pack": ([POINTER(KernelPackCall), c_int], c_int),
    "native_digest": ([c_void_p, c_int64, c_int, POINTER(c_uint64)], c_int),
    "native_destroy": ([c_void_p], None),
    "native_use_large_pages": ([c_void_p, c_int64], None),
    "native_attend_pages": ([POINTER(KernelPagesCall), c_void_p, c_int], c_int),
    "native_write_pages": ([POINTER(KernelWriteCall), c_void_p, c_int], c_int),
    "native_failure": ([], c_char_p),
}
_WORK = {
    "native_create": "the decoder",
    "native_step": "a step",
    "native_draw": "a draw",
    "native_multiply": "a product",
    "native_pack": "packing weights",
    "native_digest": "a digest",
    "native_attend_pages": "an attention over pages",
    "native_write_pages": "writing to pages",
}


def open_library(path: Path) -> ctypes.CDLL:
    """Opens the kernels' library and declares the types of its functions. Raises NoKernels if it cannot be loaded.

    A call releases the GIL while it runs. A failed call raises MemoryError, or RuntimeError with the message of the C++
    exception.
    """
    try:
        library = ctypes.CDLL(str(path))
        for name, (arguments, result) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
            if name in _WORK:
                function.errcheck = partial(_check_status, _WORK[name], library)
    except (OSError, AttributeError) as error:  # AttributeError: a library of another version lacks a function
        raise NoKernels(f"the kernels cannot be loaded: {error}") from None
    return library


def _check_status(work: str, library: ctypes.CDLL, status: int, function: object, arguments: object) -> int:
    if status == _NO_MEMORY:
        raise MemoryError(f"no memory for {work}")
    if status:
        raise RuntimeError(f"{work} failed in the kernels: {library.native_failure().decode(errors='replace')}")
    return status


@cache
def torch_pool() -> int | None:
    """Returns the address of torch's ``GOMP_parallel``; None if torch has no OpenMP with that function.

    The function is looked up in the global symbol scope, as torch's libraries do. The function that is found belongs to
    the OpenMP library that the process loaded first, which may be LLVM's or Intel's. A test then shows whether torch
    uses the number of threads that is set in that library.
    """
    try:
        process = ctypes.CDLL(None)
        address = ctypes.cast(process.GOMP_parallel, ctypes.c_void_p).value
        set_threads = process.omp_set_num_threads
    except (OSError, AttributeError, TypeError):  # no such function; Windows has no global scope
        return None
    return address if _torch_follows(set_threads) else None


def _torch_follows(set_threads: ctypes._NamedFuncPointer) -> bool:
    """Returns whether setting the library's number of threads also sets torch's.

    The setting belongs to a thread. The test runs in a new thread, so it does not change the setting of other threads.
    """
    seen: list[bool] = []

    def attempt() -> None:
        other = torch.get_num_threads() + 1
        set_threads(other)
        seen.append(torch.get_num_threads() == other)

    thread = threading.Thread(target=attempt, name="openmp-pool")
    thread.start()
    thread.join()
    return seen == [True]
