"""Describes a KV cache of pages: their size, its groups of layers, and the bytes that tokens, pages and states take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

CPU_PAGE_SIZE = 16
CUDA_PAGE_SIZE = 256  # torch's varlen kernels read block tables of pages that are multiples of it


def page_size_of(kinds: Iterable[str]) -> int:
    """Returns the tokens of a page of a cache on devices of these types, as ``torch.device.type`` names them."""
    return CUDA_PAGE_SIZE if "cuda" in kinds else CPU_PAGE_SIZE


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that see the same tokens, and so share block tables.

    A query sees its own key and the ``window - 1`` before it, or those from the beginning of its own ``chunk`` on
    (Llama 4), or all. ``token_bytes`` are those of the keys and values of a token in all layers of the group.
    """

    layers: tuple[int, ...]  # of transformers' cache
    window: int | None = None
    chunk: int | None = None
    token_bytes: int = 0

    def oldest_seen(self, position: int) -> int:
        """Returns the position of the oldest key that the query at ``position`` sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return 0 if self.chunk is None else position // self.chunk * self.chunk

    @property
    def span(self) -> int | None:
        """The most keys that a query sees; None: all."""
        return self.window if self.chunk is None else self.chunk


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """``state_bytes``: the size of one sequence's states; 0: the model keeps none."""

    page_size: int  # tokens
    groups: tuple[LayerGroup, ...]
    state_bytes: int = 0

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def page_bytes(self, group: int) -> int:
        return self.page_size * self.groups[group].token_bytes

    def most_pages(self, tokens: int, step: int) -> tuple[int, ...]:
        """Returns the most pages of each group that a sequence of ``tokens`` holds, ``step`` new ones at a time."""
        pages = self.pages(tokens)
        spans = (group.span for group in self.groups)
        return tuple(pages if span is None else min(pages, self.pages(span + step - 1) + 1) for span in spans)

    def bytes_of(self, pages: Sequence[int], states: int) -> int:
        """Returns the bytes of so many pages of each group, and of the states of so many sequences."""
        return sum(n * self.page_bytes(group) for group, n in enumerate(pages)) + states * self.state_bytes

    def sequence_bytes(self, tokens: int, step: int = 1) -> int:
        """Returns the most bytes of a sequence of ``tokens``: its pages and its states."""
        return self.bytes_of(self.most_pages(tokens, step), 1)

    def live_bytes(self, tokens: int) -> int:
        """Returns the bytes that the next token of a sequence of ``tokens`` sees, states included."""
        seen = (min(tokens, group.span or tokens) * group.token_bytes for group in self.groups)
        return sum(seen) + self.state_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token in all layers."""
        return sum(group.token_bytes for group in self.groups)

    def __add__(self, other: CacheSpec) -> CacheSpec:
        """Returns the spec of two devices together; their layers are of the same groups."""
        groups = (
            replace(group, token_bytes=group.token_bytes + same_group.token_bytes)
            for group, same_group in zip(self.groups, other.groups, strict=True)
        )
        return CacheSpec(self.page_size, tuple(groups), self.state_bytes + other.state_bytes)


def in_all(specs: Iterable[CacheSpec]) -> CacheSpec:
    """Returns the spec of all devices together, of which there is at least one."""
    return reduce(add, specs)
