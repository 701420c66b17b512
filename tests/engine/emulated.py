"""Emulated devices: a device map that names several devices although all layers are on the CPU, and engines over it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest, Mailbox
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.forward.interface import Forward, Logits
from mlserver_torch_stream.engine.pipeline.in_flight import InFlightForwards
from mlserver_torch_stream.engine.pipeline.stages import Pipeline, read_stages
from mlserver_torch_stream.engine.step.continuous import ContinuousBatcher
from tests.engine.tiny import collect, greedy, prompt_of, running

LONG = 10_000  # tokens, which take many seconds: no answer of them ends while a test waits for something else
_MEET_S = 30.0  # far longer than forwards of tiny models need to reach their stages


def laid_out(model: PreTrainedModel, stages: int, tied: bool = False, in_order: bool = False) -> PreTrainedModel:
    """Returns the model with its layers mapped to ``stages`` devices; a tied head is on the device of the embedding.

    The rotary embedding, which a forward computes before the first layer, is on the last device; with ``in_order`` it
    is on the first one, so that a forward visits the stages in their order.
    """
    count = len(model.model.layers)
    places = {f"model.layers.{index}": index * stages // count for index in range(count)}
    rest = {name: stages - 1 for name, _ in model.model.named_children() if name not in ("layers", "embed_tokens")}
    rest |= {"rotary_emb": 0} if in_order else {}
    last = {"lm_head": 0 if tied else stages - 1}
    model.hf_device_map = {"model.embed_tokens": 0, **places, **{f"model.{name}": at for name, at in rest.items()}}
    model.hf_device_map |= last
    return model


class Busy:
    """Records how many stages compute at the same time. The model must be laid out with ``in_order``.

    The first forwards meet: the first one waits in the last stage, the second one in the stage before it, and so on,
    until all stages are occupied. For that, one forward for each stage has to be in flight. A sleep stands for the work
    of a device, as it needs no core.
    """

    def __init__(self, model: PreTrainedModel, seconds: float) -> None:
        self._changed = threading.Condition()
        self._inside: dict[str, int] = {}
        self._seconds = seconds
        self.most_stages = 0
        self.most_in_one = 0
        stages = read_stages(model)
        self._until_it_waits = {stage.name: len(stages) - place for place, stage in enumerate(stages)}
        self.pipeline = Pipeline([replace(stage, finish=partial(self._work, stage.name)) for stage in stages])

    def _work(self, name: str) -> None:
        with self._changed:
            self._inside[name] = self._inside.get(name, 0) + 1
            self.most_stages = max(self.most_stages, sum(map(bool, self._inside.values())))
            self.most_in_one = max(self.most_in_one, *self._inside.values())
            self._changed.notify_all()
            self._until_it_waits[name] -= 1
            if self._until_it_waits[name] == 0:
                self._changed.wait_for(lambda: self.most_stages == len(self._until_it_waits), _MEET_S)
        time.sleep(self._seconds)
        with self._changed:
            self._inside[name] -= 1


class InLaunchOrder(InFlightForwards[Any, Any]):
    """Completes forwards in the order of their launch, so that the schedule does not depend on how long each takes."""

    def completed(self) -> list[tuple[Any, Future[Any]]]:
        key, forward = next(iter(self._away.items()))
        forward.exception()  # waits for it
        del self._away[key]
        self._ahead.remove(key)
        return [(key, forward)]


@contextmanager
def pipelined(
    model: PreTrainedModel, pipeline: Pipeline | None = None, step_timeout: float | None = None, **options: Any
) -> Iterator[tuple[EngineCore, Pipeline]]:
    """An engine with batches in several stages at the same time. ``options`` are those of ``batcher_over``."""
    pipeline = pipeline or Pipeline(read_stages(model))
    with running(model, pipeline=pipeline, step_timeout=step_timeout, **options) as engine:
        yield engine, pipeline


async def together(engine: EngineCore, requests: list[tuple[tuple[int, ...], int]]) -> list[list[int]]:
    """Submits all requests at once, so that the first steps are launched with all of them in the queue."""
    asked = [EngineRequest(prompt, greedy(count), index) for index, (prompt, count) in enumerate(requests)]
    events = await collect(engine, asked)
    assert [event.error for event in events.values()] == [None] * len(requests)
    return [list(events[index].token_ids) for index in range(len(requests))]


def before_each_forward(engine: EngineCore, act: Callable[[Batch], None]) -> None:
    """Calls ``act`` with the batch before each forward of a continuous batcher, in the forward's thread."""
    batcher = engine._batcher
    assert isinstance(batcher, ContinuousBatcher)
    forward: Forward = batcher._forward

    def acted(batch: Batch, cache: PagedCache) -> Logits:
        act(batch)
        return forward(batch, cache)

    batcher._forward = acted


def decodes_alone(batch: Batch) -> bool:
    """Returns whether each sequence of the batch has one token, so that the batch has no part of a prompt."""
    return all(each.count == 1 for each in batch.sequences)


async def decoding(engine: EngineCore, count: int) -> list[Mailbox]:
    """Starts streams that end only when they are closed, and returns them when each has its first token."""
    streams = [engine.submit([EngineRequest(prompt_of(3, i), greedy(LONG))]) for i in range(count)]
    for each in streams:
        await anext(each)
    return streams
