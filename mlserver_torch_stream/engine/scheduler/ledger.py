"""Keeps the ledger of a KV cache, which records the pages and the state slot of each sequence."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mlserver_torch_stream.engine.cache.pages import (
    BatchSequence,
    CacheSpec,
    PagePool,
    PageScores,
    page_digest,
    salt_digest,
)
from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.scheduler.queue import SchedulerLimits
from mlserver_torch_stream.types import TokenLogprob

GIVEN_BACK = -1  # in a block table: the window has passed the page

TokenIds = Callable[[int, int], Sequence[int]]
"""Returns the tokens of a sequence from one position to another."""


class SequencePages:
    """The pages of one sequence.

    The pages hold its first ``computed`` tokens once the forwards in flight have returned. The first ``named`` full
    pages are in the prefix cache; the first ``written`` pages of these have certainly been written. A step's batch
    refers to the ``tables`` themselves, without a copy. So the tables do not change before the forward has returned,
    and ``clear`` makes new tables.
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
        """Yields the pages, each with its group."""
        for group, table in enumerate(self.tables):
            yield from ((group, page) for page in table if page != GIVEN_BACK)

    # --- finding ---

    def look_up(self, tokens: int, *, again: bool = False) -> int:
        """Adds the pages of the longest prefix, within the first ``tokens`` tokens, that is in the prefix cache.

        Returns the number of tokens in these pages. A windowed group needs only the pages that the next token sees.
        ``again`` means that the last of the ``tokens`` is computed again, because its logits are needed. If that token
        ends a page from the prefix cache, ``extend`` copies the page.
        """
        size, before = self._spec.page_size, self.computed
        if not self._pool.finds or (before % size and not self._ends_found_page):
            return 0
        if again and self._slides:  # the token may see an older page than the token after it
            tokens, again = tokens - 1, False
        self._move_to(-(-before // size) * size)
        self._take_found(tokens)
        if again and self.computed == tokens and (before % size or self.computed > before):
            self._move_to(tokens - 1)
        return self.computed - before

    @property
    def _ends_found_page(self) -> bool:
        """Whether an earlier look-up has found the next token's page, whose last token is computed again."""
        return (self.computed + 1) % self._spec.page_size == 0 and all(map(self._is_shared, range(len(self.tables))))

    def _move_to(self, computed: int) -> None:
        if computed != self.computed:
            self.computed = computed
            self.named = self.written = computed // self._spec.page_size

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
        """Returns the index of the first page that the first query of this page sees."""
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
            parent = self._digests[-1] if self._digests else salt_digest(self._salt)
            self._digests.append(page_digest(parent, self._token_ids(each * size, (each + 1) * size)))
        return self._digests[index]

    def find_scores(self, page_scores: PageScores, scores: list[TokenLogprob], top: int, tokens: int) -> None:
        """Adds the stored scores of the next pages, within the first ``tokens`` tokens, to ``scores``."""
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
        """Adds the full pages among the first ``tokens`` tokens to the prefix cache."""
        if not self._pool.finds:
            return
        for index in range(self.named, tokens // self._spec.page_size):
            digest = self._digest(index)
            for group, table in enumerate(self.tables):
                if table[index] != GIVEN_BACK:
                    self._pool.name(group, table[index], digest)
            self.named = index + 1

    def forget_unwritten(self) -> set[tuple[int, int]]:
        """Removes and returns the pages in the prefix cache that a failed forward should have written."""
        size = self._spec.page_size
        pages = self.unwritten
        for group, page in pages:
            self._pool.forget(group, page)
        self.named = min(self.named, self.written, self.computed // size)
        return pages

    def forget_all(self) -> None:
        """Removes all pages of the sequence from the prefix cache."""
        for group, page in self:
            self._pool.forget(group, page)

    def from_token(self, start: int) -> set[tuple[int, int]]:
        """Returns the pages with the tokens from position ``start`` on, each with its group."""
        return self._pages(start // self._spec.page_size)

    def _pages(self, start: int, stop: int | None = None) -> set[tuple[int, int]]:
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
        """Returns how many pages of each group the tables lack for the tokens up to ``end``."""
        return [max(0, self._spec.pages(end) - len(table)) for table in self.tables]

    @property
    def has_room(self) -> bool:
        """Whether the next token needs no new page and no copy, because only this sequence holds the token's pages.

        The value is also false in two other cases: for the last token of a page, because the full page is added to the
        prefix cache, and for models with sliding windows, because the step may return a page to the pool.
        """
        index, offset = divmod(self.computed, self._spec.page_size)
        if self._slides or not 0 < offset < self._spec.page_size - 1:
            return False
        for group, table in enumerate(self.tables):
            if index >= len(table) or self._pool.holders(group, table[index]) != 1:
                return False
        return True

    def missing(self, end: int) -> list[int]:
        """Returns how many new pages of each group ``extend`` needs for the tokens up to ``end``."""
        return [lacking + self._is_shared(group) for group, lacking in enumerate(self.lacking(end))]

    def _is_shared(self, group: int) -> bool:
        """Returns whether another sequence also holds the next token's page, or it was found in the prefix cache."""
        index, offset = divmod(self.computed, self._spec.page_size)
        table = self.tables[group]
        if index >= len(table):
            return False
        was_found = offset and index >= self.named and self._pool.has_name(group, table[index])
        return bool(was_found) or self._pool.holders(group, table[index]) > 1

    @property
    def unwritten(self) -> set[tuple[int, int]]:
        """The pages that are already in the prefix cache but that a forward has yet to write, each with its group."""
        return self._pages(self.written, self.named)

    def find_next(self, length: int) -> set[tuple[int, int]]:
        """Returns the pages of the prefix cache with the same tokens as the next token's page or as the first page that
        the tables lack, each with its group.

        The two pages differ after a look-up, which leaves the last token of the found pages to be computed. ``length``
        is the length of the sequence.
        """
        size, groups = self._spec.page_size, range(len(self.tables))
        indices = {self.computed // size, *map(len, self.tables)} if self._pool.finds else set()
        full = [index for index in indices if (index + 1) * size <= length]
        found = [(group, self._pool.find(group, self._digest(index))) for index in full for group in groups]
        return {(group, page) for group, page in found if page is not None}

    def extend(self, end: int) -> list[tuple[int, int, int]]:
        """Allocates the pages for the tokens up to ``end``.

        If the next token's page is shared, replaces it by a new page. Returns the copies with which the step has to
        begin: (group, source page, target page).
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
        """Allocates the pages that the tables lack for the tokens up to ``end``. Does not replace shared pages."""
        for group, lacking in enumerate(self.lacking(end)):
            self.tables[group].extend(self._pool.take(group) for _ in range(lacking))

    def fork(self, token_ids: TokenIds) -> SequencePages:
        """Returns a copy for another sequence with the same tokens so far; both sequences hold the same pages."""
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
        """Returns all pages, the last page first: the pool evicts in this order, so the first page stays longest."""
        for index in reversed(range(max(map(len, self.tables), default=0))):
            for group, table in enumerate(self.tables):
                if index < len(table) and table[index] != GIVEN_BACK:
                    self._pool.give_back(group, table[index])
        self.tables = tuple(array("i") for _ in self.tables)
        self._first = [0] * len(self.tables)
        self.computed = self.named = self.written = 0


@dataclass(eq=False, slots=True)  # a frozen dataclass takes three times as long to create
class StepPart:
    """A sequence's part of a step; ``input`` is this part as the forward receives it.

    ``samples`` are the sequences that get a token from this part's logits: none for a chunk before the end of a prompt,
    all ``n`` sequences of the request for the last chunk, and the sequence itself while it decodes. ``drafts`` are the
    guessed tokens at the end of the part, which the step verifies. ``prefills`` means that the part is a chunk of a
    prompt, or of a sequence that resumes after preemption.
    """

    sequence: SequenceState
    input: BatchSequence
    samples: tuple[SequenceState, ...]
    prefills: bool
    drafts: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        return self.input.start

    @property
    def count(self) -> int:
        return len(self.input.token_ids)

    @property
    def sampled_row(self) -> int:
        """The row of logits from which the first token is sampled; earlier rows score the prompt."""
        return self.input.wanted - 1 - len(self.drafts)


NO_SLOT = -1

Order = tuple[int, int, int]  # priority, number of the admission, index in the request


class ScheduledSequence:
    """The scheduler's state of a sequence: its ``pages``, its place in the order of admission, and its part of a step.

    ``forks`` are the other sequences of its request. They continue from the end of the prompt, which this sequence
    computes.
    """

    def __init__(self, sequence: SequenceState, spec: CacheSpec, pool: PagePool, page_scores: PageScores) -> None:
        self.sequence = sequence
        self._page_scores = page_scores
        self.request = sequence.request  # keeps the request alive: the sequence does not
        self._spec = spec
        self.forks: tuple[SequenceState, ...] = ()
        self.pages = SequencePages(spec, pool, sequence.token_ids, sequence.request.params.cache_salt)
        self.slot = NO_SLOT
        self.order: Order = (0, 0, 0)
        self.part: StepPart | None = None  # planned, and its forward has not returned
        self.found = 0  # prompt tokens found in the prefix cache
        self.admitted = False
        self.restarts = False  # it was admitted and has lost its pages
        self.began_anew = False  # tokens found in the prefix cache no longer count as hits
        self.copied = False  # a page or states are being copied for it in a forward that has not returned

    @property
    def computed(self) -> int:
        """The number of tokens whose keys and values are in the sequence's pages."""
        return self.pages.computed

    @property
    def left(self) -> int:
        """The number of tokens that can be computed now."""
        return self.sequence.length - self.pages.computed

    @property
    def decodes(self) -> bool:
        """Whether the sequence decodes, so that only its newest token has to be computed.

        A sequence that resumes after it has lost its pages does not decode, even if the prefix cache has all tokens but
        the last.
        """
        return bool(self.sequence.tokens) and not self.restarts and self.left == 1

    @property
    def priority(self) -> int:
        """The request's priority; 1 is the highest."""
        return self.order[0]

    @property
    def samples(self) -> tuple[SequenceState, ...]:
        """The sequences that get the token after this sequence's last token."""
        return (self.sequence, *[fork for fork in self.forks if fork.finish_reason is None])

    @property
    def holds_something(self) -> bool:
        """Whether the sequence holds pages or a state slot."""
        return any(self.pages.held) or self.slot != NO_SLOT

    def needed(self, limits: SchedulerLimits) -> list[int]:
        """Returns how many more pages of each group the sequence needs until all its tokens are computed."""
        tokens = self.sequence.length
        most = self._spec.most_pages(tokens, limits.chunk(tokens))
        return [max(0, pages - held) for pages, held in zip(most, self.pages.held, strict=True)]

    def needed_with_forks(self, limits: SchedulerLimits) -> list[int]:
        """Returns ``needed`` plus one page of each group for each fork that gets tokens, because it copies a page."""
        copies = len(self.forks) if self.request.max_tokens else 0
        return [pages + copies for pages in self.needed(limits)]

    def look_up(self) -> None:
        """Takes pages from the prefix cache for all tokens except the last one, because its logits are needed.

        If the prompt is scored, computing resumes at the token before the first token without a score, because that
        token's logits are needed.
        """
        most, request, again = self.sequence.length - 1, self.request, False
        if request.unscored:
            top, scores = request.params.prompt_logprobs or 0, request.scores
            scores += () if scores else (TokenLogprob(request.prompt[0], None),)
            self.pages.find_scores(self._page_scores, scores, top, len(request.prompt))
            again = len(scores) <= most
            most = min(most, len(scores))
        gained = self.pages.look_up(most, again=again)
        if not self.began_anew:
            self.found += gained

    def add_scores(self, scores: Sequence[TokenLogprob]) -> None:
        """Adds the next scores of the prompt, and stores the scores of full pages."""
        request = self.request
        first = len(request.scores)
        request.scores += scores
        self.pages.keep_scores(self._page_scores, request.scores, request.params.prompt_logprobs or 0, first)

    def advance(self, part: StepPart, tokens: int) -> None:
        """Counts the first ``tokens`` tokens of a part as computed, after the part's forward has returned."""
        self.part = None
        self.copied = False
        self.pages.computed = part.start + tokens
        if part.drafts:  # accepted drafts may have filled pages
            self.pages.name(min(self.computed, self.sequence.length))
        self.pages.written = self.pages.named


class PageLedger:
    """Records what each sequence holds in the KV cache: its pages and the slot of its states.

    A sequence that loses its pages and slot is computed again.
    """

    def __init__(self, limits: SchedulerLimits, spec: CacheSpec, *, finds: bool) -> None:
        """``finds`` is passed to ``PagePool``."""
        self._whole_prompts = limits.whole_prompts
        self._spec = spec
        self._pool = PagePool(spec, limits.pages, limits.cache_bytes, limits.prefix_bytes, finds=finds)
        self._page_scores = PageScores()
        self._slots = list(range(limits.max_num_seqs)) if spec.state_bytes else []
        self._sequences: dict[SequenceState, ScheduledSequence] = {}
        self.state_copies: list[tuple[int, int]] = []  # copies of states that the next step makes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages and states of sequences; a page that several sequences share counts once."""
        return self._pool.used_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of the pages that only the prefix cache holds."""
        return self._pool.cached_bytes

    # --- sequences ---

    def __getitem__(self, sequence: SequenceState) -> ScheduledSequence:
        return self._sequences[sequence]

    def add(self, sequence: SequenceState) -> ScheduledSequence:
        """Adds a sequence that holds nothing yet."""
        scheduled = self._sequences[sequence] = ScheduledSequence(sequence, self._spec, self._pool, self._page_scores)
        return scheduled

    def fork(self, scheduled: ScheduledSequence, sequence: SequenceState) -> ScheduledSequence:
        """Adds a sequence that continues after the tokens of ``scheduled``, in the same pages if there is memory."""
        twin = self.add(sequence)
        twin.began_anew = True
        if not self.fits_for(twin, [0] * len(self._spec.groups)):  # no bytes are left for its states
            twin.restarts = True
            return twin
        twin.pages = scheduled.pages.fork(sequence.token_ids)
        self.take_slot(twin)
        if twin.slot != NO_SLOT:
            self.state_copies.append((scheduled.slot, twin.slot))
            twin.copied = True
        return twin

    def __iter__(self) -> Iterator[ScheduledSequence]:
        return iter(self._sequences.values())

    def get(self, sequence: SequenceState) -> ScheduledSequence | None:
        """Returns the state of a sequence; None if it has left."""
        return self._sequences.get(sequence)

    def pop(self, sequences: Iterable[SequenceState]) -> list[ScheduledSequence]:
        """Removes the states of these sequences and returns them; skips sequences whose state is already removed.

        The returned states still hold their pages and slots.
        """
        return [self._sequences.pop(each) for each in sequences if each in self._sequences]

    def is_void(self, part: StepPart) -> bool:
        """Returns whether the result of a part is ignored, because its sequence has left or is computed again."""
        scheduled = self.get(part.sequence)
        return scheduled is None or scheduled.part is not part

    def restart(self, scheduled: ScheduledSequence) -> None:
        """Takes back the pages and the slot of a sequence, so that it is computed again."""
        self.clear(scheduled)
        scheduled.began_anew = True
        scheduled.restarts = scheduled.admitted

    def clear(self, scheduled: ScheduledSequence, *, forget: bool = False) -> None:
        """Takes back all pages and the state slot of a sequence, and forgets its part of a step.

        With ``forget`` the pages cannot be found afterwards.
        """
        if forget:
            scheduled.pages.forget_all()
        scheduled.part = None
        scheduled.copied = False
        scheduled.found = 0
        scheduled.pages.clear()
        if scheduled.slot != NO_SLOT:
            self.state_copies = [each for each in self.state_copies if each[1] != scheduled.slot]
            heapq.heappush(self._slots, scheduled.slot)
            scheduled.slot = NO_SLOT
            self._pool.reserve(-self._spec.state_bytes)

    # --- pages and slots ---

    def fits(self, pages: Sequence[int]) -> bool:
        """Returns whether ``pages`` pages of each group are free or cached."""
        return self._pool.fits(pages)

    def fits_for(self, scheduled: ScheduledSequence, pages: Sequence[int], sequences: int = 1) -> bool:
        """Returns whether there is room for ``pages`` and for the state slots that the sequence and its forks lack."""
        if not self._spec.state_bytes:
            return self._pool.fits(pages)
        slots = sequences - (scheduled.slot != NO_SLOT)
        return slots <= len(self._slots) and self._pool.fits(pages, slots * self._spec.state_bytes)

    def fitting(self, scheduled: ScheduledSequence, tokens: int) -> int:
        """Returns for how many of the next ``tokens`` tokens of a sequence there are pages."""
        size, start = self._spec.page_size, scheduled.computed
        while tokens > 0:
            if self.fits_for(scheduled, scheduled.pages.missing(start + tokens)):
                return tokens
            tokens = 0 if self._whole_prompts else (start + tokens - 1) // size * size - start
        return 0

    def take_slot(self, scheduled: ScheduledSequence) -> None:
        """Gives a sequence a state slot, if the model keeps states and the sequence has none."""
        if self._spec.state_bytes and scheduled.slot == NO_SLOT:
            scheduled.slot = heapq.heappop(self._slots)
            self._pool.reserve(self._spec.state_bytes)
