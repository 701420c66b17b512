"""Checks at load that a batch gets the logits that the model gives each of its sequences alone.

Knows no family by name: it runs the real model on a few tokens, with sequences that join and leave, and compares. Then
it does the same at the far positions that the model's config names (``far_positions``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import GenerationConfig, PreTrainedModel

from mlserver_torch_stream.engine.attention.registered import CannotPage
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward, Way, input_device
from mlserver_torch_stream.engine.kv_cache.bytes_per_token import in_all, specs_by_device
from mlserver_torch_stream.engine.kv_cache.cache_spec import CacheSpec
from mlserver_torch_stream.engine.kv_cache.layout import CacheLayout, UnsupportedCache
from mlserver_torch_stream.engine.kv_cache.page_size import CPU_PAGE_SIZE
from mlserver_torch_stream.engine.loading.comparison import Comparison, ErrorOf, in_deviations
from mlserver_torch_stream.engine.loading.context_length import comparable_context
from mlserver_torch_stream.engine.loading.expected_logits import ExpectedLogits
from mlserver_torch_stream.engine.loading.far_positions import compare_far, far_lengths
from mlserver_torch_stream.engine.loading.trial import AFTER, LONGEST, Trial
from mlserver_torch_stream.errors import LoadFailed

_SMALL_PAGE = 4  # so that a few tokens cross pages
_SHORTEST = 9  # of the long prompt, in a context that is smaller
# Kernels work in blocks of up to 256 keys.
_KERNEL_LENGTHS = (258,)


@dataclass(frozen=True, slots=True)
class SelfCheckResult:
    """``problem`` says why the model cannot be batched, None if it can; ``chunked`` whether prefill can be chunked.

    ``specs`` are those of its cache, by device.
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
    model: PreTrainedModel,
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
    problem = None
    for way, chunked in ((way, chunked) for way in Way for chunked in (True, False)):
        try:
            trial = _trial(expected, layout, ModelForward(model, way), _SMALL_PAGE, chunked)
            error_of = _same_operations if way is Way.MASKED_ROWS else _other_operations
            differing = _differing(trial, page_size, error_of, room)
        except CannotPage as error:
            problem = str(error)
            continue
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError) as error:
            raise LoadFailed(f"the check of the model at load failed: {_in_a_line(error)}") from error
        except Exception as error:  # a model's code can raise any error for a cache that it does not know
            problem = _in_a_line(error)
            continue
        if differing is None:
            specs = specs_by_device(trial.cache)
            real = {device: replace(spec, page_size=page_size) for device, spec in specs.items()}
            return SelfCheckResult(None, chunked, way, page_size, real)
        problem = f"batched logits differ from single ones by {differing}"
    return SelfCheckResult(problem=problem)


def check_generate(model: PreTrainedModel) -> None:
    """Runs ``generate`` as the serial engine does, for a model that cannot be batched. Raises LoadFailed if it fails.

    So an error of the check above that has nothing to do with batching ends the load.
    """
    ids = torch.ones((1, 3), dtype=torch.long, device=input_device(model))
    config = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0)
    try:
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    except Exception as error:
        raise LoadFailed(f"the model cannot generate: {_in_a_line(error)}") from error


def check_forward(
    model: PreTrainedModel,
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
    trial = _trial(expected or ExpectedLogits(model), CacheLayout(model.config), forward, small_page, chunked)
    differing = _differing(trial, page_size, _other_operations, room, _KERNEL_LENGTHS)
    return None if differing is None else f"its logits differ from the model's by {differing}"


def check_kernels(expected: ExpectedLogits, forward: Forward) -> SelfCheckResult:
    """Checks a forward that is the only fast one of its model, and so need not agree with any other in batches."""
    trial = _trial(expected, CacheLayout(expected.model.config), forward, _SMALL_PAGE, chunked=True)
    differing = _differing(trial, CPU_PAGE_SIZE, _other_operations, None, _KERNEL_LENGTHS)
    if differing is not None:
        return SelfCheckResult(f"its logits differ from the model's by {differing}")
    specs = specs_by_device(trial.cache)
    return SelfCheckResult(
        None, specs={device: replace(spec, page_size=CPU_PAGE_SIZE) for device, spec in specs.items()}, chunked=True
    )


def _same_operations(comparison: Comparison) -> float | None:
    return comparison.error


def _other_operations(comparison: Comparison) -> float | None:
    return comparison.error_of_kernels


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _trial(expected: ExpectedLogits, layout: CacheLayout, forward: Forward, page_size: int, chunked: bool) -> Trial:
    longest = max(_SHORTEST, min(LONGEST, comparable_context(expected.model) - AFTER))
    return Trial(expected, layout, forward, page_size, longest, chunked)


def _differing(
    trial: Trial, page_size: int, error_of: ErrorOf, room: int | None, lengths: Sequence[int] = ()
) -> str | None:
    """Returns by how much logits differ and where."""
    error, short = trial.run(error_of)
    if error is not None:
        return in_deviations(error)
    specs = specs_by_device(trial.cache)
    for length in far_lengths(trial.expected.model, trial.layout, specs, trial.longest, room, lengths):
        for position, comparison in compare_far(trial, short, length, page_size).items():
            if (error := error_of(comparison)) is not None:
                return f"{in_deviations(error)} at position {position}"
    return None
