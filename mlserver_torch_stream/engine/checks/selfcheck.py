"""Checks at load that each sequence gets the same logits in a batch as on its own, at near and at far positions.

The near check (``Trial``) runs batches over pages, and compares them with separate runs of each sequence. The far check
(``compare_far``) compares tokens that follow a long cached sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, TypeVar

import torch
import transformers
from transformers import GenerationConfig

from mlserver_torch_stream.engine.cache.layout import CacheLayout, UnsupportedCache
from mlserver_torch_stream.engine.cache.pages import CPU_PAGE_SIZE, Batch, CacheSpec, in_all
from mlserver_torch_stream.engine.checks.far import compare_far, far_lengths
from mlserver_torch_stream.engine.checks.harness import Check, accepted
from mlserver_torch_stream.engine.checks.logits import Comparison, ExpectedLogits
from mlserver_torch_stream.engine.checks.trial import SPARE_SLOT, Trial
from mlserver_torch_stream.engine.config_fields import comparable_context
from mlserver_torch_stream.engine.devices import input_device
from mlserver_torch_stream.engine.failures import in_a_line
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.errors import LoadFailed

SMALL_PAGE = 4  # so small that a few tokens cross pages
# Kernels work in blocks of up to 256 keys.
_KERNEL_LENGTHS = (258,)
# A factor for states that is so large that weak states are noticed too.
_LARGE = -1000.0

F = TypeVar("F", bound=Forward)


@dataclass(frozen=True, slots=True)
class SelfCheckResult:
    """The result of the check. ``problem`` says why the model cannot be batched; None means that it can be batched.

    ``chunked`` says whether prefill can be chunked. ``specs`` describe the cache on each device.
    """

    problem: str | None
    chunked: bool = False
    way: Way = Way.PACKED
    page_size: int = CPU_PAGE_SIZE
    specs: Mapping[torch.device, CacheSpec] = field(default_factory=dict)

    @property
    def spec(self) -> CacheSpec | None:
        """The cache's spec for all devices together; None if the model cannot be batched."""
        return in_all(self.specs.values()) if self.problem is None else None


@dataclass(eq=False)
class SameLogits(Check[F]):
    """Checks that a forward over pages reproduces the model's logits.

    The near check uses pages of ``small_page`` tokens; the far check uses pages of ``page_size`` tokens. ``room`` is
    passed to ``far_lengths``, and ``dtype`` is passed to ``ExpectedLogits``. ``trial`` is the newest trial.
    """

    name: ClassVar[str] = "same logits"
    expected: ExpectedLogits
    page_size: int = CPU_PAGE_SIZE
    small_page: int = SMALL_PAGE
    chunked: bool = True
    room: int | None = None
    way: Way = Way.PACKED
    rounding: str | None = None  # the format to which the weights are rounded
    dtype: str = field(init=False)
    trial: Trial = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = str(self.expected.dtype)

    def problem(self, candidate: F) -> str | None:
        differing = self._differing(candidate, _KERNEL_LENGTHS)
        return None if differing is None else f"its logits differ from the model's by {differing}"

    def _differing(self, forward: F, lengths: Sequence[int] = (), same_operations: bool = False) -> str | None:
        """Returns how much the logits differ and at which position; None if they agree.

        The compared sequences have the lengths that the config suggests, and those in ``lengths``.
        """
        layout = CacheLayout(self.expected.model.config)
        trial = self.trial = Trial(
            self.expected, layout, forward, self.small_page, self.chunked, same_operations=same_operations
        )
        difference, short = trial.run()
        far = iter(far_lengths(trial, self.room, lengths) if difference is None else ())
        while difference is None and (length := next(far, None)) is not None:
            difference = compare_far(trial, short, length, self.page_size)
        return difference

    def result(self) -> SelfCheckResult:
        """Returns what the engine needs to know about a forward that has passed."""
        specs = {device: replace(spec, page_size=self.page_size) for device, spec in self.trial.cache.specs.items()}
        return SelfCheckResult(None, self.chunked, self.way, self.page_size, specs)


class BatchedLogits(SameLogits[ModelForward]):
    """Checks that a model computes the same logits for batches in one form as for each sequence by itself."""

    name = "batched logits"

    def problem(self, candidate: ModelForward) -> str | None:
        """Raises LoadFailed if a device is out of memory or lost, because that is not the model's fault."""
        try:
            differing = self._differing(candidate, same_operations=self.way is Way.MASKED_ROWS)
            if differing is not None:
                return f"batched logits differ from single ones by {differing}"
            return _moved(self.trial, candidate) or _forgotten(self.trial, candidate)
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError) as error:
            raise LoadFailed(f"the check of the model at load failed: {in_a_line(error)}") from error


def check_batching(
    model: transformers.PreTrainedModel,
    room: int | None = None,
    *,
    expected: ExpectedLogits | None = None,
    page_size: int = CPU_PAGE_SIZE,
) -> SelfCheckResult:
    """Returns the first batch layout that reproduces the model's logits.

    Each form is tried with chunks of prompts, then with whole prompts. ``room`` is passed to ``far_lengths``. Raises
    LoadFailed as ``BatchedLogits`` does.
    """
    try:
        CacheLayout(model.config)
    except UnsupportedCache as error:
        return SelfCheckResult(problem=str(error))
    expected, reason = expected or ExpectedLogits(model), ""
    for way, chunked in ((way, chunked) for way in Way for chunked in (True, False)):
        check = BatchedLogits(expected, page_size, chunked=chunked, room=room, way=way)
        parts = "chunks of prompts" if chunked else "whole prompts"
        verdict = accepted(f"the logits of batches: {way.value}, {parts}", partial(ModelForward, model, way), check)
        if verdict.candidate is not None:
            return check.result()
        reason = verdict.reason
    return SelfCheckResult(problem=reason)


def check_generate(model: transformers.PreTrainedModel) -> None:
    """Runs ``generate`` once for a model that cannot be batched, as the serial engine would.

    Raises LoadFailed if ``generate`` fails or the logits are NaN, because then the fault has nothing to do with
    batching.
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


def _moved(trial: Trial, forward: ModelForward) -> str | None:
    """Returns how much the logits change if the model is told that the batch has a sequence of the maximum length.

    In some models, such as Llama 4, positions only scale attention, so the change is small; in half precision, rounding
    hides it when a batch is compared with each sequence alone. The two forwards that are compared here differ only in
    that length.
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
    return None if difference is None else f"batched logits change by {difference} with the length of another sequence"


def _forgotten(trial: Trial, forward: ModelForward) -> str | None:
    """Says which kind of state a chunk ignores: changing such a state changes no logits.

    Returns None if there is none. Some models, such as Jamba, restart a recurrence in each call with more than one
    token; in half precision, rounding can hide this error.
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
            return f"a chunk of a prompt ignores the {kind[0].replace('_', ' ')} of the chunk before it"
    return None
