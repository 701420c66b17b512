"""Several models in one process: how they reserve memory, and take turns on the cores."""

import asyncio
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import hub

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.build import BuiltEngine, build_engine
from mlserver_torch_stream.engine.cache.budget import cache_budget
from mlserver_torch_stream.engine.cache.pages import CacheSpec, LayerGroup
from mlserver_torch_stream.engine.machine import read_host
from mlserver_torch_stream.engine.model import ModelLoad
from mlserver_torch_stream.engine.own_engine import with_device_defaults
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.engine.step.continuous import ContinuousBatcher
from mlserver_torch_stream.engine.watchdog import FairLock
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
from mlserver_torch_stream.types import SamplingParameters, TextPrompt, TokenEvent
from mlserver_torch_stream.work_threads import Cancellation, in_thread
from tests.engine.tiny import (
    byte_tokenizer,
    cached_in_hub,
    collect,
    greedy,
    prompt_of,
    reference,
    run,
    running,
    tokens_of,
    watched,
)
from tests.engine.tiny import tiny_model as make

GIB = 2**30


def built(folder: Path | str, resources: ProcessResources, **extra: object) -> BuiltEngine:
    return build_engine(parse_settings(uri=str(folder), extra={"threads": 1, **extra}, environ={}), resources=resources)


def test_promises_never_exceed_what_there_is_and_come_back() -> None:
    resources = ProcessResources()
    owners = [object() for _ in range(6)]
    promised = [resources.promise(owner, None, 8 * GIB) for owner in owners]
    assert promised == [4 * GIB, 2 * GIB, GIB, GIB // 2, GIB // 4, GIB // 8]
    resources.release(owners[0])
    assert resources.promise(object(), None, 8 * GIB) == 2 * GIB + GIB // 16
    resources.release(owners[0])  # twice is harmless
    for owner in owners:
        resources.release(owner)


def test_models_are_built_one_after_the_other(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers changes torch's default dtype, and functions of its own, for all threads while it builds a model."""
    building: list[int] = []
    from_pretrained = AutoModelForCausalLM.from_pretrained

    def build(*args: Any, **options: Any) -> Any:
        building.append(building[-1] + 1 if building else 1)
        time.sleep(0.3)
        try:
            return from_pretrained(*args, **options)
        finally:
            building.append(building[-1] - 1)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", build)
    resources = ProcessResources()
    folders = [tiny_model, shutil.copytree(tiny_model, tmp_path / "copy")]
    with ThreadPoolExecutor(2) as pool:
        engines = list(pool.map(lambda folder: built(folder, resources, fast_path="off"), folders))
    for engine in engines:
        engine.give_back()
        engine.shutdown()
    assert building == [1, 0, 1, 0]


@pytest.mark.parametrize("file", ["model.safetensors", "model-00001-of-00001.safetensors", "tokenizer.json"])
def test_a_model_whose_files_are_downloaded_keeps_no_other_from_loading(
    file: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache has all files of a model but one."""
    snapshot = cached_in_hub(tiny_model, tmp_path, monkeypatch)
    whole = "tokenizer.json" if file == "tokenizer.json" else "model.safetensors"
    if file not in ("tokenizer.json", "model.safetensors"):
        places = dict.fromkeys(load_file(snapshot / "model.safetensors"), file)
        index = json.dumps({"metadata": {}, "weight_map": places})
        (snapshot / "model.safetensors.index.json").write_text(index)
    (snapshot / whole).unlink()
    asked, arrives = threading.Event(), threading.Event()

    def download(hub_id: str, name: str, **options: Any) -> Any:
        if name == file and not (snapshot / name).exists():
            asked.set()
            assert arrives.wait(60)
            shutil.copy(tiny_model / whole, snapshot / name)
        return hf_hub_download(hub_id, name, **options)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    resources = ProcessResources()
    with ThreadPoolExecutor(1) as pool:
        downloaded = pool.submit(built, "hf://tiny/llama", resources, fast_path="off")
        assert asked.wait(60)
        other = built(tiny_model, resources, fast_path="off")
        arrives.set()
        engines = [other, downloaded.result()]
    for engine in engines:
        engine.give_back()
        engine.shutdown()


def test_a_load_that_waits_for_another_can_be_cancelled() -> None:
    resources, cancellation = ProcessResources(), Cancellation()

    def load() -> None:
        with resources.loading_alone():
            pass

    async def cancelled() -> bool:
        with resources.loading_alone():
            waiting = in_thread(load, cancellation)
            cancellation.cancel()
            await asyncio.wait([waiting], timeout=10)
        return waiting.cancelled()

    assert asyncio.run(cancelled())
    load()


def test_what_was_asked_for_is_given_and_counted() -> None:
    resources = ProcessResources()
    assert resources.promise("a", 6 * GIB, 8 * GIB) == 6 * GIB
    assert resources.promise("b", None, 8 * GIB) == GIB
    assert resources.promise("c", 9 * GIB, 8 * GIB) == 9 * GIB
    assert resources.promise("d", None, 8 * GIB) == 0  # never below nothing


def test_a_setting_gives_a_gpu_the_same_cache_as_a_host() -> None:
    groups = (LayerGroup((0,), token_bytes=100), LayerGroup((1,), window=64, token_bytes=200))
    spec, page = CacheSpec(256, groups), 256 * (100 + 200)
    limits = {"sequences": 4, "tokens": 512, "step": 64}
    on_host, on_gpu = (
        cache_budget({torch.device(name): spec}, 40 * page, ProcessResources(), "", read_host(), **limits).bytes_of(
            spec
        )
        for name in ("cpu", "cuda:0")
    )
    assert on_host == on_gpu <= 40 * page


def test_memory_that_torch_keeps_for_itself_is_free_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [GIB]  # of torch's allocator, after the checks of a load
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB - sum(kept), 2 * GIB))
    spec = CacheSpec(256, (LayerGroup((0,), token_bytes=1024),))
    limits = {"sequences": 4096, "tokens": 4096, "step": 64}
    size = cache_budget({torch.device("cuda:0"): spec}, None, ProcessResources(), "", read_host(), **limits)
    assert 1.5 * GIB < size.bytes_of(spec) <= 1.6 * GIB


@pytest.mark.parametrize(("devices", "sequences"), [(["cuda:0", "cuda:1"], 256), (["cuda:0", "cpu"], 32), ([], 32)])
def test_a_cache_on_gpus_alone_has_the_defaults_of_gpus(devices: list[str], sequences: int) -> None:
    load = ModelLoad(parse_settings("embedded://smollm2-135m-instruct", {}, environ={}), 1, ProcessResources())
    found = with_device_defaults(load, map(torch.device, devices)).resolved.settings
    assert found.max_num_seqs == sequences


def test_turns_are_taken_in_the_order_of_asking() -> None:
    fair_lock, order = FairLock(), []
    asked = threading.Semaphore(0)

    def ask(number: int) -> None:
        with fair_lock:
            order.append(number)

    threads = []
    with fair_lock:
        for number in range(8):
            thread = threading.Thread(target=ask, args=(number,))
            thread.start()
            threads.append(thread)
            while len(fair_lock._waiting) <= number:
                asked.acquire(timeout=0.001)
    for thread in threads:
        thread.join()
    assert order == list(range(8))


def test_a_turn_that_raises_is_handed_on() -> None:
    fair_lock = FairLock()
    with pytest.raises(ValueError), fair_lock:
        raise ValueError
    with fair_lock:
        pass


@pytest.mark.long
def test_two_busy_engines_step_in_turn() -> None:
    """Never both at once, and neither gets two steps while the other one waits."""
    fair_lock = FairLock()
    first, second = make("llama"), make("llama", seed=1)
    expected = [reference(model, prompt_of(5), 100) for model in (first, second)]
    inside = 0
    steps: list[tuple[str, bool]] = []  # of which model, and whether the other one was waiting at its end

    def note(model: PreTrainedModel, name: str) -> None:
        def enter(*_: object) -> None:
            nonlocal inside
            inside += 1
            assert inside == 1, "two models ran at once"

        def leave(*_: object) -> None:
            nonlocal inside
            inside -= 1
            steps.append((name, bool(fair_lock._waiting)))

        model.get_input_embeddings().register_forward_pre_hook(enter)
        model.lm_head.register_forward_hook(leave)

    with (
        running(first, fair_lock=fair_lock) as one,
        running(second, fair_lock=fair_lock) as other,
        watched(first) as watch,
    ):
        note(first, "a")
        note(second, "b")

        async def scenario() -> list[list[int]]:
            begun = asyncio.create_task(tokens_of(one, prompt_of(5), greedy(100)))
            await watch.hold()  # both are busy before either goes on
            late = asyncio.create_task(tokens_of(other, prompt_of(5), greedy(100)))
            while not fair_lock._waiting:
                await asyncio.sleep(0.001)
            watch.let_go()
            return [await begun, await late]

        assert run(scenario()) == expected
    assert any(waited for _, waited in steps)
    assert all(name != following for (name, waited), (following, _) in pairwise(steps) if waited)


def test_a_saved_folder_becomes_an_engine_that_answers(tiny_model: Path) -> None:
    resources = ProcessResources()
    one, other = built(tiny_model, resources), built(tiny_model, resources, kv_cache_memory="2MiB", max_num_seqs=3)
    try:
        assert one.engine.info.max_model_len == 1024 and other.engine.info.max_num_seqs == 3
        assert other.engine.stats().kv_cache_budget == 2 * 2**20  # the prefix cache lies in the same pages
        assert one.engine.stats().kv_cache_budget > 2 * 2**20
        assert "2.0 MiB" in other.summary and "context" in one.summary and "1 threads" in one.summary
        ids = one.codec.encode(TextPrompt("The quick brown"))

        async def both() -> None:
            params = SamplingParameters(max_tokens=12, ignore_eos=True)
            asked = [
                collect(each.engine, [EngineRequest(tuple(ids), params)]) for each in (one, other) for _ in range(3)
            ]
            texts = {events[0].text for events in await asyncio.gather(*asked)}
            assert len(texts) == 1 and texts != {""}

        run(both())
    finally:
        one.shutdown()
        other.shutdown()
    assert not one.engine.alive
    assert not resources._promised


@pytest.mark.parametrize("interval", [{"stream_interval": 100}, {"stream_interval_ms": 3_600_000}])
def test_the_stream_interval_of_the_settings_holds_for_the_engine(tiny_model: Path, interval: dict[str, Any]) -> None:
    one = built(tiny_model, ProcessResources(), **interval)

    async def events() -> list[TokenEvent]:
        params = SamplingParameters(max_tokens=60, ignore_eos=True)
        return [event async for event in one.engine.submit([EngineRequest((5, 6, 7), params)])]

    try:
        found = run(events())
    finally:
        one.shutdown()
    assert len(found) <= 2 and sum(len(event.token_ids) for event in found) == 60


def test_a_target_of_the_settings_bounds_the_prompts_of_a_step_by_time_alone(tiny_model: Path) -> None:
    found = []
    for extra in ({}, {"step_target": 250}):
        one = built(tiny_model, ProcessResources(), **extra)
        batcher = one.engine._batcher
        one.shutdown()
        assert isinstance(batcher, ContinuousBatcher)
        found.append(batcher._scheduler.limits.beside_budget)
    assert found == [128, None]


def test_a_cache_too_small_for_one_row_is_refused_at_load_and_gives_its_promise_back(tiny_model: Path) -> None:
    resources = ProcessResources()
    with pytest.raises(LoadFailed, match="kv_cache_memory"):
        built(tiny_model, resources, kv_cache_memory=100)
    assert not resources._promised


def test_a_cache_that_no_machine_holds_is_refused_at_load_under_our_kernels(tiny_model: Path, folder: Path) -> None:
    resources, extra = ProcessResources(), {"cache_dir": str(folder), "kv_cache_memory": 2**50}
    with pytest.raises(LoadFailed, match=r"extra\.kv_cache_memory: .* GiB for \d+ pages .* on cpu; .* are free"):
        built(tiny_model, resources, **extra)
    assert not resources._promised


def test_a_small_cache_shortens_the_context(tiny_model: Path) -> None:
    engine = built(tiny_model, ProcessResources(), kv_cache_memory="256KiB")
    try:
        assert 2 <= engine.engine.info.max_model_len < 1024
        longest = engine.engine.info.max_model_len
        assert len(run(tokens_of(engine.engine, (5,) * (longest - 3), greedy(50)))) == 3
    finally:
        engine.shutdown()


def test_the_summary_names_the_sequences_for_whose_states_there_is_memory(tmp_path: Path) -> None:
    make("lfm2").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    one = built(tmp_path, ProcessResources(), kv_cache_memory="16KiB")
    batcher = one.engine._batcher
    one.shutdown()
    assert isinstance(batcher, ContinuousBatcher)
    slots = batcher._scheduler.limits.max_num_seqs
    assert slots < 32 and f"up to {slots} sequences at a time" in one.summary
