"""Checks at load that forwards which run at the same time give the logits that each gives alone.

Knows no family by name: a model's code can keep state between its layers that is not in the cache, or wait for its
device in the middle of a stage.
"""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.device_sync import count_waits
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.kv_cache.row_cache import CacheLayout
from mlserver_torch_stream.engine.loading.comparison import logits_tolerance
from mlserver_torch_stream.engine.pipeline.in_flight import InFlightForwards
from mlserver_torch_stream.engine.pipeline.stage_locks import Pipeline, StagedForward
from mlserver_torch_stream.engine.pipeline.stages import read_stages

logger = logging.getLogger(__name__)

_ROUNDS = 2
_PROMPT = 5
_STEPS = 2
# transformers looks once whether a mask hides anything, right behind the embedding.
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
    """Whether a decode step of rows of unlike lengths waits for its devices before it is through, or may do so."""
    try:
        return _decode_waits(model) > _MOST_WAITS
    except Exception as error:  # then threads do as they like, which is slower at worst
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
    """Why forwards must not overlap; None if they may. Never raises for what the model does."""
    try:
        worst, tolerance = _worst(model, StagedForward(forward or ModelForward(model), pipeline), pipeline)
    except Exception as error:  # whatever a model's code raises, one forward at a time is the answer
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if worst <= tolerance:
        return None
    return f"logits of forwards that overlap differ from single ones by {worst:.3g} standard deviations"


def _worst(model: PreTrainedModel, forward: Forward, pipeline: Pipeline) -> tuple[float, float]:
    """The largest error, and the largest that there may be; both in standard deviations of the logits."""
    layout = CacheLayout(model.config)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    trials = range(_ROUNDS * pipeline.depth)
    alone = [_logits(layout, forward, trial, vocabulary) for trial in trials]
    in_flight: InFlightForwards[int, torch.Tensor] = InFlightForwards(len(trials), pipeline.threads)
    try:
        for trial in trials:
            in_flight.launch(trial, lambda trial=trial: _logits(layout, forward, trial, vocabulary))  # type: ignore[misc]
        errors = []
        while in_flight:
            errors += [logits_error(alone[trial], future.result()) for trial, future in in_flight.completed()]
    finally:
        in_flight.close()
    return max(errors), logits_tolerance(alone[0].dtype)


def _logits(layout: CacheLayout, forward: Forward, trial: int, vocabulary: int) -> torch.Tensor:
    """Of a prompt of this trial's own length and of each token after it."""
    cache = layout.cache(capacity=_PROMPT + trial + _STEPS)
    cache.begin_row()
    ids = [(7919 * (trial + 1) + 31 * position) % vocabulary for position in range(_PROMPT + trial + _STEPS)]
    chunks = [ids[: _PROMPT + trial], *([token] for token in ids[_PROMPT + trial :])]
    return torch.cat([forward([chunk], cache) for chunk in chunks])


def logits_error(expected: torch.Tensor, got: torch.Tensor) -> float:
    """The largest, in standard deviations of those expected."""
    error = ((got.float() - expected.float()).abs().max() / expected.float().std()).item()
    return error if error == error else float("inf")
