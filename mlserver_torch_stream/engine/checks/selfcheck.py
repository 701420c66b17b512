"""Checks at load that a batch gets the logits that each sequence gets alone, at near and far positions.

The near check compares a batch over pages with each sequence alone. The far check computes no long sequence: it fills
transformers' own cache, and a few pages that a long block table names over and over, with the keys and values of a
short sequence. The next tokens must get the same logits over both.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
import transformers
from transformers import GenerationConfig

from mlserver_torch_stream.engine.attention.registered import CannotPage
from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.cache.budget import free_bytes
from mlserver_torch_stream.engine.cache.layout import CacheLayout, UnsupportedCache
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages, PagedCache
from mlserver_torch_stream.engine.cache.pages import CPU_PAGE_SIZE, CacheSpec, LayerGroup, in_all
from mlserver_torch_stream.engine.checks.expected_logits import ExpectedLogits, far_columns
from mlserver_torch_stream.engine.checks.trial import SPARE_SLOT, Trial, TrialSequence
from mlserver_torch_stream.engine.comparison import Comparison
from mlserver_torch_stream.engine.config_fields import comparable_context, named_lengths
from mlserver_torch_stream.engine.devices import input_device
from mlserver_torch_stream.engine.failures import in_a_line
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.machine import read_host
from mlserver_torch_stream.errors import LoadFailed

logger = logging.getLogger(__name__)

_COLUMNS = 5  # of the short sequence, whose keys and values are repeated
_MIDDLE = 2  # pages that a long table names over and over
# transformers' own cache of one sequence may take half of the weights' bytes and of the free memory: each layer is
# copied once when it gets the new tokens.
_PART = 2


def far_lengths(trial: Trial, room: int | None, more: Sequence[int] = ()) -> list[int]:
    """Returns the lengths that the trial does not reach, within the context, whose caches are small enough to compare.

    ``room`` bytes are free for caches; None: as many as the devices have now. ``more``: short ones that are taken too.
    """
    model, specs = trial.expected.model, trial.cache.specs
    config = model.config.get_text_config(decoder=True)
    named = named_lengths(config) | {window for window in trial.layout.windows if window is not None} | set(more)
    wanted = [length for length in sorted(named) if trial.longest < length < comparable_context(model)]
    if not wanted or not specs:
        return []
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    room = min(free_bytes(specs, read_host()).values(), default=0) if room is None else room
    spec, most = in_all(specs.values()), min(weights, room) // _PART
    lengths = [length for length in wanted if length in more or spec.state_bytes + length * spec.token_bytes <= most]
    if left := sorted(set(wanted) - set(lengths)):
        logger.info("positions from %d on are not compared at load: their cache would be too large", left[0])
    return lengths


def compare_far(trial: Trial, short: TrialSequence, length: int, page_size: int) -> str | None:
    """Compares the last token below the length, the first above it and, if the trial is chunked, a chunk above it.

    ``short`` is a short sequence of the trial's cache. It is in the batches too, and its keys and values fill the far
    cache. Returns by how much logits differ and where; None if they do not.
    """
    counts = [2, 1, 2] if trial.chunked else [1, 1]
    if length + 3 > comparable_context(trial.expected.model):
        counts = counts[:2]
    first = length - counts[0]
    far = _FarCache(trial, short, first, page_size, sum(counts))
    tokens = [trial.token(first + number) for number in range(sum(counts))]
    sample = short.ids[: short.computed]
    expected = trial.expected.far(sample, far.columns, far.indices(0, first), tokens, trial.chunked)
    alone = trial.expected.near(short.ids)
    compared = {}
    for end, count in zip(accumulate(counts), counts, strict=True):
        near_end = short.computed + end
        batch = Batch(
            (far.long_part(tokens[end - count : end], end), far.short_part(short.ids[near_end - count : near_end], end))
        )
        got = trial.forward(batch, far.cache).tensor
        compared[first + end - 1] = comparison = trial.new_comparison()
        comparison.add(expected[end - 1], got[0])
    comparison.add(alone[near_end - 1], got[1])
    for position, each in compared.items():
        if (difference := each.difference) is not None:
            return f"{difference} at position {position}"
    return None


class _FarCache:
    """A few pages that make a sequence of ``first`` tokens and a short one, each with room for ``more``."""

    def __init__(self, trial: Trial, short: TrialSequence, first: int, page_size: int, more: int) -> None:
        layout = trial.layout
        self._first = first
        self._size = page_size
        self._short = short
        self.columns = max(1, min([_COLUMNS, *(span - 1 for span in layout.windows if span is not None)]))
        tail = range(first // page_size, -(-(first + more) // page_size))
        self._own = {0: 0, **{entry: 1 + _MIDDLE + number for number, entry in enumerate(tail)}}
        used = 1 + _MIDDLE + len(tail)
        near = -(-(short.computed + more) // page_size)
        self._near = list(range(used, used + near))
        self._entries = tail.stop
        groups = layout.spec(page_size).groups
        self.cache = PagedCache(layout, page_size, [used + near] * len(groups), state_slots=2)
        for index, pages in self.cache.layers.items():
            if trial.cache.layers[index].keys is not None:
                self._fill(pages, trial.cache.layers[index], trial.cache.groups[pages.group])
        if self.cache.states is not None and trial.cache.states is not None:
            for slot in (0, 1):
                self.cache.states.put([slot], trial.cache.states.take([short.slot]))

    def long_part(self, tokens: Sequence[int], end: int) -> BatchSequence:
        """Returns the part of the long sequence that has ``end`` tokens more afterwards."""
        start = self._first + end - len(tokens)
        tables = (self._passed(group, start) for group in self.cache.groups)
        return BatchSequence(tokens, start, tuple(tables), state_slot=self._slot(0))

    def short_part(self, tokens: Sequence[int], end: int) -> BatchSequence:
        start = self._short.computed + end - len(tokens)
        return BatchSequence(tokens, start, (tuple(self._near),) * len(self.cache.groups), state_slot=self._slot(1))

    def indices(self, start: int, stop: int) -> torch.Tensor:
        """Returns which of the repeated keys and values are at these positions; all pages in the middle are alike."""
        return torch.arange(start, stop) % (_MIDDLE * self._size) % self.columns

    def _slot(self, slot: int) -> int:
        return -1 if self.cache.states is None else slot

    def _page(self, entry: int) -> int:
        return self._own.get(entry, 1 + entry % _MIDDLE)

    def _passed(self, group: LayerGroup, start: int) -> tuple[int, ...]:
        """Returns the long table of a group, without the pages that its window has passed."""
        passed = group.oldest_seen(start) // self._size
        return tuple(-1 if entry < passed else self._page(entry) for entry in range(self._entries))

    def _fill(self, pages: LayerPages, near: LayerPages, group: LayerGroup) -> None:
        """Writes a layer's keys and values: the short sequence's own, and copies of them as the long sequence's."""
        computed, table = self._short.computed, self._short.tables[near.group]
        oldest = next(entry for entry, page in enumerate(table) if page >= 0) * near.page_size
        keys, values = near.read(table, oldest, computed)
        self._write(pages, self._near, oldest, keys, values)
        keys, values = keys[:, -self.columns :], values[:, -self.columns :]
        for entry in sorted({0, *range(1, 1 + _MIDDLE), *self._own}):
            start, stop = entry * self._size, min(self._first, (entry + 1) * self._size)
            if start < stop:
                part = far_columns(keys, values, self.indices(start, stop), start, self._first)
                self._write(pages, {entry: self._page(entry)}, start, *part)

    def _write(
        self,
        pages: LayerPages,
        table: Mapping[int, int] | Sequence[int],
        start: int,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Stores ``[kv_heads, positions, head_dim]`` from the position ``start`` on."""
        positions = range(start, start + keys.shape[1])
        slots = [table[position // self._size] * self._size + position % self._size for position in positions]
        pages.write(keys.transpose(0, 1), values.transpose(0, 1), torch.tensor(slots, device=keys.device))


_SMALL_PAGE = 4  # so that a few tokens cross pages
# Kernels work in blocks of up to 256 keys.
_KERNEL_LENGTHS = (258,)
# Of states, so that weak ones show too.
_LARGE = -1000.0


@dataclass(frozen=True, slots=True)
class SelfCheckResult:
    """``problem`` says why the model cannot be batched, None if it can; ``chunked`` whether prefill can be chunked.

    ``specs`` describe its cache, by device.
    """

    problem: str | None
    chunked: bool = False
    way: Way = Way.PACKED
    page_size: int = CPU_PAGE_SIZE
    specs: Mapping[torch.device, CacheSpec] = field(default_factory=dict)

    @property
    def spec(self) -> CacheSpec | None:
        """The spec on all devices together; None if the model cannot be batched."""
        return in_all(self.specs.values()) if self.problem is None else None


def check_batching(
    model: transformers.PreTrainedModel,
    room: int | None = None,
    *,
    expected: ExpectedLogits | None = None,
    page_size: int = CPU_PAGE_SIZE,
) -> SelfCheckResult:
    """Returns the first way of taking a batch that gives the model's logits, in chunks or else with whole prompts.

    ``room`` is that of ``far_lengths``. Raises LoadFailed if a device has no memory left or is lost, which says nothing
    of the model.
    """
    try:
        layout = CacheLayout(model.config)
    except UnsupportedCache as error:
        return SelfCheckResult(problem=str(error))
    expected = expected or ExpectedLogits(model)
    problem: str | None = None
    for way, chunked in ((way, chunked) for way in Way for chunked in (True, False)):
        try:
            forward = ModelForward(model, way)
            trial = Trial(expected, layout, forward, _SMALL_PAGE, chunked, way is Way.MASKED_ROWS)
            problem = _problem(trial, forward, page_size, room)
        except CannotPage as error:
            problem = str(error)
            continue
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError) as error:
            raise LoadFailed(f"the check of the model at load failed: {in_a_line(error)}") from error
        except Exception as error:  # a model's code can raise any error for a cache that it does not know
            problem = in_a_line(error)
            continue
        if problem is None:
            return _passed(trial, page_size, way)
    return SelfCheckResult(problem=problem)


def check_generate(model: transformers.PreTrainedModel) -> None:
    """Runs ``generate`` as the serial engine does, for a model that cannot be batched. Raises LoadFailed if it fails.

    So an error of the check above that has nothing to do with batching ends the load, and so does NaN, which differs
    from itself.
    """
    ids = torch.ones((1, 3), dtype=torch.long, device=input_device(model))
    config = GenerationConfig(
        max_new_tokens=2, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True
    )
    try:
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    except Exception as error:
        raise LoadFailed(f"the model cannot generate: {in_a_line(error)}") from error
    if any(bool(logits.isnan().any()) for logits in found.logits):
        raise LoadFailed("the model's logits are NaN: its config does not describe its weights")


def check_forward(
    model: transformers.PreTrainedModel,
    forward: Forward,
    *,
    expected: ExpectedLogits | None = None,
    room: int | None = None,
    page_size: int = CPU_PAGE_SIZE,
    small_page: int = _SMALL_PAGE,
    chunked: bool = True,
) -> str | None:
    """Returns why ``forward`` must not replace the model's own; None if its logits are the model's.

    ``room`` is that of ``far_lengths``.
    ``small_page`` is the size of pages near the beginning, for forwards that cannot have them as small.
    """
    trial = Trial(expected or ExpectedLogits(model), CacheLayout(model.config), forward, small_page, chunked)
    differing = _differing(trial, page_size, room, _KERNEL_LENGTHS)
    return None if differing is None else f"its logits differ from the model's by {differing}"


def check_kernels(expected: ExpectedLogits, forward: Forward) -> SelfCheckResult:
    """Checks a forward that is the only fast one of its model, and so need not agree with any other in batches."""
    trial = Trial(expected, CacheLayout(expected.model.config), forward, _SMALL_PAGE, chunked=True)
    differing = _differing(trial, CPU_PAGE_SIZE, None, _KERNEL_LENGTHS)
    if differing is not None:
        return SelfCheckResult(f"its logits differ from the model's by {differing}")
    return _passed(trial, CPU_PAGE_SIZE, Way.PACKED)


def _passed(trial: Trial, page_size: int, way: Way) -> SelfCheckResult:
    specs = {device: replace(spec, page_size=page_size) for device, spec in trial.cache.specs.items()}
    return SelfCheckResult(None, trial.chunked, way, page_size, specs)


def _problem(trial: Trial, forward: ModelForward, page_size: int, room: int | None) -> str | None:
    if (differing := _differing(trial, page_size, room)) is not None:
        return f"batched logits differ from single ones by {differing}"
    return _moved(trial, forward) or _forgotten(trial, forward)


def _moved(trial: Trial, forward: ModelForward) -> str | None:
    """Says by how much logits change if the longest sequence of their batch is taken for the longest possible one.

    Such a change is small where a model only scales its attention with positions, as Llama 4 does, and rounding in half
    precision hides it from the comparison with each sequence alone. These two forwards compute the same but for it.
    """
    batch = trial.last
    more = comparable_context(trial.expected.model) - max(each.start for each in batch.sequences) - batch.tokens
    if more <= 0:
        return None
    moved, was_read = forward.tried(batch, trial.cache, more)
    if not was_read:
        return None
    comparison = Comparison(torch.float32)
    for pair in zip(forward.tried(batch, trial.cache)[0], moved, strict=True):
        comparison.add(*pair)
    difference = comparison.difference
    return None if difference is None else f"batched logits differ by {difference} beside a sequence of another length"


def _forgotten(trial: Trial, forward: ModelForward) -> str | None:
    """Says that a chunk gets the same logits whatever its states of one kind are; None if it does not.

    Some models, such as Jamba, begin a recurrence anew with each call of more than one token, and rounding in half
    precision can hide what is missing.
    """
    states = trial.cache.states
    if trial.comparison.is_exact or not trial.chunked or states is None:
        return None
    one = trial.last.sequences[0]
    chunk = replace(one, token_ids=[*one.token_ids, *one.token_ids], start=one.start - 1, state_slot=SPARE_SLOT)
    states.copy(one.state_slot, SPARE_SLOT)
    expected, _ = forward.tried(Batch((chunk,)), trial.cache)
    for kind in sorted(states.kinds):
        states.copy(one.state_slot, SPARE_SLOT)
        states.multiply(kind, SPARE_SLOT, _LARGE)
        if torch.equal(expected, forward.tried(Batch((chunk,)), trial.cache)[0]):
            return f"a chunk of a prompt does not go on from its {kind[0].replace('_', ' ')}"
    return None


def _differing(trial: Trial, page_size: int, room: int | None, lengths: Sequence[int] = ()) -> str | None:
    """Returns by how much logits differ and where."""
    difference, short = trial.run()
    if difference is None:
        for length in far_lengths(trial, room, lengths):
            if (difference := compare_far(trial, short, length, page_size)) is not None:
                break
    return difference
