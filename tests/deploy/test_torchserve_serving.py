"""A real server with the command and the environment of the TorchServe manifest, on the folder that KServe mounts."""

from __future__ import annotations

import json
from collections.abc import Iterator

import grpc
import httpx
import pytest
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub

from tests import plain_http
from tests.deploy import manifests
from tests.server.harness import Server, serve
from tests.torchserve.workshop import without_torchserve, write_mar

_TIMEOUT_S = 60.0
# As KServe's mnist_handler.py does it, under both envelopes: each row is an instance, or a V2 tensor, with its data.
_SUM = """
def handle(data, context):
    return None if data is None else [sum(row["data"]) for row in data]
"""
# KServe's own example: docs/samples/v1beta1/torchserve/v1/config.properties.
_PROPERTIES = """
inference_address=http://0.0.0.0:8085
management_address=http://0.0.0.0:8085
metrics_address=http://0.0.0.0:8082
grpc_inference_port=7070
grpc_management_port=7071
enable_metrics_api=true
metrics_format=prometheus
number_of_netty_threads=4
job_queue_size=10
enable_envvars_config=true
install_py_dep_per_model=true
model_store=/mnt/models/model-store
model_snapshot={"name":"startup.cfg","modelCount":1,"models":{"mnist":{"1.0":{"defaultVersion":true,\
"marName":"mnist.mar","minWorkers":1,"maxWorkers":5,"batchSize":1,"maxBatchDelay":5000,"responseTimeout":120}}}}
"""


@pytest.fixture(scope="module", params=["v1", pytest.param("v2", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The files of the storage initializer are in another folder than /mnt/models, and the harness sets the ports."""
    folder = tmp_path_factory.mktemp("kserve")
    mounted = folder / "mnt/models"
    (mounted / "model-store").mkdir(parents=True)
    (mounted / "config").mkdir()
    model = {"modelName": "mnist", "modelVersion": "1.0", "handler": "mnist_handler.py"}
    write_mar(mounted / "model-store/mnist.mar", {"mnist_handler.py": _SUM}, model)
    (mounted / "config/config.properties").write_text(_PROPERTIES)
    (mounted / "accelerate.py").write_text("raise SystemExit('a file of the model was imported')\n")
    container = manifests.torchserve_container()
    service = manifests.load("kserve/torchserve-inference-service.yaml")["spec"]["predictor"]["pytorch"]
    typed = [*container["command"], *container["args"], *service["args"]]
    command = [word.replace("/mnt/models", str(mounted)) for word in typed]
    environment = manifests.torchserve_environment(request.param)
    kept = {name: value for name, value in environment.items() if not name.endswith(("_PORT", "_HOST"))}
    kept |= without_torchserve(folder)
    with serve(folder / "work", [], environment=kept, command=command) as running:
        yield running
        running.process.kill()  # it would wait for routers


def _post(server: Server, path: str, body: object) -> httpx.Response:
    return plain_http.post(f"{server.url}{path}", json=body, timeout=_TIMEOUT_S)


def test_kserves_first_protocol_is_answered(server: Server) -> None:
    body = {"instances": [{"data": [1, 2]}, {"data": [3]}]}
    for path in ("/v1/models/mnist:predict", "/predictions/mnist", "/predictions/mnist/1.0"):
        answer = _post(server, path, body)
        assert (answer.status_code, answer.json()) == (200, {"predictions": [3, 3]}), path


def test_kserves_first_protocol_tells_that_a_model_is_ready(server: Server) -> None:
    answer = plain_http.get(f"{server.url}/v1/models/mnist", timeout=_TIMEOUT_S)
    assert (answer.status_code, answer.json()) == (200, {"name": "mnist", "ready": True})
    assert plain_http.get(f"{server.url}/v1/models/nothing", timeout=_TIMEOUT_S).status_code == 404


def test_kserves_second_protocol_is_answered(server: Server) -> None:
    tensor = {"name": "x", "shape": [2], "datatype": "INT64", "data": [1, 2]}
    for path in ("/v2/models/mnist/infer", "/v2/models/mnist/versions/1.0/infer"):
        answer = _post(server, path, {"id": "mine", "inputs": [tensor]}).json()
        assert answer["outputs"] == [{"name": "x", "datatype": "INT64", "shape": [1], "data": [3]}], path
        assert answer["id"] == "mine"
    (output,) = json.loads(_post(server, "/predictions/mnist", {"inputs": [tensor]}).content)["outputs"]
    assert output["data"] == [3]


def test_kserves_second_protocol_is_answered_over_grpc(server: Server) -> None:
    request = pb.ModelInferRequest(model_name="mnist")
    request.inputs.add(name="x", datatype="INT64", shape=[2]).contents.int64_contents.extend([4, 5])
    with grpc.insecure_channel(server.grpc_target) as channel:
        (output,) = GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=_TIMEOUT_S).outputs
    assert list(output.contents.int64_contents) == [9]


def test_it_is_ready_and_has_metrics_and_names_what_has_no_effect(server: Server) -> None:
    assert plain_http.get(f"{server.url}/v2/health/ready", timeout=_TIMEOUT_S).status_code == 200
    assert plain_http.get(f"{server.url}/ping", timeout=_TIMEOUT_S).json() == {"status": "Healthy"}
    metrics = plain_http.get(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=_TIMEOUT_S).text
    assert 'torch_stream_handler_workers{model="mnist"' in metrics
    for line in (
        "metrics_format: ignored: TorchServe 0.12 does not know it either",
        "number_of_netty_threads: ignored: internal to TorchServe",
        f"MLSERVER_HTTP_PORT: {server.http_port} from the environment is used instead of 8085",
    ):
        assert line in server.log.splitlines()
