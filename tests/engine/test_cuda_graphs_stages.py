"""Recorded decode steps over a device map: one part for each stage, replayed in its turn beside other steps.

The devices are emulated and the recorder is a tape: see ``tests.engine.emulated`` and ``tests.engine.tape``.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.batch import Batch
from mlserver_torch_stream.engine.cuda_graphs.graph_forward import GraphForward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.pipeline.stages import Pipeline, Stage, StagedForward, read_stages
from tests.engine.emulated import Busy, laid_out
from tests.engine.graph_bench import Answers, cache_of, captured, decode_batch, filled
from tests.engine.tape import TapeRecorder
from tests.engine.tiny_models import prompt_of, reference, tiny_model

REQUESTS = [(prompt_of(3 + 5 * i, i), 8 + 3 * i) for i in range(4)]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def recorded(model: PreTrainedModel, pipeline: Pipeline) -> GraphForward:
    forward = captured(model, TapeRecorder(), pipeline=pipeline)
    assert forward is not None
    return forward


@pytest.mark.parametrize(
    ("family", "stages"),
    [("gemma3_text", 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("llama", 3), ("mixtral", 2)))],
)
def test_the_tokens_of_one_device(family: str, stages: int) -> None:
    model = laid_out(tiny_model(family), stages)
    expected = [reference(model, *request) for request in REQUESTS]
    pipeline = Pipeline(read_stages(model))
    forward = recorded(model, pipeline)
    assert all({each.stage for each in step.segments} == set(pipeline.stages) for step in forward._steps)
    assert Answers(forward.cache, REQUESTS).run(StagedForward(forward, pipeline)) == expected


def test_a_head_on_the_embeddings_device_is_visited_again() -> None:
    model = laid_out(tiny_model("llama", tie_word_embeddings=True), 2, tied=True)
    expected = [reference(model, *request) for request in REQUESTS]
    pipeline = Pipeline(read_stages(model))
    forward = recorded(model, pipeline)
    first = pipeline.stages[0]
    assert [segment.stage for segment in forward._steps[0].segments].count(first) > 1
    assert Answers(forward.cache, REQUESTS).run(StagedForward(forward, pipeline)) == expected


def test_steps_in_different_stages_do_not_see_each_others_numbers() -> None:
    model = laid_out(tiny_model("llama"), 3)
    busy = Busy(model, 0.01)
    forward = recorded(model, busy.pipeline)
    staged = StagedForward(forward, busy.pipeline)
    filled(forward.cache)
    starts = ([5, 9, 2, 4], [1, 7, 8, 3], [11, 2, 2, 6])
    full = decode_batch(forward.cache, [each for part in starts for each in part]).sequences
    batches = [Batch(full[4 * i : 4 * i + 4]) for i in range(3)]
    expected = [forward.forward(batch, forward.cache).tensor for batch in batches]
    found: dict[int, list[torch.Tensor]] = {}

    def run(number: int) -> None:
        with torch.inference_mode():
            found[number] = [staged(batches[number], forward.cache).tensor for _ in range(5)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, logits in enumerate(expected):
        for got in found[number]:
            torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-4)
    assert busy.most_stages > 1
    assert busy.most_in_one == 1


def test_a_recording_does_not_follow_forwards_of_other_threads() -> None:
    """Engines share weights: one may decode while another records."""
    model = laid_out(tiny_model("llama"), 2)
    pipeline, batches = Pipeline(read_stages(model)), []

    def other(*_: object) -> None:
        def run() -> None:
            with torch.inference_mode():
                cache = cache_of(model)
                batches.append(ModelForward(model)(decode_batch(cache, [3]), cache))

        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=run)
            thread.start()
            thread.join(60)

    def visits(forward: GraphForward) -> list[list[Stage | None]]:
        return [[segment.stage for segment in step.segments] for step in forward._steps]

    undisturbed = visits(recorded(model, pipeline))
    hook = model.model.layers[1].register_forward_hook(other)
    forward = recorded(model, pipeline)
    hook.remove()
    assert batches
    assert visits(forward) == undisturbed
    expected = [reference(model, *request) for request in REQUESTS]
    assert Answers(forward.cache, REQUESTS).run(StagedForward(forward, pipeline)) == expected


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
    forward = recorded(model, pipeline)
    batch = decode_batch(forward.cache, [5, 9])
    turns = []
    for each in (forward.forward, forward):
        left.clear()
        StagedForward(each, pipeline)(batch, forward.cache)
        turns.append(tuple(left))
    assert turns[0] == turns[1] != ()
