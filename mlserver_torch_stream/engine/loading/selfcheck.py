"""Checks at load that a batch gets the logits that the model gives each of its sequences alone.

Knows no family by name: it runs the real model on a few tokens, with sequences that join and leave, and compares. Then
it does the same at the far positions that the model's config names (``far_positions``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import transformers
from transformers import GenerationConfig

from mlserver_torch_stream.engine.attention.registered import CannotPage
from mlserver_torch_stream.engine.batch import Batch
from mlserver_torch_stream.engine.devices import input_device
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.kv_cache.cache_spec import CPU_PAGE_SIZE, CacheSpec, in_all
from mlserver_torch_stream.engine.kv_cache.layout import CacheLayout, UnsupportedCache
from mlserver_torch_stream.engine.loading.comparison import Comparison, in_a_line
from mlserver_torch_stream.engine.loading.context_length import comparable_context
from mlserver_torch_stream.engine.loading.expected_logits import ExpectedLogits
from mlserver_torch_stream.engine.loading.far_positions import compare_far, far_lengths
from mlserver_torch_stream.engine.loading.trial import SPARE_SLOT, Trial
from mlserver_torch_stream.errors import LoadFailed

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

    So an error of the check above that has nothing to do with batching ends the load.
    """
    ids = torch.ones((1, 3), dtype=torch.long, device=input_device(model))
    config = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0)
    try:
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    except Exception as error:
        raise LoadFailed(f"the model cannot generate: {in_a_line(error)}") from error


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
    moved, asked = forward.tried(batch, trial.cache, more)
    if not asked:
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
