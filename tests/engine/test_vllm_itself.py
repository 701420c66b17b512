"""The worker over vLLM itself: what requests ask for is what vLLM does. Minutes, and only where vLLM is installed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.build import BuiltEngine, build_engine
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.errors import InvalidInput, LoadFailed
from mlserver_torch_stream.generation import Generator
from mlserver_torch_stream.settings import parse_settings
from mlserver_torch_stream.types import (
    ChatPrompt,
    Constraint,
    ConstraintKind,
    FinishReason,
    GenerationRequest,
    SamplingParameters,
    TokenEvent,
)
from tests.engine.tiny import collect, run, until

PYTHON, MODEL = "VLLM_PYTHON", "VLLM_MODEL"
_QUESTION = ChatPrompt(({"role": "user", "content": "What is the capital of France?"},))
_UNLIKELY = 600.0  # seconds: vLLM takes minutes to start
_SMALL = {"max_model_len": 512, "kv_cache_memory": "256MiB"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (os.environ.get(PYTHON) and os.environ.get(MODEL)),
        reason=f"{PYTHON} and {MODEL} do not name an interpreter with vLLM and the folder of a model",
    ),
]


def build(**vllm: Any) -> BuiltEngine:
    arguments = {"enforce_eager": True, "max_num_seqs": 8, **vllm}
    extra = {**_SMALL, "vllm": arguments, "vllm_python": os.environ[PYTHON]}
    return build_engine(parse_settings(os.environ[MODEL], extra), resources=ProcessResources())


@pytest.fixture(scope="module")
def built() -> Iterator[BuiltEngine]:
    running = build(enable_lora=True, max_lora_rank=8)
    yield running
    assert running.give_back()
    running.shutdown()


def answers(built: BuiltEngine, constraint: Constraint | None = None, **params: Any) -> list[TokenEvent]:
    async def ask() -> list[TokenEvent]:
        streams: list[Any] = []
        generator = Generator(built.engine, built.codec, built.engine.info)
        sampling = SamplingParameters(**params)
        await generator.start(GenerationRequest("r", (_QUESTION,), sampling, constraint=constraint), streams.append)
        merged: dict[int, TokenEvent] = {}
        async for event in streams[0]:
            merged[event.index] = merged[event.index].merge(event) if event.index in merged else event
        return [merged[index] for index in sorted(merged)]

    found: list[TokenEvent] = run(ask(), _UNLIKELY)
    assert all(event.error is None for event in found), found
    return found


def test_greedy_answers_are_the_same_and_usage_counts_them(built: BuiltEngine) -> None:
    one, other = answers(built, max_tokens=8)[0], answers(built, max_tokens=8)[0]
    assert one.text == other.text
    assert one.usage is not None
    assert one.usage.num_output_tokens == len(one.token_ids) <= 8


def test_a_seed_gives_the_same_n_answers_again_and_others_among_each_other(built: BuiltEngine) -> None:
    asked = {"max_tokens": 8, "n": 3, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    first, again = answers(built, **asked), answers(built, **asked)
    assert [event.token_ids for event in first] == [event.token_ids for event in again]
    assert len({event.token_ids for event in first}) == 3


def test_log_probabilities_are_sorted_and_have_the_chosen_token(built: BuiltEngine) -> None:
    event = answers(built, max_tokens=3, logprobs=True, top_logprobs=4, ignore_eos=True)[0]
    assert len(event.logprobs) == 3
    for entry in event.logprobs:
        assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
        assert len(entry.top) == 4
        assert entry.logprob <= 0
        assert entry.top[0] == (entry.token_id, pytest.approx(entry.logprob))


def test_a_stop_string_a_bias_bad_words_and_a_least_length_hold(built: BuiltEngine) -> None:
    plain = answers(built, max_tokens=12, ignore_eos=True)[0]
    word = plain.text.split()[2]
    stopped = answers(built, max_tokens=12, stop=(word,))[0]
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, word)
    assert word not in stopped.text
    (token,) = {answers(built, max_tokens=1, logit_bias={500: 100.0})[0].token_ids}
    assert token == (500,)
    assert word not in answers(built, max_tokens=12, bad_words=(word,))[0].text
    assert len(answers(built, max_tokens=30, min_tokens=28)[0].token_ids) >= 28


@pytest.mark.parametrize(
    ("kind", "source", "expected"),
    [
        (ConstraintKind.REGEX, "[0-9]{3}/[a-c]!", r"[0-9]{3}/[a-c]!"),
        (ConstraintKind.CHOICE, '["Rome", "Pa}ris"]', "Rome|Pa}ris"),
        (ConstraintKind.GRAMMAR, 'start: "x{" y\ny: /z{1,3}\\}/', r"x\{z{1,3}\}"),
        (
            ConstraintKind.JSON_SCHEMA,
            '{"type":"object","properties":{"n":{"type":"integer","maximum":99,"minimum":0}},"required":["n"],'
            '"additionalProperties":false}',
            r'\{"n": ?[0-9]{1,2}\}',
        ),
    ],
)
def test_constraints_hold(built: BuiltEngine, kind: ConstraintKind, source: str, expected: str) -> None:
    import re

    event = answers(built, Constraint(kind, source, "f"), max_tokens=40)[0]
    assert event.finish_reason is FinishReason.STOP
    assert re.fullmatch(expected, event.text), event.text


def test_a_closed_stream_ends_in_vllm_and_streams_run_together(built: BuiltEngine) -> None:
    async def together() -> None:
        params = SamplingParameters(max_tokens=100, ignore_eos=True)
        closed = built.engine.submit([EngineRequest((5, 6, 7), params)])
        await anext(closed)
        requests = [[EngineRequest(tuple(range(40 + each, 80)), params)] for each in range(12)]
        others = asyncio.gather(*(collect(built.engine, each) for each in requests))  # type: ignore[arg-type]
        closed.close()
        assert all(len(each[0].token_ids) == 100 for each in await others)
        await until(lambda: built.engine.load == 0, "the end of all")
        assert built.engine.stats().generation_tokens > 1200

    run(together(), _UNLIKELY)


def test_a_prompt_that_was_there_before_is_found_in_the_cache(built: BuiltEngine) -> None:
    prompt = tuple(range(100, 400))
    for expected in (False, True):
        event = run(collect(built.engine, [EngineRequest(prompt, SamplingParameters(max_tokens=1))]), _UNLIKELY)[0]  # type: ignore[arg-type]
        assert event.usage is not None
        assert (event.usage.num_cached_tokens > 100) is expected


def test_an_adapter_changes_the_tokens_and_can_be_unloaded(built: BuiltEngine, tmp_path: Path) -> None:
    _write_adapter(tmp_path)
    adapters = built.adapters
    assert adapters is not None

    async def ask(name: str | None) -> tuple[int, ...]:
        params = SamplingParameters(max_tokens=8, ignore_eos=True)
        event = (await collect(built.engine, [EngineRequest((40, 41, 42), params, adapter=name)]))[0]  # type: ignore[arg-type]
        assert event.error is None, event.error
        return event.token_ids

    async def change() -> None:
        with pytest.raises(InvalidInput, match="lora_path"):
            await adapters.load("wrong", str(tmp_path / "nowhere"))
        await adapters.load("loud", str(tmp_path))
        assert await ask("loud") != await ask(None)
        await adapters.unload("loud")

    run(change(), _UNLIKELY)


def _write_adapter(folder: Path) -> None:
    """A LoRA adapter with large random weights for the queries and values of the model."""
    import torch
    from safetensors.torch import save_file

    config = json.loads(Path(os.environ[MODEL], "config.json").read_text())
    hidden, heads, keys = (config[each] for each in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head = config.get("head_dim") or hidden // heads
    adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**adapter, "task_type": "CAUSAL_LM"}))
    torch.manual_seed(0)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in (("q_proj", heads * head), ("v_proj", keys * head)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(8, hidden)
            tensors[f"{place}.lora_B.weight"] = torch.randn(size, 8)
    save_file(tensors, folder / "adapter_model.safetensors")


def _processes() -> dict[int, str]:
    lines = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {int(line.split()[0]): line for line in lines[1:]}


def test_the_engine_core_s_death_is_told_and_vllm_starts_again_and_leaves_nothing(built: BuiltEngine) -> None:
    before = set(os.listdir("/dev/shm"))
    cores = [pid for pid, line in _processes().items() if "VLLM::EngineCore" in line and _is_ours(pid)]

    async def die() -> None:
        stream = built.engine.submit([EngineRequest((5, 6, 7), SamplingParameters(max_tokens=400, ignore_eos=True))])
        await anext(stream)
        for pid in cores:
            os.kill(pid, signal.SIGKILL)
        last = [event async for event in stream][-1]
        assert last.finish_reason is FinishReason.ERROR
        end = time.monotonic() + _UNLIKELY
        while built.engine.trouble is not None:
            assert time.monotonic() < end
            await asyncio.sleep(0.1)
        assert (await collect(built.engine, [EngineRequest((5, 6, 7), SamplingParameters(max_tokens=2))]))[
            0
        ].error is None  # type: ignore[arg-type]

    run(die(), 2 * _UNLIKELY)
    assert not set(cores) & _processes().keys()
    assert len(set(os.listdir("/dev/shm"))) <= len(before)  # those of the new worker have other names


def _is_ours(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return False


def test_an_unknown_argument_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(LoadFailed, match=r"parameters\.extra\.vllm: unknown key 'max_num_seq'; did you mean"):
        build(max_num_seq=4)
    with pytest.raises(LoadFailed, match=r"parameters\.extra\.vllm: compilation_config: unknown key 'levl'"):
        build(compilation_config={"levl": 3})
