"""With exactly the environment of each manifest, and the model where its platform puts it, a real server streams."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub

from mlserver_torch_stream import client
from tests import plain_http
from tests.deploy import manifests
from tests.deploy.manifests import Environment
from tests.engine.wire_worker import interpreter
from tests.server import openai, v2
from tests.server.conftest import PACED
from tests.server.harness import HOST, PACKAGE_SPELLING, Server, free_ports, serve

_PROMPT = "The quick brown fox"
_TOKENS = 20
_CACHE = "/var/cache/mlserver"


def _here(environment: Environment, folders: Mapping[str, Path]) -> Environment:
    """Returns the environment with its folders on this machine, and without ports, which the harness sets.

    Decode steps are slowed down: a tiny model would otherwise end an answer before its first event is read.
    """
    kept = {name: value for name, value in environment.items() if not name.endswith("_PORT")}
    places = dict(folders)
    if _CACHE in places:  # the kernels of this run lie in the folder itself
        places[f"{_CACHE}/converted"] = places[_CACHE]
    for name, value in kept.items():
        for folder, place in places.items():
            if value == folder or value.startswith(f"{folder}/"):
                kept[name] = str(place) + value.removeprefix(folder)
    return {**kept, "MLSERVER_TORCH_STREAM_FAULTS": PACED}


def _check_streams(server: Server, model: str) -> None:
    rest = list(client.stream(server.url, model, _PROMPT, max_tokens=_TOKENS, ignore_eos=True))
    assert len(rest) > 2 and rest[-1].num_output_tokens == _TOKENS
    with grpc.insecure_channel(server.grpc_target) as channel:
        request = v2.grpc_request(model, _PROMPT, max_tokens=_TOKENS, ignore_eos=True)
        replies = [
            v2.grpc_reply(each)
            for each in GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request]), timeout=60)
        ]
    assert len(replies) > 2 and v2.joined(replies) == "".join(map(str, rest))
    assert server.counters(model)["generation_tokens"] == 2 * _TOKENS
    assert "cannot stream" not in server.log and "gzip_enabled" not in server.log


def _check_ready(server: Server, status: int = 200) -> None:
    assert plain_http.get(f"{server.url}/v2/health/ready", timeout=10).status_code == status
    assert plain_http.get(f"{server.url}/v2/health/live", timeout=10).status_code == 200


_WORKERS = {"MLSERVER_MODEL_PARALLEL_WORKERS": "1"}


@pytest.mark.parametrize(
    "annotated",
    [
        pytest.param(False, id="as_is", marks=pytest.mark.slow),
        pytest.param(True, id="with_the_variables_that_kserve_can_inject"),
    ],
)
def test_kserve_serves_what_its_storage_initializer_left(
    tiny_model: Path, tmp_path: Path, kernel_cache: Path, annotated: bool
) -> None:
    service = manifests.load("kserve/inference-service.yaml")
    storage = tmp_path / "mnt" / "models"
    shutil.copytree(tiny_model, storage)
    (storage / "README.md").write_text("---\nlicense: apache-2.0\n---\n")  # the hub's folders hold more than a model
    # A model's file that must not shadow a library.
    (storage / "accelerate.py").write_text("raise SystemExit('a file of the model was imported')\n")
    environment = manifests.kserve_environment(service, annotated=annotated)
    folders = {"/mnt/models": storage, _CACHE: kernel_cache}
    with serve(tmp_path / "etc-mlserver", [], environment=_here(environment, folders), forked=False) as server:
        _check_ready(server)
        _check_streams(server, "smollm2")
        server.process.kill()  # it would wait for routers


@pytest.mark.slow
@pytest.mark.parametrize("annotated", [False, True], ids=["as_is", "with_the_variables_that_kserve_can_inject"])
def test_kserve_loads_a_model_that_no_storage_initializer_brings(
    tiny_model: Path, tmp_path: Path, kernel_cache: Path, annotated: bool
) -> None:
    """The service has no storageUri, and its model is in the image or on the hub."""
    service = manifests.load("kserve/inference-service.yaml")
    model: dict[str, Any] = service["spec"]["predictor"]["model"]
    del model["storageUri"]
    model["env"].append({"name": "MLSERVER_MODEL_URI", "value": "/opt/model"})
    environment = manifests.kserve_environment(service, annotated=annotated)
    assert environment["MLSERVER_LOAD_MODELS_AT_STARTUP"] == "true"
    here = _here(environment, {"/opt/model": tiny_model, _CACHE: kernel_cache})
    with serve(tmp_path / "etc-mlserver", [], environment=here) as server:
        _check_streams(server, "smollm2")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["autoscaling", "gpu", "device-map", "tensor-parallel"])
def test_kserve_serves_by_each_variant(tiny_model: Path, tmp_path: Path, kernel_cache: Path, name: str) -> None:
    """There are no GPUs, so a device map has one device. Where vLLM would run, a test's worker stands for it."""
    service = manifests.load(f"kserve/inference-service-{name}.yaml")
    model = service["metadata"]["name"]
    folders = {"/mnt/models": tiny_model, _CACHE: kernel_cache, "/opt/vllm/bin/python": interpreter(tmp_path)}
    environment = _here(manifests.kserve_environment(service), folders)
    extra = json.loads(environment["MLSERVER_MODEL_EXTRA"])
    if "vllm" in extra:
        extra["vllm"]["step_s"] = 0.02
    environment["MLSERVER_MODEL_EXTRA"] = json.dumps({**extra, "max_model_len": 1024, "threads": 1})  # as the tiny one
    with serve(tmp_path / "etc-mlserver", [], environment=environment) as server:
        _check_ready(server)
        _check_streams(server, model)
        if name == "autoscaling":
            (metric,) = service["spec"]["predictor"]["autoScaling"]["metrics"]
            _check_query(server, metric["external"]["metric"]["query"])


def _check_query(server: Server, query: str) -> None:
    """Checks that the series that the autoscaler queries is one of the server's."""
    series = re.fullmatch(r'sum\((\w+)\{model=(~?)"(.*)"\}\)', query)
    assert series is not None
    name, matches, model = series.groups()
    pattern = f'{name}{{(?:.*,)?model="{model if matches else re.escape(model)}"'
    text = plain_http.get(f"http://{HOST}:{server.metrics_port}/metrics", timeout=10).text
    assert any(re.match(pattern, line) for line in text.splitlines()), text


@pytest.mark.slow
def test_an_llm_inference_service_answers_on_openais_paths_and_to_the_picker(
    tiny_model: Path, tmp_path: Path, kernel_cache: Path
) -> None:
    environment = _here(manifests.llm_environment(), {"/mnt/models": tiny_model, _CACHE: kernel_cache})
    with serve(tmp_path / "etc-mlserver", [], environment=environment) as server:
        _check_ready(server)
        _check_streams(server, "smollm2")
        assert plain_http.get(f"{server.url}/health", timeout=10).status_code == 200
        asked = {"model": "smollm2", "prompt": _PROMPT, "max_tokens": _TOKENS, "ignore_eos": True}
        assert len(openai.stream(server, openai.TEXT, asked)) > 2
        metrics = plain_http.get(f"{server.url}/metrics", timeout=10).text
        assert "vllm:num_requests_waiting" in metrics and "vllm:kv_cache_usage_perc" in metrics


@pytest.mark.slow
def test_the_picker_s_gauges_are_on_the_port_of_the_requests(
    tiny_model: Path, tmp_path: Path, kernel_cache: Path
) -> None:
    name = manifests.LLM_SERVICES[1]
    environment = _here(manifests.llm_environment(name), {"/mnt/models": tiny_model, _CACHE: kernel_cache})
    plugins = manifests.load(name)["spec"]["router"]["scheduler"]["config"]["inline"]["plugins"]
    (reader,) = [each for each in plugins if each["type"] == "core-metrics-extractor"]
    (engine,) = reader["parameters"]["engineConfigs"]
    gauges = [value for key, value in engine.items() if key.endswith("Spec")]
    with serve(tmp_path / "etc-mlserver", [], environment=environment) as server:
        text = plain_http.get(f"{server.url}/metrics", timeout=10).text
        for gauge in gauges:
            found = re.findall(rf"^{gauge}\{{.*\}} (\S+)$", text, re.MULTILINE)
            assert [float(value) for value in found] == [0.0], f"{gauge}: the picker takes the first series"
        assert "vllm:" not in text
        server.process.kill()  # it would wait for routers
    assert len(gauges) == 3


@pytest.mark.slow
def test_two_nodes_are_one_server(tiny_model: Path, tmp_path: Path, kernel_cache: Path) -> None:
    """Our own ranks run one on each node; both nodes are this machine."""
    service = manifests.load("kserve/inference-service.yaml")
    folders = {"/mnt/models": tiny_model, _CACHE: kernel_cache}
    environment = _here(manifests.kserve_environment(service), folders)
    environment["MLSERVER_MODEL_EXTRA"] = '{"tensor_parallel_size": 2, "threads": 1}'
    program = ["--shutdown-timeout", "75", "-m", "mlserver_torch_stream.cli.rank", "/etc/mlserver"]
    address = ["--master-addr", HOST, "--master-port", str(*free_ports(1))]
    head, worker = (
        ["torchrun", "--nnodes", "2", "--node-rank", rank, "--nproc-per-node", "1", *address, *program]
        for rank in ("0", "1")
    )
    other_variables = {name: environment[name] for name in ("MLSERVER_TORCH_STREAM_CACHE", "HF_HOME")}
    log = tmp_path / "worker.log"
    with log.open("wb") as sink:
        command = [str(Path(sys.executable).with_name(worker[0])), *worker[1:]]
        follower = subprocess.Popen(command, env={**os.environ, **other_variables}, stdout=sink, stderr=sink)
    try:
        with serve(tmp_path / "etc", [], environment=environment, command=head, forked=False) as server:
            _check_ready(server)
            _check_streams(server, service["metadata"]["name"])
            assert follower.poll() is None, log.read_text()
        assert follower.wait(60) == 0, log.read_text()
    finally:
        follower.kill()
        follower.wait(60)


@pytest.mark.slow
def test_kserve_asks_for_the_keys_of_its_secret(tiny_model: Path, tmp_path: Path, kernel_cache: Path) -> None:
    service = manifests.load("kserve/inference-service-keys.yaml")
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "keys").write_text("one-key\n")
    folders = {"/mnt/models": tiny_model, _CACHE: kernel_cache, "/run/secrets/torch-stream": secret}
    environment = _here(manifests.kserve_environment(service), folders)
    with serve(tmp_path / "etc-mlserver", [], environment=environment, ready=False) as server:
        _wait_until(server, "ready")
        assert plain_http.get(f"http://{HOST}:{server.metrics_port}/metrics", timeout=10).status_code == 200
        assert plain_http.get(f"{server.url}/v1/models", timeout=10).status_code == 401
        with client.Client(server.url, api_key="one-key") as keyed:
            events = list(keyed.stream("smollm2", _PROMPT, max_tokens=_TOKENS, ignore_eos=True))
        assert len(events) > 2 and events[-1].num_output_tokens == _TOKENS
        with pytest.raises(client.ClientError):
            list(client.stream(server.url, "smollm2", _PROMPT, max_tokens=2))
        server.process.kill()  # it would wait for routers


@pytest.mark.parametrize(
    "injected",
    [pytest.param({}, id="now"), pytest.param(_WORKERS, id="with_workers", marks=pytest.mark.slow)],
)
def test_seldon_serves_what_its_agent_left(
    tiny_model: Path, tmp_path: Path, kernel_cache: Path, injected: Environment
) -> None:
    models = tmp_path / "mnt" / "agent" / "models"
    environment = {**manifests.environment(manifests.seldon_container()), **injected}
    folders = {"/mnt/agent/models": models, _CACHE: kernel_cache}
    with serve(models, [], environment=_here(environment, folders), ready=False) as server:
        _wait_until(server, "live")
        _check_ready(server)
        assert plain_http.post(f"{server.url}/v2/repository/index", json={}, timeout=10).json() == []
        _leave_model(tiny_model, models / "smollm2_1" / "1", "smollm2_1", "./")
        _leave_model(tiny_model, models / "lost_1" / "1", "lost_1", "/nowhere")
        lost = _load(server, "lost_1")
        assert lost.status_code == 500 and "no such file or folder: /nowhere" in lost.json()["error"]
        loaded = _load(server, "smollm2_1")
        assert loaded.status_code == 200, loaded.text
        assert _load(server, "lost_1").status_code == 500, "a load that fails later ends nothing"
        _check_ready(server)
        _check_streams(server, "smollm2_1")
        server.process.kill()  # it would wait for routers


@pytest.mark.slow
def test_seldon_asks_for_the_keys_of_its_secret_and_scales_by_the_queue(
    tiny_model: Path, tmp_path: Path, kernel_cache: Path
) -> None:
    models = tmp_path / "mnt" / "agent" / "models"
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "keys").write_text("one-key\n")
    folders = {"/mnt/agent/models": models, _CACHE: kernel_cache, "/run/secrets/torch-stream": secret}
    environment = _here(manifests.seldon_environment("seldon/server-keys.yaml"), folders)
    with serve(models, [], environment=environment, ready=False) as server:
        _wait_until(server, "live")
        _leave_model(tiny_model, models / "smollm2_1" / "1", "smollm2_1", "./")
        assert _load(server, "smollm2_1").status_code == 200, "the agent sends no key"
        assert plain_http.get(f"{server.url}/v1/models", timeout=10).status_code == 401
        with client.Client(server.url, api_key="one-key") as keyed:
            events = list(keyed.stream("smollm2_1", _PROMPT, max_tokens=_TOKENS, ignore_eos=True))
        assert len(events) > 2 and events[-1].num_output_tokens == _TOKENS
        (trigger,) = manifests.load("seldon/model-autoscaling.yaml")["spec"]["triggers"]
        _check_query(server, trigger["metadata"]["query"])
        server.process.kill()  # it would wait for routers


def _load(server: Server, name: str) -> httpx.Response:
    return plain_http.post(f"{server.url}/v2/repository/models/{name}/load", timeout=120)


def _leave_model(source: Path, folder: Path, name: str, uri: str) -> None:
    """Writes a model as the agent does: its name with the version, the version's folder, and model-settings.json."""
    shutil.copytree(source, folder)
    settings = {
        "name": name,
        "implementation": PACKAGE_SPELLING,
        "parameters": {"uri": uri, "version": "1", "extra": {"max_num_seqs": 8}},
    }
    (folder / "model-settings.json").write_text(json.dumps(settings))


def _wait_until(server: Server, state: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.process.poll() is None:
        try:
            if plain_http.get(f"{server.url}/v2/health/{state}", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"the server is not {state}:\n{server.log}")
