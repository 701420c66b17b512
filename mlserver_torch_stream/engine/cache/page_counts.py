"""Divides the memory of a KV cache into pages for each group of layers and slots for states."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlserver_torch_stream.engine.cache.pages import CacheSpec

_MOST = 1 << 40


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The size of a cache.

    ``pages`` is the number of pages of each group, on every device that has a layer of the group.
    """

    pages: tuple[int, ...]
    state_slots: int

    def bytes_of(self, spec: CacheSpec) -> int:
        """Returns the bytes of this many pages and state slots."""
        return spec.bytes_of(self.pages, self.state_slots)

    def holds(self, spec: CacheSpec, sequences: int, tokens: int) -> bool:
        """Returns whether ``sequences`` sequences of ``tokens`` tokens can decode at the same time."""
        if spec.state_bytes and self.state_slots < sequences:
            return False
        needed = spec.most_pages(tokens, 1)
        return all(held >= sequences * pages for held, pages in zip(self.pages, needed, strict=True))


def size_cache(rooms: Sequence[tuple[CacheSpec, int]], *, sequences: int, tokens: int, step: int) -> CacheSize:
    """Returns the largest size that fits all ``rooms``: each is a pair of a spec (of one or all devices) and its bytes.

    The cache first gets room for one sequence of ``tokens`` tokens, or for the longest sequence that fits. Then the
    cache gets room for ``sequences`` sequences that are as long as possible. A group of windowed layers needs no more
    pages than that. With the remaining bytes, each group gets the same number of additional pages, for the prefix
    cache. If not even one token fits, there are no pages.
    """
    spec = rooms[0][0]
    slot = int(any(each.state_bytes > 0 for each, _ in rooms))

    def fits(size: CacheSize) -> bool:
        return all(size.bytes_of(each) <= room for each, room in rooms)

    def of(count: int, length: int) -> CacheSize:
        pages = (count * number for number in spec.most_pages(length, 1))
        return CacheSize(tuple(map(max, pages, alone)), count * slot)

    longest = largest(tokens, lambda length: fits(CacheSize(spec.most_pages(length, step), slot)))
    if longest == 0:
        return CacheSize((0,) * len(spec.groups), 0)
    alone = spec.most_pages(longest, step)
    count = max(1, largest(sequences, lambda number: fits(of(number, 1))))
    size = of(count, largest(tokens, lambda length: fits(of(count, length))))
    if not size.pages:
        return size
    more = largest(_MOST, lambda pages: fits(_with_pages(size, pages)))
    return _with_pages(size, more)


def pages_on_host(spec: CacheSpec, budget: int) -> tuple[int, ...]:
    """Returns how many pages each group may have if the cache may use ``budget`` bytes of a host's memory.

    On a host, a page takes no memory until it is first written (with our kernels, until any page in the same 2 MiB is
    first written). So each group may have pages for the whole budget; the scheduler enforces the budget for all groups
    together.
    """
    return tuple(budget // max(1, spec.page_bytes(group)) for group in range(len(spec.groups)))


def _with_pages(size: CacheSize, more: int) -> CacheSize:
    return CacheSize(tuple(count + more for count in size.pages), size.state_slots)


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest number from 1 to ``most`` for which ``fits`` is true, or 0.

    If a number fits, all smaller numbers must fit, too.
    """
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))
