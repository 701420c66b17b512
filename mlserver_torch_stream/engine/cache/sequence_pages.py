"""Keeps account of the pages of one sequence: its block tables, computed tokens, and the pages that can be found."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

from mlserver_torch_stream.engine.cache.cache_spec import CacheSpec
from mlserver_torch_stream.engine.cache.page_pool import PagePool, page_digest

GIVEN_BACK = -1  # in a block table: the window has passed the page

TokenIds = Callable[[int, int], Sequence[int]]
"""Returns the tokens of a sequence from one position to another."""


class SequencePages:
    """The first ``computed`` tokens of a sequence are in its pages, or will be after the forwards in flight.

    The pool can find the first ``named`` of its full pages by their tokens; ``written`` of them are surely written.
    A step's batch has the ``tables`` themselves: they do not change before its forward is back, and ``clear`` makes new
    ones.
    """

    def __init__(self, spec: CacheSpec, pool: PagePool, token_ids: TokenIds) -> None:
        self._spec = spec
        self._pool = pool
        self._token_ids = token_ids
        self._digests: list[bytes] = []
        self.tables = tuple(array("i") for _ in spec.groups)
        self._slides = any(group.span is not None for group in spec.groups)
        self._first = [0] * len(spec.groups)  # the entries of a table before it are given back
        self.computed = 0
        self.named = self.written = 0

    @property
    def held(self) -> list[int]:
        """The number of pages of each group."""
        return [len(table) - first for table, first in zip(self.tables, self._first, strict=True)]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yields its pages, each with its group."""
        for group, table in enumerate(self.tables):
            yield from ((group, page) for page in table if page != GIVEN_BACK)

    # --- finding ---

    def look_up(self, tokens: int) -> int:
        """Takes the pages of the longest prefix of the first ``tokens`` that the pool finds. Returns the tokens gained.

        A windowed group needs only the pages that the next token sees.
        """
        size = self._spec.page_size
        if not self._pool.finds or self.computed % size:
            return 0
        begun = best = self.computed // size
        runs = [begun - first for first in self._first]  # of successive pages up to the present one
        for index in range(begun, tokens // size):
            digest = self._digest(index)
            for group, layers in enumerate(self._spec.groups):
                if self._pool.find(group, digest) is not None:
                    runs[group] += 1
                elif layers.span is None:
                    return self._go_on(begun, best)
                else:
                    runs[group] = 0
            if all(runs[group] > index - self._seen_from(group, index + 1) for group in range(len(runs))):
                best = index + 1
        return self._go_on(begun, best)

    def _seen_from(self, group: int, page: int) -> int:
        """Returns the first page that the first query of a page sees."""
        size = self._spec.page_size
        return self._spec.groups[group].oldest_seen(page * size) // size

    def _go_on(self, begun: int, end: int) -> int:
        if end == begun:
            return 0
        for group, table in enumerate(self.tables):
            seen_from = self._seen_from(group, end)
            for index in range(begun, end):
                page = self._pool.find(group, self._digest(index)) if index >= seen_from else None
                if page is not None:
                    self._pool.share(group, page)
                table.append(GIVEN_BACK if page is None else page)
        self.named = self.written = end
        self.computed = end * self._spec.page_size
        self.drop_passed()
        return (end - begun) * self._spec.page_size

    def _digest(self, index: int) -> bytes:
        size = self._spec.page_size
        for each in range(len(self._digests), index + 1):
            parent = self._digests[-1] if self._digests else b""
            self._digests.append(page_digest(parent, self._token_ids(each * size, (each + 1) * size)))
        return self._digests[index]

    def name(self, tokens: int) -> None:
        """Lets the pool find the full pages among the first ``tokens``."""
        if not self._pool.finds:
            return
        for index in range(self.named, tokens // self._spec.page_size):
            digest = self._digest(index)
            for group, table in enumerate(self.tables):
                if table[index] != GIVEN_BACK:
                    self._pool.name(group, table[index], digest)
            self.named = index + 1

    def forget_unwritten(self) -> set[tuple[int, int]]:
        """Takes the pages that a failed forward should have written out of the prefix cache, and returns them."""
        size = self._spec.page_size
        pages = self.from_page(self.written, self.named)
        for group, page in pages:
            self._pool.forget(group, page)
        self.named = min(self.named, self.written, self.computed // size)
        return pages

    def forget_all(self) -> None:
        for group, page in self:
            self._pool.forget(group, page)

    def from_page(self, start: int, stop: int | None = None) -> set[tuple[int, int]]:
        """Returns its pages, each with its group, from entry ``start`` of its tables on."""
        return {
            (group, page) for group, table in enumerate(self.tables) for page in table[start:stop] if page != GIVEN_BACK
        }

    # --- growing and shrinking ---

    def drop_passed(self) -> None:
        """Gives back the pages that no later token sees."""
        size = self._spec.page_size
        for group, table in enumerate(self.tables):
            seen_from = self._spec.groups[group].oldest_seen(self.computed) // size
            for index in range(self._first[group], min(seen_from, len(table))):
                if table[index] != GIVEN_BACK:
                    self._pool.give_back(group, table[index])
                    table[index] = GIVEN_BACK
            self._first[group] = max(self._first[group], min(seen_from, len(table)))

    def lacking(self, end: int) -> list[int]:
        """Returns how many pages of each group its tables lack for the tokens up to ``end``."""
        return [max(0, self._spec.pages(end) - len(table)) for table in self.tables]

    @property
    def has_room(self) -> bool:
        """Whether the next token needs no new page and no copy: it goes to pages that no other sequence holds.

        False if the token is the last of its page, as a full page is added to the prefix cache; and for models with
        sliding windows, as the step may give a page back.
        """
        index, offset = divmod(self.computed, self._spec.page_size)
        if self._slides or not 0 < offset < self._spec.page_size - 1:
            return False
        for group, table in enumerate(self.tables):
            if index >= len(table) or self._pool.holders(group, table[index]) != 1:
                return False
        return True

    def missing(self, end: int) -> list[int]:
        """Returns how many pages of each group ``extend`` takes for the tokens up to ``end``."""
        return [lacking + self._is_shared(group) for group, lacking in enumerate(self.lacking(end))]

    def _is_shared(self, group: int) -> bool:
        """Whether another sequence holds the page that the next token is written to."""
        index, table = self.computed // self._spec.page_size, self.tables[group]
        return index < len(table) and self._pool.holders(group, table[index]) > 1

    def extend(self, end: int) -> list[tuple[int, int, int]]:
        """Takes the pages for the tokens up to ``end``, and replaces a shared page that the next token goes to.

        Returns the copies that the step makes first: (group, source page, target page).
        """
        copies = []
        index = self.computed // self._spec.page_size
        for group, table in enumerate(self.tables):
            if self._is_shared(group):
                source, table[index] = table[index], self._pool.take(group)
                self._pool.give_back(group, source)
                if self.computed % self._spec.page_size:
                    copies.append((group, source, table[index]))
            elif index < len(table):
                self._pool.forget(group, table[index])  # its tokens are about to change
        self.grow(end)
        return copies

    def grow(self, end: int) -> None:
        for group, lacking in enumerate(self.lacking(end)):
            self.tables[group].extend(self._pool.take(group) for _ in range(lacking))

    def fork(self, token_ids: TokenIds) -> SequencePages:
        """Returns the pages of another sequence with the same tokens so far, which shares all of them."""
        twin = SequencePages(self._spec, self._pool, token_ids)
        twin.tables = tuple(table[:] for table in self.tables)
        twin._first = self._first[:]
        twin._digests = self._digests[: self.computed // self._spec.page_size]
        twin.computed, twin.named, twin.written = self.computed, self.named, self.written
        for group, table in enumerate(twin.tables):
            for page in table[twin._first[group] :]:
                self._pool.share(group, page)
        return twin

    def cut(self, kept: int) -> None:
        """Keeps the first ``kept`` tokens, as later ones have changed; none if their pages or states are gone."""
        size = self._spec.page_size
        del self._digests[kept // size :]
        if kept >= self.computed:
            return
        gone = any(
            first > layers.oldest_seen(kept) // size
            for first, layers in zip(self._first, self._spec.groups, strict=True)
        )
        if gone or self._spec.state_bytes:
            self.clear()
            return
        self.computed = kept
        self.named = self.written = min(self.named, kept // size)
        for group, table in enumerate(self.tables):
            for page in reversed(table[self._spec.pages(kept) :]):
                self._pool.give_back(group, page)
            del table[self._spec.pages(kept) :]

    def clear(self) -> None:
        """Gives all pages back, the last one first: the pool evicts in this order, so a prefix stays longest."""
        for index in reversed(range(max(map(len, self.tables), default=0))):
            for group, table in enumerate(self.tables):
                if index < len(table) and table[index] != GIVEN_BACK:
                    self._pool.give_back(group, table[index])
        self.tables = tuple(array("i") for _ in self.tables)
        self._first = [0] * len(self.tables)
        self.computed = self.named = self.written = 0
