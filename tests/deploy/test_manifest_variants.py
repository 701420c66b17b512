"""The manifests for two nodes, the endpoint picker and Seldon's variants: their parts know each other."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from mlserver_torch_stream.server.options import read_options
from tests.deploy import manifests
from tests.deploy.manifests import EXIT_S

_GPU_RUNTIME = "kserve/cluster-serving-runtime-gpu.yaml"
_TWO_NODES = "kserve/cluster-serving-runtime-two-nodes.yaml"


def test_the_runtime_for_two_nodes_is_one_ray_cluster_with_a_rank_for_each_gpu() -> None:
    spec = manifests.load(_TWO_NODES)["spec"]
    worker, (head,) = spec["workerSpec"], spec["containers"]
    (follower,) = worker["containers"]
    service = manifests.load("kserve/inference-service-two-nodes.yaml")
    sizes = service["spec"]["predictor"]["workerSpec"]
    assert {key: sizes[key] for key in ("pipelineParallelSize", "tensorParallelSize")} == {
        key: worker[key] for key in ("pipelineParallelSize", "tensorParallelSize")
    }
    gpus = {
        str(each["resources"][kind]["nvidia.com/gpu"]) for each in (head, follower) for kind in ("requests", "limits")
    }
    assert gpus == {str(worker["tensorParallelSize"])}
    settings = json.loads(manifests.kserve_environment(service)["MLSERVER_MODEL_EXTRA"])
    assert settings["tensor_parallel_size"] == worker["tensorParallelSize"]
    assert settings["vllm"]["pipeline_parallel_size"] == worker["pipelineParallelSize"]
    assert settings["vllm"]["distributed_executor_backend"] == "ray"
    start, server = head["args"][0].split(" && ")
    ray = str(Path(manifests.environment(head)["MLSERVER_TORCH_STREAM_VLLM_PYTHON"]).with_name("ray"))
    assert (head["command"], server) == (["/bin/sh", "-c"], "exec mlserver start /etc/mlserver")
    words = shlex.split(start)
    assert words[:2] == follower["command"][:2] == [ray, "start"]
    port = words[words.index("--port") + 1]
    assert follower["command"][follower["command"].index("--address") + 1] == f"$(HEAD_SVC):{port}"
    assert "--head" in words and "--block" in follower["command"]
    assert all("--disable-usage-stats" in each for each in (words, follower["command"]))


def test_the_worker_s_node_lives_as_long_as_the_head_drains() -> None:
    (container,) = manifests.load(_TWO_NODES)["spec"]["containers"]
    options = read_options(manifests.environment(container))
    predictor = manifests.load("kserve/inference-service-two-nodes.yaml")["spec"]["predictor"]
    before = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    for pod in (predictor, predictor["workerSpec"]):
        needed = before + options.drain_delay + options.drain_grace + EXIT_S
        assert needed <= pod["terminationGracePeriodSeconds"]


def test_the_runtime_for_two_nodes_is_else_that_for_gpus() -> None:
    for_gpus, for_nodes = (manifests.load(name)["spec"] for name in (_GPU_RUNTIME, _TWO_NODES))
    (gpu,), (head,) = for_gpus["containers"], for_nodes["containers"]
    (follower,) = for_nodes["workerSpec"]["containers"]
    for name in ("image", "securityContext", "volumeMounts"):
        assert head[name] == follower[name] == gpu[name]
    assert for_nodes["workerSpec"]["volumes"] == for_nodes["volumes"] == for_gpus["volumes"]
    assert manifests.environment(head) == manifests.environment(gpu)
    assert manifests.environment(follower).items() <= manifests.environment(gpu).items()
    assert {key: head[key] for key in head if key.endswith("Probe")} == {
        key: gpu[key] for key in gpu if key.endswith("Probe")
    }


def test_the_picker_reads_engines_of_ours() -> None:
    spec = manifests.load(manifests.LLM_SERVICES[1])["spec"]
    picker = spec["router"]["scheduler"]["config"]["inline"]
    (reader,) = [each for each in picker["plugins"] if each["type"] == "core-metrics-extractor"]
    (engine,) = reader["parameters"]["engineConfigs"]
    assert reader["parameters"]["defaultEngine"] == engine["name"]
    assert spec["labels"][reader["parameters"]["engineLabelKey"]] == engine["name"]
    (profile,) = picker["schedulingProfiles"]
    assert {each["pluginRef"] for each in profile["plugins"]} <= {each["type"] for each in picker["plugins"]}


def test_seldon_s_variants_are_of_the_same_server_and_model() -> None:
    plain, scaled, keyed = (manifests.load(name) for name in manifests.SELDON_SERVERS)
    own = scaled["spec"].pop("minReplicas"), scaled["spec"].pop("maxReplicas"), keyed["spec"].pop("podSpec")
    assert plain == scaled == keyed and own[0] == 1 < own[1]
    scaler, model = (manifests.load(f"seldon/{name}.yaml") for name in ("model-autoscaling", "model"))
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"]) == (model["apiVersion"], model["kind"])
    assert target["name"] == model["metadata"]["name"]
    assert scaler["spec"]["maxReplicaCount"] <= own[1], "each copy of the model needs a pod"
