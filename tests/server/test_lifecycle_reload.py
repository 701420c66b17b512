"""Reload and unload under streams: weights load once, no stream is disturbed, unload waits for the last one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import plain_http
from tests.server.conftest import QUIET
from tests.server.harness import HOST, Model, Server, serve
from tests.server.inflight import Ending, flights, rest_unary
from tests.server.v2 import joined
from tests.waiting import wait_until

_ANSWER = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
_MODEL = "tiny"
_GRACE_S = 5.0
_MIB = 2**20


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``tiny`` and ``twin`` name the same files, a copy for these tests alone."""
    folder = tmp_path_factory.mktemp("reload")
    files = shutil.copytree(tiny_model, folder / "tiny-llama")
    models = [Model(_MODEL, str(files)), Model("twin", str(files), version="v1", extra={"max_num_seqs": 2})]
    environment = {
        "MLSERVER_TORCH_STREAM_FAULTS": "decode:1:slow=0.02",
        "MLSERVER_TORCH_STREAM_DRAIN_GRACE": str(_GRACE_S),
    }
    with serve(folder / "models", models, settings=QUIET, environment=environment) as running:
        yield running


def figure(server: Server, name: str) -> float:
    text = plain_http.get(f"http://{HOST}:{server.metrics_port}/metrics", timeout=10).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"torch_stream_{name} "))


def repository(server: Server, what: str, model: str = _MODEL) -> None:
    response = plain_http.post(f"{server.url}/v2/repository/models/{model}/{what}", timeout=60)
    assert response.status_code == 200, response.text


def files_of(server: Server) -> Path:
    return server.log_path.parent / "tiny-llama"


def set_extra(server: Server, **extra: Any) -> None:
    settings = Model(_MODEL, str(files_of(server)), extra=extra).settings()
    path = server.log_path.parent / "models" / _MODEL / "model-settings.json"
    path.write_text(json.dumps(settings))


def answered(ending: Ending) -> str:
    assert ending.reason == "length"
    return joined(ending.replies)


def rss(server: Server) -> float:
    return float(psutil.Process(server.process.pid).memory_info().rss)


def test_models_that_name_the_same_files_share_the_weights(server: Server) -> None:
    assert figure(server, "weight_loads_total") == 1
    assert figure(server, "loaded_weights") == 1
    assert figure(server, "engines") == 2


def reload_under_streams(server: Server, times: int) -> None:
    loads = figure(server, "weight_loads_total")
    with flights(server) as start:
        expected = answered(start.rest_stream(_MODEL, **_ANSWER).end())
        repository(server, "load")
        before = rss(server)
        running = [start.rest_stream(_MODEL, **_ANSWER), start.grpc_stream(_MODEL, **_ANSWER)]
        for _ in range(times):
            repository(server, "load")
            for place, stream in enumerate(running):
                if stream.ending.done():
                    assert answered(stream.end()) == expected
                    running[place] = (start.rest_stream, start.grpc_stream)[place](_MODEL, **_ANSWER)
        assert [answered(stream.end()) for stream in running] == [expected] * 2
    assert figure(server, "weight_loads_total") == loads
    assert figure(server, "engines") == 2
    assert rss(server) < before + 64 * _MIB


@pytest.mark.long
def test_reloads_disturb_no_stream_and_load_nothing(server: Server) -> None:
    reload_under_streams(server, 100)


@pytest.mark.slow
def test_a_thousand_reloads(server: Server) -> None:
    reload_under_streams(server, 1000)


@pytest.mark.long
def test_other_settings_get_a_second_engine_over_the_same_weights(server: Server) -> None:
    with flights(server) as start, ThreadPoolExecutor() as pool:
        expected = answered(start.rest_stream(_MODEL, **_ANSWER).end())
        old = start.rest_stream(_MODEL, **_ANSWER)
        set_extra(server, max_num_seqs=3)
        reload: Future[None] = pool.submit(repository, server, "load")
        wait_until(lambda: "up to 3 sequences" in server.log)
        new = start.rest_stream(_MODEL, **_ANSWER)
        assert answered(old.end()) == answered(new.end()) == expected
        reload.result(60)
    assert figure(server, "weight_loads_total") == figure(server, "loaded_weights") == 1
    assert figure(server, "engines") == 2


@pytest.mark.long
def test_unload_waits_for_streams_up_to_the_grace_and_load_brings_the_model_back(server: Server) -> None:
    with flights(server) as start, ThreadPoolExecutor() as pool:
        short = start.rest_stream(_MODEL, max_tokens=30, ignore_eos=True)
        long = start.grpc_stream(_MODEL, max_tokens=1000, ignore_eos=True)
        body = {"text_input": "x", "max_tokens": 1000, "ignore_eos": True}
        whole = pool.submit(plain_http.post, f"{server.url}/v2/models/{_MODEL}/generate", json=body, timeout=60)
        server.wait_for(_MODEL, lambda now: now["running_sequences"] == 3)
        unload = pool.submit(repository, server, "unload")
        wait_until(lambda: rest_unary(server, _MODEL, max_tokens=1).code == 404)
        assert plain_http.get(f"{server.url}/v2/health/live", timeout=5).status_code == 200, "the loop is not blocked"
        assert rest_unary(server, "twin", max_tokens=1).code == 200
        assert not unload.done()
        load = pool.submit(repository, server, "load")
        assert short.end().reason == "length"
        assert long.end().reason == "abort"
        assert whole.result(60).json() == {"error": f"model '{_MODEL}' is being unloaded"}
        unload.result(60)
        load.result(60)
        assert rest_unary(server, _MODEL, max_tokens=1).code == 200, "the load that came meanwhile took its turn"
    for _ in range(5):
        repository(server, "unload")
        assert figure(server, "engines") == 1
        repository(server, "load")
        assert rest_unary(server, _MODEL, max_tokens=1).code == 200
    assert figure(server, "weight_loads_total") == 1, "the twin held them"


@pytest.mark.long
def test_loads_and_unloads_at_once_leave_no_engine_behind(server: Server) -> None:
    def change(what: str) -> int:
        return plain_http.post(f"{server.url}/v2/repository/models/twin/{what}", timeout=60).status_code

    with ThreadPoolExecutor(8) as pool:
        statuses = set(pool.map(change, ["load", "load", "unload", "load", "unload", "unload"] * 10))
    assert statuses <= {200, 404}, "an unload may find nothing"
    repository(server, "load", "twin")
    assert figure(server, "engines") == 2
    assert figure(server, "loaded_models") == 2
    assert rest_unary(server, "twin", max_tokens=1).code == 200
    assert plain_http.get(f"{server.url}/v2/models/twin/versions/v1/ready", timeout=5).status_code == 200


def test_changed_files_are_loaded_anew(server: Server) -> None:
    loads = figure(server, "weight_loads_total")
    os.utime(files_of(server) / "model.safetensors")
    repository(server, "load")
    assert figure(server, "weight_loads_total") == loads + 1
    assert figure(server, "loaded_weights") == 2, "the twin still has the old ones"
    repository(server, "load", "twin")
    assert figure(server, "weight_loads_total") == loads + 1
    assert figure(server, "loaded_weights") == 1
