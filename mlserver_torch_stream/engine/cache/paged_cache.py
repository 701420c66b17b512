"""Holds the keys and values of all sequences in pages, in one pool per layer or per group of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.pages import Batch, CacheSpec
from mlserver_torch_stream.engine.cache.states import StateSlots


@dataclass(slots=True)
class LayerPages:
    """Keys and values of one layer, ``[pages, kv_heads, page_size, head_dim]``; None before the first forward.

    On a CPU each head of a page is contiguous memory, which becomes resident when it is first written. On CUDA
    (``tokens_first``) the heads of a token are contiguous, as torch's varlen attention reads them. After
    ``PagedCache.reserve`` the pages are strided, because the pages of the group's other layers lie between them.
    """

    group: int
    pages: int
    page_size: int
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    tokens_first: bool | None = None  # None: as suits the device

    def reserve(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Allocates the pool, unless it exists, for keys and values like these, ``[..., kv_heads, tokens, head_dim]``.

        Raises MemoryError or torch.OutOfMemoryError without having changed the layer.
        """
        if self.keys is None:
            if self.tokens_first is None:
                self.tokens_first = key.device.type == "cuda"
            keys, values = self._pool(key), self._pool(value)
            self.keys, self.values = keys, values

    def _pool(self, like: torch.Tensor) -> torch.Tensor:
        shape = [self.pages, like.shape[-3], self.page_size, like.shape[-1]]
        if self.tokens_first:
            shape[1:3] = reversed(shape[1:3])
        try:
            with torch.inference_mode(False):  # a tensor made inside could not be written to outside
                pool = torch.empty(shape, dtype=like.dtype, device=like.device)
                return pool.transpose(1, 2) if self.tokens_first else pool
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(self._no_memory(shape, like)) from error
        except RuntimeError as error:  # the CPU's allocator has no error of its own
            raise MemoryError(self._no_memory(shape, like)) from error

    def _no_memory(self, shape: Sequence[int], like: torch.Tensor) -> str:
        size = format_bytes(math.prod(shape) * like.element_size())
        return f"{size} for {self.pages} pages of a layer's KV cache cannot be allocated on {like.device}"

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores ``[tokens, kv_heads, head_dim]`` at ``slots``; a token's slot is ``page * page_size + offset``."""
        self.reserve(key.transpose(0, 1), value.transpose(0, 1))
        assert self.keys is not None and self.values is not None
        pages, offsets = slots // self.page_size, slots % self.page_size
        self.keys[pages, :, offsets] = key
        self.values[pages, :, offsets] = value

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of the keys and values at ``slots`` ``[rows, n]``, each ``[rows, kv_heads, n, head_dim]``."""
        assert self.keys is not None and self.values is not None
        if self.tokens_first:
            tokens = (pool.transpose(1, 2).flatten(0, 1) for pool in (self.keys, self.values))
            keys, values = (pool[slots].transpose(1, 2) for pool in tokens)
            return keys, values
        heads = torch.arange(self.keys.shape[1], device=slots.device)[:, None]
        pages, offsets = slots[:, None] // self.page_size, slots[:, None] % self.page_size
        rows = (pages * len(heads) + heads) * self.page_size + offsets
        keys, values = (
            pool.flatten(0, 2).index_select(0, rows.flatten()).unflatten(0, rows.shape)
            for pool in (self.keys, self.values)
        )
        return keys, values

    def read(self, table: Sequence[int], first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of the keys and values of positions ``first`` to ``stop - 1``, each ``[kv_heads, n, dim]``."""
        assert self.keys is not None and self.values is not None
        begin = first // self.page_size
        pages = torch.tensor(list(table[begin : -(-stop // self.page_size)]), device=self.keys.device)
        part = slice(first - begin * self.page_size, stop - begin * self.page_size)
        keys, values = (pool[pages].transpose(0, 1).flatten(1, 2)[:, part] for pool in (self.keys, self.values))
        return keys, values

    def copy_page(self, source: int, target: int) -> None:
        """Copies the keys and values of the page ``source`` to the page ``target``."""
        if self.keys is not None and self.values is not None:
            self.keys[target] = self.keys[source]
            self.values[target] = self.values[source]

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token; 0 before the first forward."""
        pools = (self.keys, self.values)
        return sum(0 if p is None else p.shape[1] * p.shape[3] * p.element_size() for p in pools)


class PagedCache:
    """The pages of each attention layer, by the layer's index, and the state slots of the layers that keep states."""

    def __init__(self, layout: CacheLayout, page_size: int, pages: Sequence[int], state_slots: int) -> None:
        """``pages`` has the number of pages of each group in ``layout.spec(page_size).groups``."""
        self.layout = layout
        self.page_size = page_size
        self.groups = layout.spec(page_size).groups
        self.layers = {
            index: LayerPages(number, count, page_size)
            for number, (group, count) in enumerate(zip(self.groups, pages, strict=True))
            for index in group.layers
        }
        self.states = StateSlots(layout, state_slots) if layout.has_states else None

    def reserve(self, like: torch.Tensor, allocate: Callable[[int], torch.Tensor]) -> None:
        """Allocates one pool per group for its layers without memory.

        Each page is contiguous memory for all these layers. So the pages in use fill whole large pages (2 MiB) of the
        system. A large page needs one address translation; the same memory in pages of 4 KiB needs 512 translations.
        ``like`` has the shape ``[..., kv_heads, tokens, head_dim]``; ``allocate`` returns at least the given number of
        bytes. Raises MemoryError if there is too little memory.
        """
        for number in range(len(self.groups)):
            layers = [layer for layer in self.layers.values() if layer.group == number and layer.keys is None]
            if not layers:
                continue
            pages = layers[0].pages
            shape = (pages, 2 * len(layers), like.shape[-3], self.page_size, like.shape[-1])
            size = math.prod(shape) * like.element_size()
            with torch.inference_mode(False):  # a tensor made inside could not be written to outside
                try:
                    buffer = allocate(size)
                except RuntimeError as error:  # the CPU's allocator has no error of its own
                    what = f"{format_bytes(size)} for {pages} pages of the KV cache"
                    raise MemoryError(f"{what} cannot be allocated on {like.device}") from error
                pool = buffer[:size].view(like.dtype).view(shape)
                for index, layer in enumerate(layers):
                    layer.keys, layer.values = pool[:, 2 * index], pool[:, 2 * index + 1]

    def prepare(self, batch: Batch) -> None:
        """Makes the page and state copies that a batch asks for. A forward calls this method before it computes."""
        for group, source, target in batch.copies:
            for layer in self.layers.values():
                if layer.group == group:
                    layer.copy_page(source, target)
        if self.states is not None:
            for source, target in batch.state_copies:
                self.states.copy(source, target)

    @property
    def specs(self) -> dict[torch.device, CacheSpec]:
        """Returns a spec for each device. The specs count only layers to which a forward has already written."""
        held = {index: pages.keys.device for index, pages in self.layers.items() if pages.keys is not None}
        states = {} if self.states is None else self.states.bytes_by_device()
        return {
            device: CacheSpec(
                self.page_size,
                tuple(
                    replace(
                        group,
                        token_bytes=sum(self.layers[i].token_bytes for i in group.layers if held.get(i) == device),
                    )
                    for group in self.groups
                ),
                states.get(device, 0),
            )
            for device in dict.fromkeys([*held.values(), *states])
        }
