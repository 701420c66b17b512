"""Runs a model's forward over pages with our own kernels, which can also draw tokens."""

from __future__ import annotations

import ctypes
import struct
import weakref
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch
from mlserver_torch_stream.engine.forward.interface import LoadedForward, Logits
from mlserver_torch_stream.engine.native import library as c
from mlserver_torch_stream.engine.native.groups import PANEL
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions, open_kernels
from mlserver_torch_stream.engine.native.library import KernelDrawCall
from mlserver_torch_stream.engine.native.panels_file import PanelsFile
from mlserver_torch_stream.engine.native.quantise import Rounding
from mlserver_torch_stream.engine.native.rotary import RotaryTable
from mlserver_torch_stream.engine.native.structure import Decoder, read_decoder
from mlserver_torch_stream.engine.native.weights import PackedWeights, Packer, in_large_pages
from mlserver_torch_stream.engine.sampling.row_sampler import RowSampler

_ROW = struct.Struct("=qQqdddd")  # ``DrawnRow`` of ``draw.h``


class NativeDraw:
    """A ``RowDraw`` that runs on the threads of the kernels' decoder.

    No forward or other draw of the decoder may run during the call.
    """

    def __init__(self, kernels: ctypes.CDLL, decoder: int) -> None:
        self._run = kernels.native_draw
        self._decoder = decoder

    def __call__(self, logits: torch.Tensor, indices: Sequence[int], rows: Sequence[RowSampler]) -> list[int]:
        packed = [
            _ROW.pack(index, row.noise_key, row.top_k, row.temperature, row.top_p, row.min_p, row.typical_p)
            for index, row in zip(indices, rows, strict=True)
        ]
        chosen = array("q", bytes(8 * len(packed)))
        call = KernelDrawCall(
            logits.data_ptr(),
            logits.stride(0),
            min(rows[0].vocab_size, logits.shape[1]),
            len(packed),
            b"".join(packed),
            chosen.buffer_info()[0],
        )
        self._run(self._decoder, ctypes.byref(call))
        return chosen.tolist()


_LONG, _POINTER, _TABLE = "q", "q", "i"  # C's int64_t, an address, int32_t
_BYTES = 8  # the size of an element of the first two types


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Consecutive tokens of a batch, as the addresses of the arrays that ``Step`` in ``kernels/model.h`` needs."""

    sequences: int
    tokens: int
    wanted: int
    ids: int
    starts: int
    counts: int
    wants: int
    tables: int
    kept: tuple[array[int], ...] = ()  # keeps the memory of some of these arrays alive


class PackedBatch:
    """The arrays of a batch.

    Everything is copied except block tables that are already int32 arrays; such tables must not grow.
    """

    def __init__(self, batch: Batch, groups: int) -> None:
        sequences = batch.sequences
        self._ids = array(_LONG)
        for each in sequences:
            self._ids.extend(each.token_ids)
        self._starts = array(_LONG, [each.start for each in sequences])
        self._counts = array(_LONG, [len(each.token_ids) for each in sequences])
        self._wants = array(_LONG, [each.wanted for each in sequences])
        self._held = [_as_array(each.tables[group]) for group in range(groups) for each in sequences]
        self._tables = array(_POINTER, map(_address, self._held))
        self.table_stride = len(sequences)
        self.wanted = sum(self._wants)
        self.longest = max(map(sum, zip(self._starts, self._counts, strict=True)))

    def parts(self, most: int) -> Iterator[BatchPart]:
        """Yields the tokens in order, in parts of almost equal size and of at most ``most`` tokens."""
        total = len(self._ids)
        count = -(-total // most)
        if count == 1:
            yield self._part(0, 0, self._starts, self._counts, self._wants)
            return
        sequence = done = 0  # tokens of the sequence in the parts so far
        for part in range(count):
            token, stop = part * total // count, (part + 1) * total // count
            first, at, starts, counts, wants = sequence, token, array(_LONG), array(_LONG), array(_LONG)
            while at < stop:
                left = self._counts[sequence] - done
                some = min(left, stop - at)
                starts.append(self._starts[sequence] + done)
                counts.append(some)
                wants.append(min(some, max(0, self._wants[sequence] - (left - some))))
                sequence, done = (sequence + 1, 0) if some == left else (sequence, done + some)
                at += some
            yield self._part(first, token, starts, counts, wants)

    def _part(self, sequence: int, token: int, starts: array[int], counts: array[int], wants: array[int]) -> BatchPart:
        return BatchPart(
            sequences=len(counts),
            tokens=sum(counts),
            wanted=sum(wants),
            ids=_address(self._ids) + token * _BYTES,
            starts=_address(starts),
            counts=_address(counts),
            wants=_address(wants),
            tables=_address(self._tables) + sequence * _BYTES,
            kept=(starts, counts, wants),
        )


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


def _as_array(table: Sequence[int]) -> array[int]:
    """Returns the table as an int32 array; makes no copy if it already is such an array."""
    return table if isinstance(table, array) and table.typecode == _TABLE else array(_TABLE, table)


# The maximum number of tokens in one call: their activations (1.5 MB at a width of 1536) should fit the CPU's caches.
_MAX_TOKENS = 512


class NativeForward(LoadedForward):
    """The ``Forward`` of decoders that the kernels support.

    Each call overwrites the float32 logits of the previous call. A sequence's logits are bitwise the same in every
    batch, for every page size and every division of its prompt into chunks.
    """

    has_threads = True

    def __init__(
        self,
        model: Any,
        options: KernelOptions,
        rounded: Rounding | None = None,
        *,
        compares: bool = True,
        file: PanelsFile | None = None,
    ) -> None:
        """Copies the weights of a model or of a ``Decoder``; with ``rounded`` it also rounds them.

        With a ``file`` the copy is in that file. An earlier load may have made it; then the weights are not read.

        With ``compares`` the kernels' packed weights are compared with the model's weights. At least one load of a
        model must do this.

        Raises UnsupportedLayout if the kernels do not support the model, and NoKernels or LoadFailed as
        ``open_kernels`` does.
        """
        decoder = model if isinstance(model, Decoder) else read_decoder(model)
        kernels, self.variant = open_kernels(options.cache_dir, c.open_library)
        self._rotary = RotaryTable(decoder.rotary)
        self._weights = PackedWeights(decoder, Packer(kernels, options.threads, compares), rounded, file)
        shape = self._weights.shape
        shape.rotated_half, shape.ropes = self._rotary.half, self._rotary.ropes
        is_bf16 = decoder.dtype == torch.bfloat16
        handle = ctypes.c_void_p()
        kernels.native_create(
            *(
                ctypes.byref(shape),
                ctypes.byref(self._weights.structure),
                is_bf16,
                options.threads,
                ctypes.byref(handle),
            )
        )
        self._handle = handle.value or 0
        self._run = kernels.native_step
        self._allocate = partial(in_large_pages, kernels=kernels)
        self._draw = NativeDraw(kernels, self._handle)
        # A result refers to the draw as well, and may call it later. Nothing is freed at exit, when a thread may still
        # compute a step.
        weakref.finalize(self._draw, kernels.native_destroy, self._handle).atexit = False
        # An example of a pool's tensors, for pools that no other forward has reserved.
        self._like = torch.empty((1, shape.kv_heads, 0, shape.head_dim), dtype=decoder.dtype)
        self._layers = int(shape.layers)
        self._vocab = int(shape.vocab)
        self._width = -(-self._vocab // PANEL) * PANEL  # the width of a row of logits
        self._pages = (c.KernelPages * self._layers)()
        self._cache: weakref.ref[PagedCache] | None = None  # the cache whose pools ``_pages`` describes
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
        """Returns the first ``rows`` rows of logits.

        The tensor is made only once for each number of rows, because all steps use the same memory.
        """
        if (result := self._results.get(rows)) is None:
            result = self._results[rows] = Logits(self._logits[:rows, : self._vocab], self._argmax, self._draw)
        return result

    def _make_room(self, rows: int) -> None:
        """Allocates ``rows`` rows of logits. Results of earlier steps keep their own memory."""
        logits, argmax = torch.empty(rows, self._width, dtype=torch.float32), array("q", bytes(8 * rows))
        self._logits, self._argmax = logits, argmax  # allocates both or, without memory, neither
        self._logits_address, self._argmax_address = self._logits.data_ptr(), self._argmax.buffer_info()[0]
        self._results: dict[int, Logits] = {}

    @property
    def attention_name(self) -> str:
        return "kernels"

    def describe(self) -> str:
        return f"our own kernels ({self.variant})"

    def reserve(self, cache: PagedCache) -> None:
        cache.reserve(self._like, self._allocate)

    def _point_at(self, cache: PagedCache) -> None:
        """Tells the kernels where the pools of a cache are. A cache never replaces its pools."""
        self._cache = None  # if a pool cannot be reserved, the next step describes all pools again
        self._step.page_size = cache.page_size
        self.reserve(cache)
        for index, entry in enumerate(self._pages):
            layer = cache.layers[index]
            assert layer.keys is not None and layer.values is not None
            entry.keys, entry.values = layer.keys.data_ptr(), layer.values.data_ptr()
            entry.stride = layer.keys.stride(0)
            entry.group, entry.window = layer.group, cache.groups[layer.group].window or 0
        self._cache = weakref.ref(cache)
