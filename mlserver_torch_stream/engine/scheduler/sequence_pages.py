"""Keeps the pages of one sequence: its block tables, the pages that it shares, and those that a lookup finds."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

from mlserver_torch_stream.engine.cache.pages import CacheSpec, PagePool, PageScores, page_digest, salt_digest
from mlserver_torch_stream.types import TokenLogprob

_GIVEN_BACK = -1  # in a block table: the window has passed the page

TokenIds = Callable[[int, int], Sequence[int]]
"""Returns the tokens of a sequence from one position to another."""


class SequencePages:
    """The pages of one sequence. The pages hold its first ``computed`` tokens once the forwards in flight have
    returned.

    The pool can find the first ``named`` full pages by their tokens; the first ``written`` of them have certainly been
    written. A step's batch refers to the ``tables`` themselves: they do not change before its forward has returned, and
    ``clear`` makes new tables.
    """

    def __init__(self, spec: CacheSpec, pool: PagePool, token_ids: TokenIds, salt: str | None = None) -> None:
        self._spec = spec
        self._pool = pool
        self._token_ids = token_ids
        self._salt = salt
        self._digests: list[bytes] = []
        self.tables = tuple(array("i") for _ in spec.groups)
        self._slides = any(group.span is not None for group in spec.groups)
        self._first = [0] * len(spec.groups)  # entries of a table before this one are given back
        self.computed = 0
        self.named = self.written = 0

    @property
    def held(self) -> list[int]:
        """The number of pages of each group."""
        return [len(table) - first for table, first in zip(self.tables, self._first, strict=True)]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yields its pages, each with its group."""
        for group, table in enumerate(self.tables):
            yield from ((group, page) for page in table if page != _GIVEN_BACK)

    # --- finding ---

    def look_up(self, tokens: int, *, again: bool = False) -> int:
        """Takes the pages of the longest prefix of the first ``tokens`` that the pool finds. Returns the tokens in
        them.

        A windowed group needs only the pages that the next token sees. ``again``: the last of these tokens is computed
        again, for its logits. If it ends a page that the pool finds, ``extend`` copies the page.
        """
        size = self._spec.page_size
        if not self._pool.finds or self.computed % size:
            return 0
        if again and self._slides:  # the token may see an older page than the token after it
            tokens, again = tokens - 1, False
        gained = self._take_found(tokens)
        if again and gained and self.computed == tokens:
            self.computed -= 1
            self.named = self.written = self.computed // size
            gained -= 1
        return gained

    def _take_found(self, tokens: int) -> int:
        size = self._spec.page_size
        begun = best = self.computed // size
        runs = [begun - first for first in self._first]  # numbers of consecutive pages up to the current one
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
                table.append(_GIVEN_BACK if page is None else page)
        self.named = self.written = end
        self.computed = end * self._spec.page_size
        self.drop_passed()
        return (end - begun) * self._spec.page_size

    def _digest(self, index: int) -> bytes:
        size = self._spec.page_size
        for each in range(len(self._digests), index + 1):
            parent = self._digests[-1] if self._digests else salt_digest(self._salt)
            self._digests.append(page_digest(parent, self._token_ids(each * size, (each + 1) * size)))
        return self._digests[index]

    def find_scores(self, page_scores: PageScores, scores: list[TokenLogprob], top: int, tokens: int) -> None:
        """Adds to ``scores`` the kept scores of the next pages, within the first ``tokens``."""
        size = self._spec.page_size
        for index in range(len(scores) // size, tokens // size) if self._pool.finds else ():
            kept = page_scores.find(self._digest(index), top)
            if kept is None:
                return
            scores += kept[len(scores) - index * size :]

    def keep_scores(self, page_scores: PageScores, scores: Sequence[TokenLogprob], top: int, start: int) -> None:
        """Stores the scores of the pages that end after token ``start``."""
        size = self._spec.page_size
        for index in range(start // size, len(scores) // size) if self._pool.finds else ():
            page_scores.keep(self._digest(index), scores[index * size : (index + 1) * size], top)

    def name(self, tokens: int) -> None:
        """Lets the pool find the full pages among the first ``tokens``."""
        if not self._pool.finds:
            return
        for index in range(self.named, tokens // self._spec.page_size):
            digest = self._digest(index)
            for group, table in enumerate(self.tables):
                if table[index] != _GIVEN_BACK:
                    self._pool.name(group, table[index], digest)
            self.named = index + 1

    def forget_unwritten(self) -> set[tuple[int, int]]:
        """Removes from the prefix cache the pages that a failed forward should have written, and returns them."""
        size = self._spec.page_size
        pages = self.unwritten
        for group, page in pages:
            self._pool.forget(group, page)
        self.named = min(self.named, self.written, self.computed // size)
        return pages

    def forget_all(self) -> None:
        """Takes all pages of the sequence out of the prefix cache."""
        for group, page in self:
            self._pool.forget(group, page)

    def from_page(self, start: int, stop: int | None = None) -> set[tuple[int, int]]:
        """Returns its pages, each with its group, from entry ``start`` of its tables on."""
        return {
            (group, page)
            for group, table in enumerate(self.tables)
            for page in table[start:stop]
            if page != _GIVEN_BACK
        }

    # --- growing and shrinking ---

    def drop_passed(self) -> None:
        """Gives back the pages that no later token sees."""
        size = self._spec.page_size
        for group, table in enumerate(self.tables):
            seen_from = self._spec.groups[group].oldest_seen(self.computed) // size
            for index in range(self._first[group], min(seen_from, len(table))):
                if table[index] != _GIVEN_BACK:
                    self._pool.give_back(group, table[index])
                    table[index] = _GIVEN_BACK
            self._first[group] = max(self._first[group], min(seen_from, len(table)))

    def lacking(self, end: int) -> list[int]:
        """Returns how many pages of each group the tables lack for the tokens up to ``end``."""
        return [max(0, self._spec.pages(end) - len(table)) for table in self.tables]

    @property
    def has_room(self) -> bool:
        """True if the next token needs no new page and no copy: it goes to pages that no other sequence holds.

        False if the token is the last of its page, because a full page is added to the prefix cache; and for models
        with sliding windows, because the step may give a page back.
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
        """Returns whether the page to which the next token is written is held by another sequence, or was found."""
        index, offset = divmod(self.computed, self._spec.page_size)
        table = self.tables[group]
        if index >= len(table):
            return False
        was_found = offset and index >= self.named and self._pool.has_name(group, table[index])
        return bool(was_found) or self._pool.holders(group, table[index]) > 1

    @property
    def unwritten(self) -> set[tuple[int, int]]:
        """The pages that the pool can find already, and that a forward has yet to write, each with its group."""
        return self.from_page(self.written, self.named)

    def find_next(self, length: int) -> set[tuple[int, int]]:
        """Returns the pages that the pool finds for the next token's page, each with its group. ``length``: of the
        sequence."""
        index, groups = self.computed // self._spec.page_size, range(len(self.tables))
        if not self._pool.finds or (index + 1) * self._spec.page_size > length:
            return set()
        found = [(group, self._pool.find(group, self._digest(index))) for group in groups]
        return {(group, page) for group, page in found if page is not None}

    def extend(self, end: int) -> list[tuple[int, int, int]]:
        """Takes the pages for the tokens up to ``end``, and replaces a shared page to which the next token is written.

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
        """Takes the pages that the tables lack for the tokens up to ``end``. Replaces no shared page."""
        for group, lacking in enumerate(self.lacking(end)):
            self.tables[group].extend(self._pool.take(group) for _ in range(lacking))

    def fork(self, token_ids: TokenIds) -> SequencePages:
        """Returns the pages of another sequence with the same tokens so far, which shares all of them."""
        twin = SequencePages(self._spec, self._pool, token_ids, self._salt)
        twin.tables = tuple(table[:] for table in self.tables)
        twin._first = self._first[:]
        twin._digests = self._digests[: self.computed // self._spec.page_size]
        twin.computed, twin.named, twin.written = self.computed, self.named, self.written
        for group, table in enumerate(twin.tables):
            for page in table[twin._first[group] :]:
                self._pool.share(group, page)
        return twin

    def clear(self) -> None:
        """Gives all pages back, the last page first: the pool evicts in this order, so the beginning stays longest."""
        for index in reversed(range(max(map(len, self.tables), default=0))):
            for group, table in enumerate(self.tables):
                if index < len(table) and table[index] != _GIVEN_BACK:
                    self._pool.give_back(group, table[index])
        self.tables = tuple(array("i") for _ in self.tables)
        self._first = [0] * len(self.tables)
        self.computed = self.named = self.written = 0
