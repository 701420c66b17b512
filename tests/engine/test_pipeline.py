"""Layers on several devices: several batches in flight, the same tokens as on one device, and every way to end.

The devices are emulated: the device map names several, but all layers are on the CPU. The stages are real: each is a
part of the model that admits one forward at a time.
"""

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest, Mailbox
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch
from mlserver_torch_stream.engine.checks.overlap import Overlap, take_pipeline, waits_midway
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.pipeline.stages import Pipeline, read_stages
from mlserver_torch_stream.engine.step.continuous import ContinuousBatcher
from mlserver_torch_stream.types import FinishReason, TokenEvent
from tests.engine.emulated import (
    LONG,
    Busy,
    InLaunchOrder,
    before_each_forward,
    decodes_alone,
    decoding,
    laid_out,
    pipelined,
    together,
)
from tests.engine.tiny import (
    VOCAB,
    Watch,
    collect,
    greedy,
    idle,
    one_by_one,
    prompt_of,
    reference,
    run,
    running,
    tiny_model,
    tokens_of,
    until,
    watched,
)

REQUESTS = [(prompt_of(3 + 5 * i, i), 10 + 3 * i) for i in range(7)]


@pytest.mark.parametrize(
    "family",
    [
        "gemma3_text",
        pytest.param("lfm2", marks=pytest.mark.long),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("llama", "mixtral", "qwen3_next")),
    ],
)
def test_the_tokens_of_one_device(family: str) -> None:
    model = laid_out(tiny_model(family), 3)
    expected = [reference(model, prompt, count) for prompt, count in REQUESTS]
    with pipelined(model) as (engine, _):
        assert run(together(engine, REQUESTS)) == expected


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_all_stages_work_at_once_and_each_on_one_batch(stages: int) -> None:
    model = laid_out(tiny_model("llama", num_hidden_layers=4), stages, in_order=True)
    requests = [(prompt_of(5, i), 30) for i in range(2 * stages)]
    expected = [reference(model, prompt, count) for prompt, count in requests]
    busy = Busy(model, 0.004)
    with pipelined(model, busy.pipeline) as (engine, _):
        assert run(together(engine, requests)) == expected
    assert busy.most_stages == stages
    assert busy.most_in_one == 1


@pytest.mark.long
def test_where_a_models_code_waits_for_its_device_the_other_stages_go_on() -> None:
    model = laid_out(tiny_model("llama"), 2, in_order=True)
    requests = [(prompt_of(5, i), 30) for i in range(2)]
    expected = [reference(model, *request) for request in requests]
    with torch.inference_mode():
        assert not waits_midway(model, ModelForward(model))
    first, last = model.model.layers[0], model.model.layers[-1]
    meeting = threading.Barrier(2)
    to_come = {first: 0, last: 0}  # calls until the layer waits for the other one
    met: list[torch.nn.Module] = []

    def wait(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        output.sum().item()
        to_come[module] -= 1
        if to_come[module] == 0:
            meeting.wait(30)
            met.append(module)

    first.register_forward_hook(wait)
    last.register_forward_hook(wait)
    with torch.inference_mode():
        assert waits_midway(model, ModelForward(model))
        pipeline = take_pipeline(model, 1, ModelForward(model))
    assert pipeline is not None
    with pipelined(model, pipeline) as (engine, _):
        to_come.update({first: 2, last: 1})  # the first batch is in the last layer when the second is in the first
        assert run(together(engine, requests)) == expected
    assert set(met) == {first, last}


@pytest.mark.long
def test_who_is_in_no_stage_yet_holds_up_nobody() -> None:
    """Copying inputs to the first device has to wait for the rows that this device is computing."""
    model = laid_out(tiny_model("llama"), 2)
    pipeline = Pipeline(read_stages(model))
    expected = [reference(model, *request) for request in REQUESTS]
    reached, gate = threading.Event(), threading.Event()

    def waits() -> None:
        reached.set()
        gate.wait(40)

    outside = threading.Thread(target=pipeline.run, args=(waits,))
    outside.start()
    try:
        assert reached.wait(30)
        with pipelined(model, pipeline) as (engine, _):
            assert run(together(engine, REQUESTS)) == expected
            assert outside.is_alive()
    finally:
        gate.set()
        outside.join()


@pytest.mark.long
def test_a_head_on_the_embeddings_device_is_entered_a_second_time() -> None:
    model = laid_out(tiny_model("llama", tie_word_embeddings=True), 2, tied=True, in_order=True)
    expected = [reference(model, prompt, count) for prompt, count in REQUESTS]
    busy = Busy(model, 0.001)
    with pipelined(model, busy.pipeline) as (engine, _):
        assert run(together(engine, REQUESTS)) == expected
    assert busy.most_in_one == 1 and busy.most_stages == 2


def test_sequences_are_spread_over_as_many_batches_as_there_are_stages() -> None:
    model = laid_out(tiny_model("llama"), 3)

    async def scenario(engine: EngineCore, watch: Watch) -> list[int]:
        streams = [engine.submit([EngineRequest(prompt_of(5, i), greedy(LONG))]) for i in range(6)]
        await until(lambda: engine.stats().running_sequences == 6, "six sequences")
        seen = len(watch.calls) + 12  # those that began before have landed
        await until(lambda: len(watch.calls) > seen + 12, "some steps")
        sizes = [len(call) for call in watch.calls[seen : seen + 12]]
        for stream in streams:
            stream.close()
        await until(lambda: idle(engine), "an idle engine")
        return sizes

    with watched(model) as watch, pipelined(model, context=2 * LONG) as (engine, _):
        assert run(scenario(engine, watch)) == [2] * 12


def test_prompts_are_prefilled_side_by_side() -> None:
    model = laid_out(tiny_model("llama"), 3, in_order=True)
    busy = Busy(model, 0.004)
    with pipelined(model, busy.pipeline, prefill_tokens=8) as (engine, _):
        requests = [(prompt_of(40, i), 1) for i in range(3)]  # one token each: nothing is ever decoded
        assert run(together(engine, requests)) == [reference(model, *request) for request in requests]
        assert engine.stats().decode_steps == 0
    assert busy.most_stages == 3


@pytest.mark.long
def test_who_leaves_frees_the_place_and_hurts_nobody() -> None:
    model = laid_out(tiny_model("llama"), 3)
    stays = [(prompt_of(6, i), 40) for i in range(3)]
    expected = [reference(model, prompt, count) for prompt, count in stays]

    async def scenario(engine: EngineCore) -> None:
        sequences = asyncio.create_task(together(engine, stays))
        for round_ in range(8):
            leaving = [engine.submit([EngineRequest(prompt_of(9, 10 + round_ + i), greedy(LONG))]) for i in range(2)]
            for stream in leaving:
                if round_ % 2:  # else while they are prefilled
                    await anext(stream)
            for stream in leaving:
                stream.close()
            await asyncio.sleep(0.002)
        assert await sequences == expected
        await until(lambda: idle(engine), "an idle engine")
        assert engine.stats().cancelled_sequences >= 8  # those closed before they were taken in count as never come

    with pipelined(model, prefill_tokens=3, context=2 * LONG) as (engine, _):
        run(scenario(engine))


def test_several_answers_to_a_prompt_and_a_prompt_again() -> None:
    model = laid_out(tiny_model("llama"), 2)
    prompt = prompt_of(30)
    expected = reference(model, prompt, 12)

    async def scenario(engine: EngineCore) -> None:
        events = await collect(engine, [EngineRequest(prompt, greedy(12, n=3))])
        assert [list(events[index].token_ids) for index in range(3)] == [expected] * 3
        assert await tokens_of(engine, prompt, greedy(12)) == expected
        assert engine.stats().prefix_cache_hit_tokens == 28  # full pages

    with pipelined(model, prefix_bytes=2**20) as (engine, _):
        run(scenario(engine))


def test_prompts_with_the_same_beginning_compute_it_once() -> None:
    """This holds even while the batch of the first prompt is in flight."""
    model = laid_out(tiny_model("llama"), 3)
    requests = [((*prompt_of(24), number), 12) for number in range(4)]
    expected = [reference(model, *request) for request in requests]

    async def scenario(engine: EngineCore) -> None:
        assert await together(engine, requests) == expected
        assert engine.stats().prefix_cache_hit_tokens >= 24

    with pipelined(model, prefix_bytes=2**20, prefill_tokens=8) as (engine, _):
        run(scenario(engine))


@pytest.mark.parametrize("spoiled", [False, True], ids=["written", "full of NaN"])
def test_a_request_that_is_cancelled_in_flight_leaves_the_pages_it_writes_to_a_request_that_shares_them(
    spoiled: bool,
) -> None:
    """If the first request's logits are NaN, its pages may be, too, so the second computes its whole prompt."""
    model = laid_out(tiny_model("llama"), 3)
    first, second = prompt_of(24), (*prompt_of(24), 5, 6)
    expected = reference(model, second, 12)
    gate = threading.Event()

    def hold(forward: Forward) -> Forward:
        """Holds the prompts before any stage.

        Three sequences decode beside them, one of them in a batch without a prompt.
        """

        def held(batch: Batch, cache: PagedCache) -> Any:
            if any(each.count == len(first) for each in batch.sequences):
                assert gate.wait(30)
            time.sleep(0.005)
            logits = forward(batch, cache)
            for row, each in enumerate(batch.sequences if spoiled else ()):
                if each.count == len(first):
                    logits.tensor[row] = torch.nan
                    for layer in cache.layers.values():
                        assert layer.values is not None
                        layer.values[list(each.tables[layer.group])] = torch.nan
            return logits

        return held

    async def scenario(engine: EngineCore) -> None:
        beside = await decoding(engine, 3)
        cancelled = engine.submit([EngineRequest(first, greedy(12))])
        await until(lambda: engine.stats().prefilling_requests == 1, "the first prompt in flight")
        shares = asyncio.create_task(tokens_of(engine, second, greedy(12)))
        await until(lambda: engine.stats().prefilling_requests == 2, "both prompts in flight")
        cancelled.close()
        await until(lambda: engine.stats().cancelled_sequences == 1, "the end of the first")
        gate.set()
        assert await shares == expected
        hits = engine.stats().prefix_cache_hit_tokens
        assert hits == (0 if spoiled else len(first)), "the second request begins anew only if it has to"
        for each in beside:
            each.close()

    with pipelined(model, prefix_bytes=2**20, prefill_tokens=32, context=2 * LONG) as (engine, _):
        batcher = engine._batcher
        assert isinstance(batcher, ContinuousBatcher)
        batcher._forward = hold(batcher._forward)
        try:
            run(scenario(engine))
        finally:
            gate.set()


def test_a_prompt_that_is_cancelled_with_a_chunk_in_flight_hurts_nobody() -> None:
    """No row of logits belongs to such a chunk."""
    model = laid_out(tiny_model("llama"), 3)
    expected = reference(model, prompt_of(24), 12)
    gate = threading.Event()

    def hold(batch: Batch) -> None:
        assert decodes_alone(batch) or gate.wait(30)

    async def scenario(engine: EngineCore) -> None:
        beside = await decoding(engine, 3)
        before_each_forward(engine, hold)
        stream = engine.submit([EngineRequest(prompt_of(24), greedy(12))])
        await until(lambda: engine.stats().prefilling_requests == 1, "a chunk in flight")
        stream.close()
        await until(lambda: engine.stats().cancelled_sequences == 1, "its end")
        gate.set()
        assert await tokens_of(engine, prompt_of(24), greedy(12)) == expected
        for each in beside:
            each.close()

    with pipelined(model, prefix_bytes=2**20, prefill_tokens=8, context=2 * LONG) as (engine, _):
        try:
            run(scenario(engine))
        finally:
            gate.set()


def bytes_of_36_pages(model: PreTrainedModel) -> int:
    """The bytes of 36 pages of four tokens each, and of the states of eight sequences."""
    with torch.inference_mode():
        spec = check_batching(model).spec
    assert spec is not None
    page = 4 * next(group.token_bytes for group in spec.groups if group.span is None)
    return 36 * page + 8 * spec.state_bytes


@pytest.mark.parametrize(
    "family", ["gemma3_text", *(pytest.param(each, marks=pytest.mark.slow) for each in ("llama", "lfm2"))]
)
def test_a_sequence_that_gave_its_pages_away_resumes_with_the_same_tokens(family: str) -> None:
    """The requests arrive together, and steps complete in the order of their launch, so that pages always run out."""
    model = laid_out(tiny_model(family), 3)
    prompts = [prompt_of(20, i) for i in range(4)]
    expected = [reference(model, prompt, 40) for prompt in prompts]
    with pipelined(model, cache_bytes=bytes_of_36_pages(model), flights=InLaunchOrder(3, 1, 4)) as (engine, _):
        requests = [EngineRequest(prompt, greedy(40), index) for index, prompt in enumerate(prompts)]
        events = run(collect(engine, requests))
        assert [list(events[index].token_ids) for index in range(4)] == expected
        assert engine.stats().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "llama", "lfm2"])
def test_few_pages_change_no_token_in_whatever_order_steps_come_back(family: str) -> None:
    """In this test, pages run out only sometimes."""
    model = laid_out(tiny_model(family), 3)
    requests = [(prompt_of(20, i), 40) for i in range(4)]
    expected = [reference(model, prompt, count) for prompt, count in requests]
    with pipelined(model, cache_bytes=bytes_of_36_pages(model)) as (engine, _):
        assert run(together(engine, requests)) == expected


@pytest.mark.long
def test_a_sequence_that_a_stage_cannot_compute_ends_alone() -> None:
    model = laid_out(tiny_model("llama"), 3)
    good = [(prompt_of(6, i), 30) for i in range(4)]
    expected = [reference(model, prompt, count) for prompt, count in good]
    prompts = [prompt_of(7, 9), *(prompt for prompt, _ in good)]
    taken = {token for ids in (*prompts, *expected) for token in ids}
    marked = next(token for token in range(VOCAB) if token not in taken)

    def fail(ids: list[list[int]]) -> BaseException | None:
        return RuntimeError("no such token") if any(marked in row for row in ids) else None

    async def scenario(engine: EngineCore) -> None:
        sequences = asyncio.create_task(together(engine, good))
        forced = greedy(5, logit_bias={marked: 100.0})
        events = await collect(engine, [EngineRequest(prompts[0], forced)])
        assert events[0].finish_reason is FinishReason.ERROR and "decode failed: RuntimeError" in str(events[0].error)
        assert await sequences == expected
        await until(lambda: idle(engine), "an idle engine")

    with watched(model) as watch, pipelined(model) as (engine, _):
        watch.fail = fail
        run(scenario(engine))


@pytest.mark.long
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_forward_that_raises_in_the_middle_leaves_its_stage(phase: str) -> None:
    model = laid_out(tiny_model("llama"), 3)
    expected = [reference(model, *request) for request in REQUESTS]
    failing = phase == "prefill"

    def fail(*_: Any) -> None:
        if failing:
            raise RuntimeError("in the middle")

    async def scenario(engine: EngineCore) -> None:
        nonlocal failing
        streams = [engine.submit([EngineRequest(prompt_of(3, i), greedy(LONG))]) for i in range(6)]
        if phase == "decode":
            for stream in streams:
                await anext(stream)
            failing = True
        ends = list(await asyncio.gather(*map(last_of, streams)))
        assert {end.finish_reason for end in ends} == {FinishReason.ERROR}
        assert {str(end.error).partition(" failed")[0] for end in ends} == {phase}
        failing = False
        assert await together(engine, REQUESTS) == expected

    with pipelined(model, context=2 * LONG) as (engine, _):
        model.model.layers[1].register_forward_pre_hook(fail)
        run(scenario(engine))


def test_a_thread_that_dies_ends_every_stream_and_the_engine() -> None:
    model = laid_out(tiny_model("llama"), 2)

    async def scenario(engine: EngineCore) -> None:
        streams = [engine.submit([EngineRequest(prompt_of(6, i), greedy(LONG))]) for i in range(4)]
        for stream in streams:
            await anext(stream)
        model.model.layers[2].register_forward_pre_hook(_die)
        ends = list(await asyncio.gather(*map(last_of, streams)))
        assert {end.finish_reason for end in ends} == {FinishReason.ERROR}
        await until(lambda: not engine.alive, "the end")

    with pipelined(model, context=2 * LONG) as (engine, _):
        run(scenario(engine))


async def last_of(stream: Mailbox) -> TokenEvent:
    return [event async for event in stream][-1]


def _die(*_: Any) -> None:
    raise SystemExit("a stage's thread died")


@pytest.mark.long
def test_a_forward_that_hangs_beside_others_that_land_is_noticed() -> None:
    """It hangs before any stage, so that the engine's thread returns from each of its steps."""
    model = laid_out(tiny_model("llama"), 2)
    gate = threading.Event()

    def hang(batch: Batch) -> None:
        if not decodes_alone(batch):
            assert gate.wait(60)
            raise RuntimeError("too late")

    async def scenario(engine: EngineCore) -> None:
        beside = await decoding(engine, 2)
        before_each_forward(engine, hang)
        stream = engine.submit([EngineRequest(prompt_of(5), greedy(9))])
        await until(lambda: "the prefill of 5 tokens" in str(engine.trouble), "trouble")
        assert "has not returned" in str(engine.trouble)
        assert [event.finish_reason async for event in stream] == [FinishReason.ERROR]
        assert not engine.alive
        for each in beside:
            each.close()

    with pipelined(model, step_timeout=4.0, prefill_tokens=8, context=2 * LONG) as (engine, _):
        try:
            run(scenario(engine))
        finally:
            gate.set()


@pytest.mark.long
def test_the_interpreter_does_not_wait_for_a_forward_that_hangs() -> None:
    code = (
        "import time\n"
        "from mlserver_torch_stream.engine.pipeline.in_flight import InFlightForwards\n"
        "from mlserver_torch_stream.engine.cache.pages import Batch\n"
        "InFlightForwards(1, 1, 16).launch('one', lambda: time.sleep(600), Batch(()))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_nothing_runs_on_after_a_shutdown() -> None:
    model = laid_out(tiny_model("llama"), 2)

    async def scenario(engine: EngineCore) -> None:
        streams = [engine.submit([EngineRequest(prompt_of(6, i), greedy(200))]) for i in range(4)]
        await until(lambda: engine.stats().running_sequences == 4, "four rows")
        await asyncio.get_running_loop().run_in_executor(None, engine.shutdown)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("stage_")]
        assert {(await last_of(stream)).finish_reason for stream in streams} == {FinishReason.ABORT}

    with pipelined(model) as (engine, _):
        before_each_forward(engine, lambda batch: time.sleep(0.01))
        run(scenario(engine))


@pytest.mark.long
def test_a_serial_engine_over_the_same_weights_takes_its_turn_in_each_stage() -> None:
    """Otherwise one engine would remove weights from a device while the other one's forward uses them."""
    model = laid_out(tiny_model("llama"), 3, in_order=True)
    expected = [reference(model, *request) for request in REQUESTS]

    async def scenario(*engines: EngineCore) -> None:
        assert list(await asyncio.gather(*(together(engine, REQUESTS) for engine in engines))) == [expected] * 2

    busy = Busy(model, 0.002)
    with pipelined(model, busy.pipeline) as (engine, pipeline):
        serial = one_by_one(model, pipeline=pipeline)
        with running(model, batcher=serial) as other:
            run(scenario(engine, other))
    assert busy.most_in_one == 1 and busy.most_stages == 3


def test_stages_are_read_off_the_map() -> None:
    model = tiny_model("llama")
    assert read_stages(model) == ()
    model.hf_device_map = {"": "cpu"}
    assert len(read_stages(model)) == 1 and take_pipeline(model, 1, ModelForward(model)) is None
    model.hf_device_map = {"model.embed_tokens": 1, "model.layers": 0, "model.norm": 1, "lm_head": 1, "gone": 2}
    one, zero = read_stages(model)
    assert [one.name, zero.name] == ["cuda:1", "cuda:0"]
    assert list(zero.modules) == list(model.model.layers)  # the list itself is never called
    model.hf_device_map = {"model": "disk", "lm_head": "disk"}
    assert len(read_stages(model)) == 1  # what is not there is computed in one place all the same


def test_forwards_may_overlap_only_where_they_give_what_each_gives_alone() -> None:
    model = laid_out(tiny_model("llama"), 3, in_order=True)
    pipeline = Pipeline(read_stages(model), serial_python=False)
    kept: list[torch.Tensor] = []
    begun: list[torch.Tensor] = []
    overtaken = threading.Event()

    def in_flight() -> bool:
        return threading.current_thread().name.startswith("stage_")

    def keep(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        kept[:] = [output]
        if in_flight():
            begun.append(output)
            if len(begun) == 2:
                overtaken.set()

    def give(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        assert not in_flight() or overtaken.wait(30)  # the first forward comes here when the second has begun
        return output + kept[0].mean()

    with torch.inference_mode():
        check = Overlap(model, ModelForward(model))
        assert check.problem(pipeline) is None
        model.model.layers[0].register_forward_hook(keep)  # what a model's code might do: it keeps a state between
        model.model.layers[2].register_forward_hook(give)
        problem = check.problem(pipeline)
    assert problem is not None and "standard deviations" in problem
    model.model.layers[1].register_forward_pre_hook(_fail)
    with pytest.raises(RuntimeError, match="cannot"):
        check.problem(pipeline)
    assert waits_midway(model, ModelForward(model)), "what cannot be seen may be"


def _fail(*_: Any) -> None:
    raise RuntimeError("it cannot")
