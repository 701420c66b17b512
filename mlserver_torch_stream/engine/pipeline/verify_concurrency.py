"""Checks at load that forwards which run at the same time give the logits that each gives alone.

Knows no family by name: a model's code can keep state between its layers that is not in the cache, or wait for its
device in the middle of a stage.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.device_sync import count_waits
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.kv_cache.row_cache import CacheLayout
from mlserver_torch_stream.engine.loading.comparison import Comparison, in_deviations
from mlserver_torch_stream.engine.pipeline.in_flight import InFlightForwards
from mlserver_torch_stream.engine.pipeline.stage_locks import Pipeline, StagedForward
from mlserver_torch_stream.engine.pipeline.stages import read_stages

logger = logging.getLogger(__name__)

_ROUNDS = 2
_PROMPT = 5
_STEPS = 2
# transformers tests once, right after the embedding, whether a mask hides anything.
_MOST_WAITS = 1


def take_pipeline(model: PreTrainedModel, threads: int) -> Pipeline | None:
    """Returns None if one device computes everything, or if forwards must not overlap; a warning gives the reason."""
    stages = read_stages(model)
    if len(stages) < 2:
        return None
    pipeline = Pipeline(stages, threads, serial_python=not waits_midway(model))
    problem = check_pipeline(model, pipeline)
    if problem is None:
        return pipeline
    logger.warning("the devices work one after another: %s", problem)
    return None


def waits_midway(model: PreTrainedModel) -> bool:
    """Whether a decode step of rows of unlike lengths waits for its devices before its end. True if unknown."""
    try:
        return _decode_waits(model) > _MOST_WAITS
    except Exception as error:  # then threads run Python at the same time, which is slower at worst
        logger.info("whether this model waits for its devices midway is not known: %s", error)
        return True


def _decode_waits(model: PreTrainedModel) -> int:
    layout, forward = CacheLayout(model.config), ModelForward(model)
    batch = layout.cache(2, _PROMPT + _STEPS)
    for length in (_PROMPT - 1, _PROMPT):
        cache = layout.cache(capacity=length)
        cache.begin_row()
        forward([[0] * length], cache)
        batch.join(cache)
    return count_waits(lambda: forward([[0], [0]], batch))


def check_pipeline(model: PreTrainedModel, pipeline: Pipeline, forward: Forward | None = None) -> str | None:
    """Returns why forwards must not overlap, which includes any error of the model; None if they may."""
    try:
        error = _compare(model, StagedForward(forward or ModelForward(model), pipeline), pipeline).error
    except Exception as failure:  # a model's code can raise any error
        return f"{type(failure).__name__}: {failure}".splitlines()[0]
    return (
        None if error is None else f"logits of forwards that overlap differ from single ones by {in_deviations(error)}"
    )


def _compare(model: PreTrainedModel, forward: Forward, pipeline: Pipeline) -> Comparison:
    """Compares forwards that run at the same time with the same forwards, one after the other."""
    layout = CacheLayout(model.config)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    trials = range(_ROUNDS * pipeline.depth)
    alone = [_logits(layout, forward, trial, vocabulary) for trial in trials]
    in_flight: InFlightForwards[int, torch.Tensor] = InFlightForwards(len(trials), pipeline.threads)
    comparison = Comparison()
    try:
        for trial in trials:
            in_flight.launch(trial, partial(_logits, layout, forward, trial, vocabulary))
        while in_flight:
            for trial, future in in_flight.completed():
                comparison.add(alone[trial], future.result())
    finally:
        in_flight.close()
    return comparison


def _logits(layout: CacheLayout, forward: Forward, trial: int, vocabulary: int) -> torch.Tensor:
    """Returns the logits at the end of a prompt, of this trial's own length, and of each token after it."""
    cache = layout.cache(capacity=_PROMPT + trial + _STEPS)
    cache.begin_row()
    ids = [(7919 * (trial + 1) + 31 * position) % vocabulary for position in range(_PROMPT + trial + _STEPS)]
    chunks = [ids[: _PROMPT + trial], *([token] for token in ids[_PROMPT + trial :])]
    return torch.cat([forward([chunk], cache) for chunk in chunks])
