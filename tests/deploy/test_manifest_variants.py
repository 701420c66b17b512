"""The manifests for two nodes, the endpoint picker and Seldon's variants: their parts know each other."""

from __future__ import annotations

import json

from mlserver_torch_stream.server.options import read_options
from tests.deploy import manifests
from tests.deploy.manifests import EXIT_S

_GPU_RUNTIME = "kserve/cluster-serving-runtime-gpu.yaml"
_TWO_NODES = "kserve/cluster-serving-runtime-two-nodes.yaml"


def test_the_runtime_for_two_nodes_starts_a_rank_for_each_gpu_of_both() -> None:
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
    assert settings["tensor_parallel_size"] == worker["pipelineParallelSize"] * worker["tensorParallelSize"]
    words = [" ".join([*each["command"], *each["args"]]) for each in (head, follower)]
    assert words[1] == words[0].replace("--node-rank 0", "--node-rank 1").replace("POD_IP", "HEAD_SVC")
    assert f"--nnodes {worker['pipelineParallelSize']} " in words[0]


def test_torchrun_leaves_the_ranks_the_time_to_drain() -> None:
    (container,) = manifests.load(_TWO_NODES)["spec"]["containers"]
    options = read_options(manifests.environment(container))
    seconds = float(container["args"][container["args"].index("--shutdown-timeout") + 1])
    assert options.drain_delay + options.drain_grace + EXIT_S <= seconds
    predictor = manifests.load("kserve/inference-service-two-nodes.yaml")["spec"]["predictor"]
    before = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    for pod in (predictor, predictor["workerSpec"]):
        assert before + seconds <= pod["terminationGracePeriodSeconds"]


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
