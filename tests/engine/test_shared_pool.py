"""Objects made once: shared by concurrent users, kept until the last one leaves, and made again after a failure.

Also tests which settings need separate weights or engines.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.build import BuiltEngine, build_engine
from mlserver_torch_stream.engine.fingerprint import weights_key
from mlserver_torch_stream.engine.shared_pool import ProcessResources, SharedPool
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import ResolvedSettings, parse_settings
from mlserver_torch_stream.types import SamplingParameters
from tests.engine.tiny import collect, run
from tests.waiting import wait_until

_AT_ONCE = 8


def settings(folder: Path, **extra: Any) -> ResolvedSettings:
    return parse_settings(str(folder), extra, environ={})


def test_concurrent_askers_get_one_thing_made_once() -> None:
    pool: SharedPool[object] = SharedPool()
    all_ask = threading.Barrier(_AT_ONCE)

    def ask(_: int) -> object:
        all_ask.wait(60)
        return pool.lease("key", object).value

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        assert len(set(threads.map(ask, range(_AT_ONCE)))) == 1
    assert pool.made == 1


def test_the_last_to_leave_is_told_once_and_then_it_is_made_anew() -> None:
    pool: SharedPool[object] = SharedPool()
    first, second = pool.lease("key", object), pool.lease("key", object)
    assert first.value is second.value and len(pool) == 1
    assert not first.end() and not first.end()
    assert second.end() and not second.end()
    assert len(pool) == 0
    assert pool.lease("key", object).value is not first.value


def test_a_failure_reaches_all_who_wait_and_the_next_one_tries_again() -> None:
    pool: SharedPool[int] = SharedPool()
    makes = threading.Event()

    def fail() -> int:
        makes.set()
        wait_until(lambda: pool._shared["key"].users == 2, "the one who waits")
        raise LoadFailed("no")

    def wait() -> None:
        assert makes.wait(30)
        pool.lease("key", lambda: 1)

    with ThreadPoolExecutor(2) as threads:
        tries = threads.submit(pool.lease, "key", fail), threads.submit(wait)
        for each in tries:
            with pytest.raises(LoadFailed):
                each.result(60)
    assert pool.made == 0 and len(pool) == 0
    assert pool.lease("key", lambda: 2).value == 2


def test_what_shapes_the_weights_tells_them_apart(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))

    def key(threads: int = 2, **extra: Any) -> Hashable:
        return weights_key(settings(folder, **extra), threads)

    plain = key()
    assert plain == key(
        max_num_seqs=3, kv_cache_memory="1MiB", max_queued_requests=1, chat_template="{{ 1 }}", max_model_len=9
    )
    shaping: list[dict[str, Any]] = [
        {"dtype": "bfloat16"},
        {"revision": "other"},
        {"device_map": "cpu"},
        {"attn_implementation": "eager"},
        {"quantization_config": {"load_in_8bit": True}},
        {"trust_remote_code": True},
        {"engine": "serial"},
        {"fast_path": "off"},
        {"weights": "int8"},
    ]
    keys = [key(**extra) for extra in shaping]
    assert len({plain, *keys, key(threads=3)}) == len(shaping) + 2
    assert key(threads=3, fast_path="off") == key(fast_path="off"), "only our kernels are made for a number of threads"
    os.utime(folder / "config.json", (1, 1))
    assert key() != plain
    with (folder / "more.json").open("w") as file:
        file.write("{}")
    assert key() not in (plain, key(dtype="bfloat16"))


def test_the_number_of_sequences_does_not_tell_weights_apart_on_a_gpu_either(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine has its own cache, so that engines with different limits share the weights."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options: list[dict[str, Any]] = [{}, {"fast_path": "off"}, {"tensor_parallel_size": 2}]
    for extra in options:
        assert len({weights_key(settings(tiny_model, max_num_seqs=each, **extra), 2) for each in (3, 4, 5, 64)}) == 1


def sequence(built: BuiltEngine) -> list[int]:
    requests = [EngineRequest((5, 6, 7), SamplingParameters(max_tokens=12, ignore_eos=True))]
    return list(run(collect(built.engine, requests))[0].token_ids)


def test_engines_with_other_settings_share_the_weights_and_answer_alike(tiny_model: Path) -> None:
    resources = ProcessResources()
    first = build_engine(settings(tiny_model), "m", resources=resources)
    same = build_engine(settings(tiny_model), "m", resources=resources)
    other = build_engine(settings(tiny_model, max_num_seqs=3), "m", resources=resources)
    twin = build_engine(settings(tiny_model), "n", resources=resources)
    assert same.engine is first.engine
    assert len({first.engine, other.engine, twin.engine}) == 3
    assert (resources.weights.made, len(resources.weights), len(resources.engines)) == (1, 1, 3)
    with ThreadPoolExecutor(3) as threads:
        sequences = list(threads.map(sequence, [first, other, twin] * 4))
    assert sequences == [sequences[0]] * 12 and len(sequences[0]) == 12

    assert not first.give_back() and same.engine.alive
    for last in (same, other, twin):
        assert last.give_back()
        last.shutdown()
    assert (len(resources.weights), len(resources.engines)) == (0, 0)


def test_a_failed_load_leaves_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    resources = ProcessResources()
    with pytest.raises(LoadFailed):
        build_engine(settings(tiny_model, kv_cache_memory=1), "m", resources=resources)
    assert (len(resources.weights), len(resources.engines)) == (0, 0)
    built = build_engine(settings(tiny_model), "m", resources=resources)
    assert built.give_back()
    built.shutdown()
