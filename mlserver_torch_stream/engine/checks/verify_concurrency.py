"""Checks at load that forwards which run at the same time give the logits that each gives alone."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from functools import partial

import torch
import transformers

from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.comparison import Comparison
from mlserver_torch_stream.engine.devices import count_waits
from mlserver_torch_stream.engine.failures import in_a_line
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.pipeline.in_flight import InFlightForwards
from mlserver_torch_stream.engine.pipeline.stages import Pipeline, StagedForward, read_stages

logger = logging.getLogger(__name__)

_ROUNDS = 2
_PROMPT = 5
_STEPS = 2
_PAGE_SIZE = 16
# transformers tests once, right after the embedding, whether a mask hides anything.
_MAX_WAITS = 1


def take_pipeline(model: transformers.PreTrainedModel, threads: int, forward: Forward) -> Pipeline | None:
    """Returns None if one device computes everything, or if forwards must not overlap; a warning gives the reason.

    ``forward`` is the model's, in the way that the check at load has found.
    """
    stages = read_stages(model)
    if len(stages) < 2:
        return None
    pipeline = Pipeline(stages, threads, serial_python=not waits_midway(model, forward))
    problem = check_pipeline(model, pipeline, forward)
    if problem is None:
        return pipeline
    logger.warning("the devices of the map work one after another: %s", problem)
    return None


def waits_midway(model: transformers.PreTrainedModel, forward: Forward) -> bool:
    """Whether a decode step of sequences of unlike lengths waits for its devices before its end. True if unknown."""
    try:
        return _decode_waits(model, forward) > _MAX_WAITS
    except Exception as error:  # then threads run Python at the same time, which is slower at worst
        logger.info("cannot find out whether this model's forward waits for its devices: %s", error)
        return True


def _decode_waits(model: transformers.PreTrainedModel, forward: Forward) -> int:
    trials = _Trials(model, forward, 2)
    for trial in range(2):
        forward(Batch((trials.sequence(trial, 0, _PROMPT + trial),)), trials.cache)
    step = Batch(tuple(trials.sequence(trial, _PROMPT + trial, 1) for trial in range(2)))
    return count_waits(lambda: forward(step, trials.cache))


def check_pipeline(
    model: transformers.PreTrainedModel, pipeline: Pipeline, forward: Forward, cache: PagedCache | None = None
) -> str | None:
    """Returns why forwards must not overlap, which includes any error of the model; None if they may.

    They overlap in ``cache``, which holds no sequences; None: in one that is made for it.
    """
    try:
        by = _compare(model, StagedForward(forward, pipeline), pipeline, cache).difference
    except Exception as error:  # a model's code can raise any error
        return in_a_line(error)
    return None if by is None else f"logits of forwards that overlap differ from single ones by {by}"


def _compare(
    model: transformers.PreTrainedModel, forward: Forward, pipeline: Pipeline, cache: PagedCache | None
) -> Comparison:
    """Compares forwards that run at the same time with the same forwards, one after the other and in another cache."""
    count = _ROUNDS * pipeline.depth
    alone, overlapping = _Trials(model, forward, count), _Trials(model, forward, count, cache)
    count = min(count, overlapping.room)
    expected = [alone.logits(trial) for trial in range(count)]
    size = overlapping.cache.page_size
    in_flight: InFlightForwards[int, torch.Tensor] = InFlightForwards(count, pipeline.threads, size)
    comparison = Comparison()
    try:
        for trial in range(count):
            whole = Batch((overlapping.sequence(trial, 0, overlapping.length(trial)),))
            in_flight.launch(trial, partial(overlapping.logits, trial), whole)
        while in_flight:
            for trial, future in in_flight.completed():
                comparison.add(expected[trial], future.result())
    finally:
        in_flight.close()
    return comparison


class _Trials:
    """Sequences of different lengths over one cache; each has its own pages and slot."""

    def __init__(
        self, model: transformers.PreTrainedModel, forward: Forward, count: int, cache: PagedCache | None = None
    ) -> None:
        self._forward = forward
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        layout = CacheLayout(model.config)
        self._size = _PAGE_SIZE if cache is None else cache.page_size
        self._pages = -(-self.length(count - 1) // self._size)  # of a sequence
        self._groups = len(layout.spec(self._size).groups)
        self.cache = cache or PagedCache(layout, self._size, [count * self._pages] * self._groups, count)

    @property
    def room(self) -> int:
        """How many sequences have pages of their own."""
        return min((layer.pages // self._pages for layer in self.cache.layers.values()), default=sys.maxsize)

    def length(self, trial: int) -> int:
        return _PROMPT + trial + _STEPS

    def sequence(self, trial: int, start: int, count: int) -> BatchSequence:
        ids = [(7919 * (trial + 1) + 31 * position) % self._vocabulary for position in range(start, start + count)]
        table = range(trial * self._pages, (trial + 1) * self._pages)
        pages = table[: -(-(start + count) // self._size)]
        return BatchSequence(ids, start, (pages,) * self._groups, state_slot=trial)

    def logits(self, trial: int) -> torch.Tensor:
        """Returns the logits at the end of a prompt and of each token after it."""
        return torch.cat([self._forward(Batch((part,)), self.cache).tensor for part in self._parts(trial)])

    def _parts(self, trial: int) -> Iterator[BatchSequence]:
        yield self.sequence(trial, 0, _PROMPT + trial)
        for step in range(_STEPS):
            yield self.sequence(trial, _PROMPT + trial + step, 1)
