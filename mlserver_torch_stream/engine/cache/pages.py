"""Describes a paged KV cache and the batches that read and write it, and allocates its pages.

A full page can be found by its tokens; the scores of these tokens can be found in the same way.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from hashlib import blake2b
from itertools import accumulate
from operator import add

from mlserver_torch_stream.types import TokenLogprob

# The most log-probabilities that ``PageScores`` holds, alternatives included: about 100 bytes each.
_MAX_LOGPROBS = 2**18

CPU_PAGE_SIZE = 16
CUDA_PAGE_SIZE = 256  # torch's varlen kernels read only pages whose size is a multiple of this


def page_size_of(kinds: Iterable[str]) -> int:
    """Returns how many tokens a page holds on devices of these types, as ``torch.device.type`` names them."""
    return CUDA_PAGE_SIZE if "cuda" in kinds else CPU_PAGE_SIZE


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that see the same tokens and therefore share block tables.

    With a ``window``, a query sees its own key and the ``window - 1`` keys before it. With a ``chunk`` (Llama 4), it
    sees its own key and the earlier keys of its chunk. With neither, it sees all keys up to its own. ``token_bytes`` is
    the number of bytes of a token's keys and values in all layers of the group.
    """

    layers: tuple[int, ...]  # indices in transformers' cache
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
        """The maximum number of keys that a query sees; None means no maximum."""
        return self.window if self.chunk is None else self.chunk


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The sizes of a cache's pages and states.

    ``state_bytes`` is the size of one sequence's states; 0 means that the model keeps no states.
    """

    page_size: int  # tokens
    groups: tuple[LayerGroup, ...]
    state_bytes: int = 0

    def pages(self, tokens: int) -> int:
        """Returns how many pages ``tokens`` tokens need."""
        return -(-tokens // self.page_size)

    def page_bytes(self, group: int) -> int:
        """Returns the bytes of one page of a group, in all layers of the group."""
        return self.page_size * self.groups[group].token_bytes

    def most_pages(self, tokens: int, step: int) -> tuple[int, ...]:
        """Returns the maximum pages per group that a sequence of ``tokens`` needs if each step adds ``step`` tokens."""
        pages = self.pages(tokens)
        spans = (group.span for group in self.groups)
        return tuple(pages if span is None else min(pages, self.pages(span + step - 1) + 1) for span in spans)

    def bytes_of(self, pages: Sequence[int], states: int) -> int:
        """Returns the bytes of ``pages[i]`` pages in each group ``i`` and of the states of ``states`` sequences."""
        return sum(n * self.page_bytes(group) for group, n in enumerate(pages)) + states * self.state_bytes

    def sequence_bytes(self, tokens: int, step: int = 1) -> int:
        """Returns the maximum bytes of the pages and states of a sequence of ``tokens`` tokens."""
        return self.bytes_of(self.most_pages(tokens, step), 1)

    def live_bytes(self, tokens: int) -> int:
        """Returns how many bytes of keys, values and states are read to compute the token after ``tokens`` tokens."""
        seen = (min(tokens, group.span or tokens) * group.token_bytes for group in self.groups)
        return sum(seen) + self.state_bytes

    @property
    def token_bytes(self) -> int:
        """The bytes of a token's keys and values in all layers."""
        return sum(group.token_bytes for group in self.groups)

    def __add__(self, other: CacheSpec) -> CacheSpec:
        """Returns one spec for two devices together. Both specs must have the same groups."""
        groups = (
            replace(group, token_bytes=group.token_bytes + same_group.token_bytes)
            for group, same_group in zip(self.groups, other.groups, strict=True)
        )
        return CacheSpec(self.page_size, tuple(groups), self.state_bytes + other.state_bytes)


def in_all(specs: Iterable[CacheSpec]) -> CacheSpec:
    """Returns one spec for all devices together; there must be at least one device."""
    return reduce(add, specs)


@dataclass(slots=True)  # a frozen dataclass takes three times as long to create
class BatchSequence:
    """The new tokens of one sequence: a chunk of its prompt, or its newest token followed by any drafts.

    The sequence's first ``start`` tokens are in the cache already. ``tables`` has a block table for each group of
    layers. Entry ``i`` is the page with the tokens from ``i * page_size`` on; it is -1 if a sliding window has moved
    past that page. The forward returns logits for the last ``wanted`` of the new tokens.
    """

    token_ids: Sequence[int]
    start: int
    tables: tuple[Sequence[int], ...]
    wanted: int = 1
    state_slot: int = -1  # where the sequence's recurrent state is, such as Mamba's; -1 if the model has none

    @property
    def count(self) -> int:
        return len(self.token_ids)

    @property
    def length(self) -> int:
        """How many of the sequence's tokens are in the cache after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step, and the copies that are made, in order, before its forward.

    Each of ``copies`` is (group, source page, target page); each of ``state_copies`` is (source slot, target slot).
    """

    sequences: tuple[BatchSequence, ...]
    copies: tuple[tuple[int, int, int], ...] = ()
    state_copies: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        return sum(sequence.count for sequence in self.sequences)

    @property
    def ends(self) -> list[int]:
        """For each sequence, the index after its last token among the packed tokens."""
        return list(accumulate(sequence.count for sequence in self.sequences))

    @property
    def wanted_rows(self) -> list[int]:
        """The indices, in order, of the packed tokens whose logits a forward returns."""
        return [
            row
            for sequence, end in zip(self.sequences, self.ends, strict=True)
            for row in range(end - sequence.wanted, end)
        ]


def page_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Returns the digest of a page: it depends on the page's tokens and, through ``parent``, on all earlier tokens."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


def salt_digest(salt: str | None) -> bytes:
    """Returns the parent digest for a sequence's first page. Sequences share pages only if their salts are equal."""
    return b"" if salt is None else blake2b(salt.encode(), digest_size=16, person=b"cache_salt").digest()


class _GroupPages:
    """The pages of one group.

    A page is free, held by sequences, or cached. No sequence holds a cached page, but the page can be found by its
    digest.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.fresh = 0  # the lowest page that was never taken, whose memory is not touched yet
        self.free: list[int] = []  # a heap of pages below ``fresh``
        self.references: dict[int, int] = {}
        self.digests: dict[int, bytes] = {}
        self.found: dict[bytes, int] = {}
        self.cached: OrderedDict[int, int] = OrderedDict()  # page -> time of its return; the oldest first

    @property
    def spare(self) -> int:
        return self.pages - len(self.references)

    def lowest(self) -> int | None:
        if self.free:
            return heapq.heappop(self.free)
        if self.fresh == self.pages:
            return None
        self.fresh += 1
        return self.fresh - 1

    def forget(self, page: int) -> None:
        digest = self.digests.pop(page, None)
        if digest is not None:
            del self.found[digest]


class PagePool:
    """Allocates the pages of all groups within ``cache_bytes``, of which cached pages use at most ``prefix_bytes``.

    The lowest free page is allocated first, so that little memory is ever touched. When a page or bytes are needed, the
    least recently used cached page is evicted.
    """

    def __init__(
        self, spec: CacheSpec, pages: Sequence[int], cache_bytes: int, prefix_bytes: int, *, finds: bool = True
    ) -> None:
        """``finds`` is false if pages are not enough for the model to continue; then no page is found by its tokens."""
        self.finds = finds
        self._groups = [_GroupPages(count) for count in pages]
        self._page_bytes = [spec.page_bytes(group) for group in range(len(spec.groups))]
        self._cache_bytes = cache_bytes
        self._prefix_bytes = prefix_bytes
        self._time = 0
        self.used_bytes = 0  # the bytes of pages that sequences hold, plus the bytes that ``reserve`` counts
        self.cached_bytes = 0

    def fits(self, needed: Sequence[int], more_bytes: int = 0) -> bool:
        """Returns whether ``needed`` pages of each group, plus ``more_bytes`` bytes, are free or cached."""
        more_bytes += sum(count * size for count, size in zip(needed, self._page_bytes, strict=True))
        return self.used_bytes + more_bytes <= self._cache_bytes and all(
            count <= pool.spare for count, pool in zip(needed, self._groups, strict=True)
        )

    def reserve(self, count: int) -> None:
        """Counts ``count`` bytes outside the pages as used; a negative count counts them as free again."""
        self.used_bytes += count
        self._make_room(0)

    def take(self, group: int) -> int:
        """Allocates and returns a page. The caller checks with ``fits`` that a page is available."""
        pool = self._groups[group]
        self._make_room(self._page_bytes[group])
        page = pool.lowest()
        if page is None:
            self._evict(group)
            page = pool.lowest()
        assert page is not None, "no page is left"
        pool.references[page] = 1
        self.used_bytes += self._page_bytes[group]
        return page

    def find(self, group: int, digest: bytes) -> int | None:
        """Returns the page of a group with this digest; None if the pool has none."""
        return self._groups[group].found.get(digest)

    def has_name(self, group: int, page: int) -> bool:
        """Returns whether ``find`` can return the page."""
        return page in self._groups[group].digests

    def share(self, group: int, page: int) -> None:
        """Adds a holder to a page that is held or cached."""
        pool = self._groups[group]
        if pool.cached.pop(page, None) is not None:
            self.cached_bytes -= self._page_bytes[group]
            self.used_bytes += self._page_bytes[group]
        pool.references[page] = pool.references.get(page, 0) + 1

    def holders(self, group: int, page: int) -> int:
        """Returns how many sequences hold a page."""
        return self._groups[group].references.get(page, 0)

    def name(self, group: int, page: int, digest: bytes) -> None:
        """Makes ``find`` return a held page, unless it already returns another page with the same tokens."""
        pool = self._groups[group]
        if digest not in pool.found and page not in pool.digests:
            pool.digests[page] = digest
            pool.found[digest] = page

    def forget(self, group: int, page: int) -> None:
        """Makes ``find`` no longer return the page."""
        self._groups[group].forget(page)
        if page in self._groups[group].cached:
            self._free(group, page)

    def give_back(self, group: int, page: int) -> None:
        """Removes a holder of a page.

        A page without holders is cached if ``find`` can return it; otherwise it is free.
        """
        pool = self._groups[group]
        pool.references[page] -= 1
        if pool.references[page]:
            return
        del pool.references[page]
        self.used_bytes -= self._page_bytes[group]
        self._time += 1
        if page not in pool.digests or self._page_bytes[group] > self._prefix_bytes:
            pool.forget(page)
            heapq.heappush(pool.free, page)
            return
        pool.cached[page] = self._time
        self.cached_bytes += self._page_bytes[group]
        while self.cached_bytes > self._prefix_bytes:
            self._evict_oldest()

    def _make_room(self, size: int) -> None:
        while self.cached_bytes and self.used_bytes + self.cached_bytes + size > self._cache_bytes:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        groups = [group for group, pool in enumerate(self._groups) if pool.cached]
        self._evict(min(groups, key=lambda group: next(iter(self._groups[group].cached.values()))))

    def _evict(self, group: int) -> None:
        page = next(iter(self._groups[group].cached))
        self._groups[group].forget(page)
        self._free(group, page)

    def _free(self, group: int, page: int) -> None:
        pool = self._groups[group]
        del pool.cached[page]
        self.cached_bytes -= self._page_bytes[group]
        heapq.heappush(pool.free, page)


class PageScores:
    """Keeps the scores of tokens in pages of the prefix cache, so that a shared prefix is scored only once.

    A token's score depends only on the token and the tokens before it, so the digest of its page identifies the score.
    All scores of a page have the same number of alternatives. The scores of the least recently used pages are dropped.
    """

    def __init__(self, max_logprobs: int = _MAX_LOGPROBS) -> None:
        self._max_logprobs = max_logprobs
        self._logprobs = 0
        self._pages: OrderedDict[bytes, tuple[int, Sequence[TokenLogprob]]] = OrderedDict()

    def find(self, digest: bytes, top: int) -> Sequence[TokenLogprob] | None:
        """Returns the scores of a page's tokens with ``top`` alternatives each; None if they are not known."""
        kept, scores = self._pages.get(digest, (-1, ()))
        if kept < top:
            return None
        self._pages.move_to_end(digest)
        return scores if kept == top else [replace(score, top=score.top[:top]) for score in scores]

    def keep(self, digest: bytes, scores: Sequence[TokenLogprob], top: int) -> None:
        """Stores the scores of a page's tokens, unless scores with at least as many alternatives are stored already."""
        kept, earlier = self._pages.get(digest, (-1, ()))
        if kept >= top:
            return
        self._logprobs += len(scores) * (1 + top) - len(earlier) * (1 + kept)
        self._pages[digest] = top, tuple(scores)
        self._pages.move_to_end(digest)
        while self._logprobs > self._max_logprobs:
            _, (kept, scores) = self._pages.popitem(last=False)
            self._logprobs -= len(scores) * (1 + kept)
