"""Recorded decode steps over a device map: each stage's part replayed in its turn, while other rows are in the others.

The devices are emulated and the recorder is a tape: see ``tests.engine.emulated`` and ``tests.engine.tape``.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.cuda_graphs.graph_forward import GraphForward
from mlserver_torch_stream.engine.cuda_graphs.verify_graphs import verified
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.kv_cache.row_cache import CacheLayout
from mlserver_torch_stream.engine.pipeline.stage_locks import Pipeline, StagedForward
from mlserver_torch_stream.engine.pipeline.stages import read_stages
from tests.engine.emulated import Busy, laid_out, pipelined, together
from tests.engine.tape import TapeRecorder
from tests.engine.tiny import prompt_of, reference, run, tiny_model

REQUESTS = [(prompt_of(3 + 5 * i, i), 10 + 3 * i) for i in range(7)]


def recorded(model: PreTrainedModel, pipeline: Pipeline) -> GraphForward:
    with torch.inference_mode():
        forward = verified(model, TapeRecorder(), 4, pipeline)
    assert forward is not None
    return forward


_SLOW_STAGES = (
    pytest.param(family, stages, marks=pytest.mark.slow) for family, stages in (("llama", 2), ("mixtral", 2))
)


@pytest.mark.parametrize(("family", "stages"), [("llama", 3), ("gemma3_text", 3), *_SLOW_STAGES])
def test_the_tokens_of_one_device(family: str, stages: int) -> None:
    model = laid_out(tiny_model(family), stages)
    expected = [reference(model, *request) for request in REQUESTS]
    busy = Busy(model, 0.002)
    forward = recorded(model, busy.pipeline)
    with pipelined(model, busy.pipeline, forward=forward) as (engine, _):
        assert run(together(engine, REQUESTS)) == expected
    assert busy.most_stages == stages
    assert busy.most_in_one == 1


def test_a_head_on_the_embeddings_device_is_visited_again() -> None:
    model = laid_out(tiny_model("llama", tie_word_embeddings=True), 2, tied=True)
    expected = [reference(model, *request) for request in REQUESTS]
    pipeline = Pipeline(read_stages(model))
    forward = recorded(model, pipeline)
    first = pipeline.stages[0]
    assert [segment.stage for segment in forward._steps[0].segments].count(first) > 1
    with pipelined(model, pipeline, forward=forward) as (engine, _):
        assert run(together(engine, REQUESTS)) == expected


def test_hooks_of_a_recording_are_gone_after_it() -> None:
    model = laid_out(tiny_model("llama"), 2)
    pipeline = Pipeline(read_stages(model))

    def hooks() -> int:
        return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())

    before = hooks()
    recorded(model, pipeline)
    assert hooks() == before


def test_a_replay_takes_its_turn_in_each_stage_as_the_model_does() -> None:
    model = laid_out(tiny_model("llama"), 3)
    left: list[str] = []
    pipeline = Pipeline([replace(stage, finish=partial(left.append, stage.name)) for stage in read_stages(model)])
    forwards = ModelForward(model), recorded(model, pipeline)
    layout = CacheLayout(model.config)
    turns = []
    with torch.inference_mode():
        for forward in forwards:
            cache = layout.cache(capacity=5)
            cache.begin_row()
            forward([[1, 2, 3]], cache)
            left.clear()
            StagedForward(forward, pipeline)([[4]], cache)
            turns.append(tuple(left))
    assert turns[0] == turns[1] != ()
