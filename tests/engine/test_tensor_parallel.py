"""A model split over two ranks, this process and a child: the same tokens as in one process, and no deadlock."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.build import BuiltEngine, build_engine
from mlserver_torch_stream.engine.capacity import read_size
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.engine.tensor_parallel import leader
from mlserver_torch_stream.engine.tensor_parallel.validate import check_model
from mlserver_torch_stream.errors import GenerationFailed, LoadFailed, NotServing
from mlserver_torch_stream.model_source import ModelSource
from mlserver_torch_stream.settings import parse_settings
from mlserver_torch_stream.types import Constraint, ConstraintKind, FinishReason
from tests.engine.tiny import collect, greedy, idle, prompt_of, reference, run, tokens_of, until
from tests.engine.tiny import tiny_model as make
from tests.waiting import rank_pids

REQUESTS = [(prompt_of(3 + 9 * number, number), 8 + 5 * number) for number in range(5)]
SETTINGS = {"threads": 1, "kv_cache_memory": "8MiB", "chunked_prefill_size": 8, "fast_path": "off"}


def build(folder: Path, deaths: list[BaseException] | None = None, **extra: Any) -> BuiltEngine:
    resolved = parse_settings(str(folder), {**SETTINGS, **extra}, environ={})
    return build_engine(resolved, on_death=deaths.append if deaths is not None else None, resources=ProcessResources())


def end(built: BuiltEngine) -> None:
    if built.give_back():
        built.shutdown()


async def together(engine: EngineCore, requests: Sequence[tuple[tuple[int, ...], int]]) -> list[list[int]]:
    sequences = [asyncio.create_task(tokens_of(engine, prompt, greedy(count))) for prompt, count in requests]
    return [await sequence for sequence in sequences]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Iterator[list[list[int]]]:
    """The answers of a single process."""
    built = build(tiny_model)
    yield run(together(built.engine, REQUESTS))
    end(built)


@pytest.fixture(scope="module")
def deaths() -> list[BaseException]:
    return []


@pytest.fixture(scope="module")
def ranks(tiny_model: Path, deaths: list[BaseException]) -> Iterator[BuiltEngine]:
    """An engine over two ranks, which send their heartbeat between as many steps as possible."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leader, "_PULSE_SECONDS", 0.01)
        built = build(tiny_model, deaths, tensor_parallel_size=2)
        yield built
        end(built)
    assert not torch.distributed.is_initialized()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rank")] == []


@pytest.mark.long
def test_two_ranks_give_the_tokens_of_one_process(ranks: BuiltEngine, expected: list[list[int]]) -> None:
    assert "2 ranks" in ranks.summary
    assert run(together(ranks.engine, REQUESTS)) == expected


@pytest.mark.long
def test_kept_prompts_are_kept_on_every_rank(ranks: BuiltEngine, expected: list[list[int]]) -> None:
    run(together(ranks.engine, REQUESTS))
    before = ranks.engine.stats().prefix_cache_hit_tokens
    assert run(together(ranks.engine, REQUESTS)) == expected
    assert ranks.engine.stats().prefix_cache_hit_tokens > before


def test_each_rank_holds_half_of_the_cache_and_of_the_layers(ranks: BuiltEngine, tiny_model: Path) -> None:
    prepared = ranks.lease.value.weights.value
    whole = build(tiny_model)
    (group,) = prepared.findings.spec.groups
    (whole_group,) = whole.lease.value.weights.value.findings.spec.groups
    assert 2 * group.token_bytes == whole_group.token_bytes > 0
    end(whole)
    weight = prepared.weights.model.model.layers[0].mlp.up_proj.weight
    assert 2 * weight.to_local().numel() == weight.numel()


def test_nobody_beyond_this_machine_can_reach_them(ranks: BuiltEngine) -> None:
    sockets = [
        each for pid in (os.getpid(), *rank_pids(os.getpid())) for each in psutil.Process(pid).net_connections("tcp")
    ]
    listening = {each.laddr.ip.removeprefix("::ffff:") for each in sockets if each.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


@pytest.mark.long
def test_streams_that_close_leave_the_others_their_tokens(ranks: BuiltEngine, expected: list[list[int]]) -> None:
    async def scenario() -> list[list[int]]:
        others = [asyncio.create_task(tokens_of(ranks.engine, prompt, greedy(count))) for prompt, count in REQUESTS]
        stream = ranks.engine.submit([EngineRequest(prompt_of(20, 9), greedy(500, n=3))])
        await stream.__anext__()
        stream.close()
        sequences = [await other for other in others]
        await until(lambda: idle(ranks.engine), "an idle engine")
        return sequences

    assert run(scenario()) == expected


@pytest.mark.long
def test_an_engine_with_other_bounds_runs_on_the_same_ranks(
    ranks: BuiltEngine, tiny_model: Path, expected: list[list[int]]
) -> None:
    """So it happens after a reload, while the last requests of the previous engine are still running."""
    settings = {**SETTINGS, "tensor_parallel_size": 2, "max_queued_requests": 7}
    other = build_engine(parse_settings(str(tiny_model), settings, environ={}), resources=ranks.resources)
    assert ranks.resources.weights.made == 1

    async def both() -> list[list[list[int]]]:
        return list(await asyncio.gather(*(together(each.engine, REQUESTS) for each in (ranks, other))))

    assert run(both()) == [expected, expected]
    end(other)
    assert run(together(ranks.engine, REQUESTS)) == expected


@pytest.mark.long
def test_sequences_that_gave_their_pages_away_resume_with_the_same_tokens(ranks: BuiltEngine, tiny_model: Path) -> None:
    requests = [(prompt_of(5, number), 70) for number in range(4)]  # two of them fit
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    spec = ranks.lease.value.weights.value.findings.spec
    memory = 11 * sum(spec.page_bytes(group) for group in range(len(spec.groups)))
    settings = {**SETTINGS, "tensor_parallel_size": 2, "kv_cache_memory": memory, "prefix_cache_memory": 0}
    small = build_engine(parse_settings(str(tiny_model), settings, environ={}), resources=ranks.resources)
    assert ranks.resources.weights.made == 1
    try:
        assert run(together(small.engine, requests)) == [reference(model, *request) for request in requests]
        assert small.engine.stats().num_preemptions > 0
    finally:
        end(small)


def test_several_answers_to_a_prompt_part_on_every_rank(ranks: BuiltEngine, expected: list[list[int]]) -> None:
    prompt, count = REQUESTS[-1]
    events = run(collect(ranks.engine, [EngineRequest(prompt, greedy(count, n=3))]))
    assert [list(events[index].token_ids) for index in range(3)] == [expected[-1]] * 3


@pytest.mark.long
def test_drafts_are_verified_on_every_rank(ranks: BuiltEngine, tiny_model: Path) -> None:
    prompt, params = prompt_of(9), greedy(30, logit_bias={65: 1e3, 66: 1e3}, frequency_penalty=2.0)
    expected = run(tokens_of(ranks.engine, prompt, params))
    settings = {**SETTINGS, "tensor_parallel_size": 2, "speculative": {"prompt_lookup": 6}}
    drafting = build_engine(parse_settings(str(tiny_model), settings, environ={}), resources=ranks.resources)
    try:
        assert run(tokens_of(drafting.engine, prompt, params)) == expected
        stats = drafting.engine.stats()
        assert stats.decode_steps == 29 - stats.accepted_draft_tokens < 29
    finally:
        end(drafting)


def test_a_schema_is_kept_to_with_the_tokens_of_one_process(ranks: BuiltEngine, tiny_model: Path) -> None:
    """Only rank 0 has the constraint; forced tokens reach the other ranks as drafts.

    Replicas answer as one process does.
    """
    schema = {"type": "object", "properties": {"name": {"enum": ["x", "y"]}}, "required": ["name"]}
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({**schema, "additionalProperties": False}), "field")
    several = build(tiny_model, replicas=2)
    answers = []
    try:
        for built in (ranks, several):
            request = EngineRequest(prompt_of(9), greedy(40, n=3), constraint=built.codec.submit(constraint).result())
            events = run(collect(built.engine, [request]))
            answers.append([(events[index].text, events[index].finish_reason) for index in range(3)])
            assert built.engine.stats().forced_tokens > 0
    finally:
        end(several)
    assert answers[0] == answers[1]
    assert all(json.loads(text)["name"] in ("x", "y") and end is FinishReason.STOP for text, end in answers[0])


def test_another_split_model_in_the_same_process_is_refused(ranks: BuiltEngine, tiny_model: Path) -> None:
    with pytest.raises(LoadFailed, match="another model in this process is split over ranks"):
        build(tiny_model, tensor_parallel_size=2, dtype="bfloat16")
    assert ranks.engine.alive


def test_a_killed_rank_gives_every_stream_an_error_and_ends_the_engine(
    ranks: BuiltEngine, deaths: list[BaseException]
) -> None:
    """The ranks cannot be used after this test, so it is the last one with them."""

    async def scenario() -> None:
        readers = [
            asyncio.create_task(collect(ranks.engine, [EngineRequest(prompt_of(9, number), greedy(900))]))
            for number in range(3)
        ]
        await until(lambda: ranks.engine.stats().running_sequences == 3, "three sequences")
        os.kill(rank_pids(os.getpid())[0], signal.SIGKILL)
        for reader in readers:
            event = (await asyncio.wait_for(reader, 30))[0]
            assert event.finish_reason is FinishReason.ERROR
            assert isinstance(event.error, GenerationFailed)
            assert "RanksLost" in event.error.message
        assert not ranks.engine.alive
        with pytest.raises(NotServing):
            ranks.engine.submit([EngineRequest(prompt_of(3))])
        await until(lambda: bool(deaths), "word of the death")
        assert "rank 1 was killed by SIGKILL" in str(deaths[0])

    run(scenario())


def test_ranks_that_do_not_divide_the_heads_are_refused_with_those_that_do(tiny_model: Path) -> None:
    with pytest.raises(LoadFailed, match=r"4 does not divide .* 4 attention heads and 2 key-value heads.*: 1, 2$"):
        build(tiny_model, tensor_parallel_size=4)


def test_the_layer_with_the_fewest_heads_decides_how_many_ranks_there_can_be() -> None:
    check_model(make("gemma4_moe").config, 1)
    with pytest.raises(LoadFailed, match=r"2 does not divide .* 4 attention heads and 1 key-value heads.*: 1$"):
        check_model(make("gemma4_moe").config, 2)


def test_a_quantised_checkpoint_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadFailed, match="tensor_parallel_size: this checkpoint is quantised"):
        build(tmp_path, tensor_parallel_size=2)
    with pytest.raises(LoadFailed, match="is quantised, and its config does not say"):
        read_size(ModelSource("folder", str(tmp_path)))


def test_a_model_without_a_plan_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    for file in tiny_model.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    make("opt").save_pretrained(tmp_path)
    with pytest.raises(LoadFailed, match="no plan that splits models of type opt"):
        build(tmp_path, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device_map", "auto"),
        ("weights", "int8"),
        ("engine", "serial"),
        ("max_memory", {"cpu": "1GiB"}),
    ],
)
def test_settings_that_do_not_go_with_ranks_are_named(tiny_model: Path, key: str, value: Any) -> None:
    extra = {key: value, "fast_path": "auto"}
    with pytest.raises(LoadFailed, match=f"tensor_parallel_size: 2 cannot be combined with {key}"):
        build(tiny_model, tensor_parallel_size=2, **extra)
