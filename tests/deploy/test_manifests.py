"""The manifests match their CRDs, and their numbers fit each other and the server."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from mlserver_torch_stream.server.access.access_control import REPOSITORY
from mlserver_torch_stream.server.options import read_options
from mlserver_torch_stream.settings import parse_settings
from tests.deploy import manifests
from tests.deploy.manifests import DEPLOY, EXIT_S

# The folder with KServe's CustomResourceDefinitions: config/crd in its repository, one file per kind.
_CRDS = "KSERVE_CRDS"
_POD_GRACE_S = 30.0  # Kubernetes' own, where a pod names none
Validators = dict[str, jsonschema.protocols.Validator]
_GPU_RUNTIME = "kserve/cluster-serving-runtime-gpu.yaml"
_KSERVE_CONTAINERS = {"kserve": manifests.kserve_container(), "kserve-gpu": manifests.kserve_container(_GPU_RUNTIME)}
_TOKENS = {**_KSERVE_CONTAINERS, "kserve-llm": manifests.llm_container(), "seldon": manifests.seldon_container()}
_CONTAINERS = {**_TOKENS, "torchserve": manifests.torchserve_container()}

each_container = pytest.mark.parametrize("container", _CONTAINERS.values(), ids=_CONTAINERS)
each_of_tokens = pytest.mark.parametrize("container", _TOKENS.values(), ids=_TOKENS)


@pytest.fixture(scope="session")
def validators() -> Validators:
    """A validator for each of KServe's kinds that refuses unknown fields, which Kubernetes would silently drop."""
    folder = os.environ.get(_CRDS)
    if folder is None:
        pytest.skip(f"the environment variable {_CRDS} does not name the folder with KServe's CRDs")
    found = {}
    paths = sorted(Path(folder).glob("*.yaml"))
    assert paths, f"{_CRDS}: no CRDs in {folder}"
    for path in paths:
        definition = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        spec = definition["spec"]
        for version in spec["versions"]:
            key = f"{spec['group']}/{version['name']} {spec['names']['kind']}"
            found[key] = jsonschema.Draft202012Validator(_closed(version["schema"]["openAPIV3Schema"]))
    return found


def _closed(schema: Any) -> Any:
    """Returns the schema for jsonschema: no unknown fields, integers or strings where Kubernetes accepts both."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items() if key != "properties"}
    if isinstance(properties := schema.get("properties"), dict):
        closed["properties"] = {name: _closed(value) for name, value in properties.items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            closed.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
    return closed


def _errors(validators: Validators, manifest: Mapping[str, Any]) -> list[str]:
    checked = {key: value for key, value in manifest.items() if key != "metadata"}  # its own type, not the CRD's
    validator = validators[f"{manifest['apiVersion']} {manifest['kind']}"]
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(checked)]


_KSERVE = [(runtime, service) for runtime, all_of in manifests.KSERVE_RUNTIMES.items() for service in all_of]
_KSERVE_FILES = sorted({name for pair in _KSERVE for name in pair})
_SERVICES = [service for _, service in _KSERVE]
_LLM = ["kserve/llm-inference-service-config.yaml", *manifests.LLM_SERVICES]
_TORCHSERVE = ["kserve/torchserve-serving-runtime.yaml", "kserve/torchserve-inference-service.yaml"]
# Of each runtime that is proposed to KServe, its sample and the runtime of ours from which it differs a little.
_UPSTREAM = {
    "upstream/kserve/config/runtimes/kserve-gguf.yaml": (
        "upstream/kserve/docs/samples/v1beta1/gguf/gguf.yaml",
        "kserve/cluster-serving-runtime.yaml",
    ),
    "upstream/kserve/config/runtimes/kserve-mlserver-torchserve.yaml": (
        "upstream/kserve/docs/samples/v1beta1/torchserve/mlserver-torchserve.yaml",
        "kserve/torchserve-serving-runtime.yaml",
    ),
}
_UPSTREAM_FILES = [name for runtime, (sample, _) in _UPSTREAM.items() for name in (runtime, sample)]


@pytest.mark.parametrize("name", [*_KSERVE_FILES, *_LLM, *_TORCHSERVE, *_UPSTREAM_FILES])
def test_kserve_takes_the_manifest(validators: Validators, name: str) -> None:
    assert _errors(validators, manifests.load(name)) == []


@pytest.mark.parametrize("name", [*_KSERVE_FILES, *_LLM, *_TORCHSERVE, *_UPSTREAM_FILES])
def test_a_misspelled_field_anywhere_is_found(validators: Validators, name: str) -> None:
    manifest = manifests.load(name)
    places = [place for place in _objects(manifest["spec"]) if place]
    assert len(places) > 2
    missed = []
    for place in places:
        place["containerPorrt"] = "x"
        if not _errors(validators, manifest):
            missed.append(sorted(place))
        del place["containerPorrt"]
    # Maps whose keys are free: annotations, amounts of resources.
    assert all(any("/" in key for key in keys) or {"cpu", "memory"} < set(keys) for keys in missed), missed


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = [
            child for key, child in value.items() if key != "inline"
        ]  # another program's, which KServe leaves alone
    for child in value if isinstance(value, list) else ():
        yield from _objects(child)


def test_every_manifest_is_tested_here() -> None:
    upstream = [path for path in DEPLOY.glob("upstream/kserve/**/*.yaml") if "kustomization" not in path.name]
    paths = [*DEPLOY.glob("kserve/*.yaml"), *DEPLOY.glob("seldon/*.yaml"), *upstream]
    kinds = {str(path.relative_to(DEPLOY)): manifests.load(str(path)) for path in paths}
    assert {name: manifest["kind"] for name, manifest in kinds.items()} == {
        **dict.fromkeys(manifests.KSERVE_RUNTIMES, "ClusterServingRuntime"),
        **dict.fromkeys(_SERVICES, "InferenceService"),
        "kserve/llm-inference-service-config.yaml": "LLMInferenceServiceConfig",
        **dict.fromkeys(manifests.LLM_SERVICES, "LLMInferenceService"),
        "kserve/torchserve-serving-runtime.yaml": "ClusterServingRuntime",
        "kserve/torchserve-inference-service.yaml": "InferenceService",
        "seldon/server-config.yaml": "ServerConfig",
        **dict.fromkeys(manifests.SELDON_SERVERS, "Server"),
        "seldon/model-autoscaling.yaml": "ScaledObject",
        "seldon/model.yaml": "Model",
        **dict.fromkeys(_UPSTREAM, "ClusterServingRuntime"),
        **{sample: "InferenceService" for sample, _ in _UPSTREAM.values()},
    }


@each_of_tokens
def test_nothing_in_the_environment_hinders_streams(container: Mapping[str, Any]) -> None:
    environment = manifests.environment(container)
    assert environment["MLSERVER_PARALLEL_WORKERS"] == "0"
    assert environment["MLSERVER_GZIP_ENABLED"] == "false"
    assert environment["MLSERVER_DEBUG"] == "false"


@each_container
def test_ports_of_the_environment_are_the_container_s(container: Mapping[str, Any]) -> None:
    environment = manifests.environment(container)
    assert environment["MLSERVER_HOST"] == "0.0.0.0"
    named = {environment[f"MLSERVER_{role}_PORT"] for role in ("HTTP", "GRPC", "METRICS")}
    assert {str(port["containerPort"]) for port in container["ports"]} == named and len(named) == 3


@each_container
def test_probes_ask_the_server(container: Mapping[str, Any]) -> None:
    http_port = manifests.environment(container)["MLSERVER_HTTP_PORT"]
    for probe, path in (("readinessProbe", "/v2/health/ready"), ("livenessProbe", "/v2/health/live")):
        port = container[probe]["httpGet"]["port"]
        assert container[probe]["httpGet"]["path"] == path
        assert str(port if isinstance(port, int) else manifests.port_of(container, port)) == http_port
    assert container["startupProbe"]["httpGet"]["path"].startswith("/v2/health/")


@pytest.mark.parametrize("name", [*manifests.KSERVE_RUNTIMES, _TORCHSERVE[0]])
def test_kserve_scrapes_the_port_on_which_the_metrics_are(name: str) -> None:
    spec = manifests.load(name)["spec"]
    annotations = spec["annotations"]
    port = manifests.environment(spec["containers"][0])["MLSERVER_METRICS_PORT"]
    assert annotations["prometheus.io/port"] == annotations["prometheus.kserve.io/port"] == port


def test_seldon_scrapes_the_port_on_which_the_metrics_are() -> None:
    container = manifests.seldon_container()
    port = manifests.environment(container)["MLSERVER_METRICS_PORT"]
    assert str(manifests.port_of(container, "server-metrics")) == port


@pytest.mark.parametrize(("runtime", "service"), [*_KSERVE, _TORCHSERVE])
def test_kserve_leaves_the_server_the_time_to_drain(runtime: str, service: str) -> None:
    (container,) = manifests.load(runtime)["spec"]["containers"]
    options = read_options(manifests.environment(container))
    predictor = manifests.load(service)["spec"]["predictor"]
    before = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    needed = before + options.drain_delay + options.drain_grace + EXIT_S
    assert needed <= predictor["terminationGracePeriodSeconds"]


def test_seldon_leaves_the_server_the_time_to_drain() -> None:
    options = read_options(manifests.environment(manifests.seldon_container()))
    grace = manifests.load("seldon/server-config.yaml")["spec"]["podSpec"]["terminationGracePeriodSeconds"]
    assert options.drain_delay + options.drain_grace + EXIT_S <= grace / 2  # the agent's draining comes first


def test_seldon_s_parts_know_each_other() -> None:
    config, server, model = (manifests.load(f"seldon/{name}.yaml") for name in ("server-config", "server", "model"))
    assert server["spec"]["serverConfig"] == config["metadata"]["name"]
    assert set(model["spec"]["requirements"]) <= set(server["spec"]["capabilities"])
    pod = config["spec"]["podSpec"]
    agent = next(manifests.environment(each) for each in pod["containers"] if each["name"] == "agent")
    own = manifests.environment(manifests.seldon_container())
    for role in ("HTTP", "GRPC"):
        assert agent[f"SELDON_SERVER_{role}_PORT"] == own[f"MLSERVER_{role}_PORT"]
    volumes = {volume["name"] for volume in (*pod["volumes"], *config["spec"]["volumeClaimTemplates"])}
    for each in pod["containers"]:
        assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
        assert each["lifecycle"]["preStop"]["httpGet"]["port"] == int(agent["SELDON_DRAINER_PORT"])


@pytest.mark.parametrize(("runtime_file", "service_file"), _KSERVE)
def test_the_runtime_that_the_service_names_is_ours(runtime_file: str, service_file: str) -> None:
    runtime, service = manifests.load(runtime_file), manifests.load(service_file)
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    formats = [each["name"] for each in runtime["spec"]["supportedModelFormats"]]
    assert model["modelFormat"]["name"] in formats
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert manifests.SERVER_TYPE not in runtime["metadata"].get("annotations", {})


_SETTINGS = {
    "kserve/inference-service.yaml": {"max_num_seqs": 16, "tensor_parallel_size": 1, "device_map": None},
    "kserve/inference-service-gguf.yaml": {"max_num_seqs": 16, "weights": "packed"},
    "kserve/inference-service-autoscaling.yaml": {"max_num_seqs": 16},
    "kserve/inference-service-keys.yaml": {"max_num_seqs": 16},
    "kserve/inference-service-gpu.yaml": {"max_num_seqs": 64, "tensor_parallel_size": 1, "vllm": {}},
    "kserve/inference-service-device-map.yaml": {"tensor_parallel_size": 1, "device_map": "auto", "vllm": None},
    "kserve/inference-service-tensor-parallel.yaml": {"tensor_parallel_size": 2, "vllm": {}},
    "kserve/inference-service-two-nodes.yaml": {
        "tensor_parallel_size": 4,
        "vllm": {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"},
    },
}


@pytest.mark.parametrize("name", _SERVICES)
def test_the_service_s_settings_are_accepted(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    environment = {**manifests.kserve_environment(manifests.load(name)), "MLSERVER_MODEL_URI": str(tmp_path)}
    settings = parse_settings(environ=environment).settings
    assert {key: getattr(settings, key) for key in _SETTINGS[name]} == _SETTINGS[name]


def test_the_runtime_for_gpus_differs_in_what_a_gpu_needs() -> None:
    for_cpus, for_gpus, _ = (manifests.load(name) for name in manifests.KSERVE_RUNTIMES)
    gpu, cpu = for_gpus["spec"]["containers"][0], for_cpus["spec"]["containers"][0]
    assert gpu.pop("image") == f"{cpu.pop('image')}-gpu"
    assert gpu.pop("resources")["limits"]["nvidia.com/gpu"] == "1" and cpu.pop("resources")
    for_vllm = {"MLSERVER_TORCH_STREAM_VLLM_PYTHON", "VLLM_CACHE_ROOT"}
    gpu["env"] = [each for each in gpu["env"] if each["name"] not in for_vllm]
    (shared,) = [mount for mount in gpu["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    gpu["volumeMounts"].remove(shared)
    (volume,) = [each for each in for_gpus["spec"]["volumes"] if each["name"] == shared["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    for_gpus["spec"]["volumes"].remove(volume)
    assert for_gpus["spec"] == for_cpus["spec"]


def test_a_model_that_is_split_has_a_gpu_for_each_part() -> None:
    for name in ("device-map", "tensor-parallel"):
        service = manifests.load(f"kserve/inference-service-{name}.yaml")
        resources = service["spec"]["predictor"]["model"]["resources"]
        assert resources["requests"] == resources["limits"]
        gpus = int(resources["limits"]["nvidia.com/gpu"])
        settings = json.loads(manifests.kserve_environment(service)["MLSERVER_MODEL_EXTRA"])
        assert gpus == settings.get("tensor_parallel_size", 2) > 1


@pytest.mark.parametrize("name", manifests.LLM_SERVICES)
def test_the_llm_inference_service_is_served_by_ours(name: str) -> None:
    config, service = manifests.load(_LLM[0]), manifests.load(name)
    assert service["spec"]["baseRefs"] == [{"name": config["metadata"]["name"]}]
    container = manifests.llm_container()
    assert container["name"] == service["spec"]["template"]["containers"][0]["name"] == "main"
    assert manifests.environment(container)["MLSERVER_HTTP_PORT"] == "8000"  # KServe's routes lead there
    assert {container[probe]["httpGet"]["scheme"] for probe in container if probe.endswith("Probe")} == {"HTTP"}
    options = read_options(manifests.environment(container))
    before = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = config["spec"]["template"]["terminationGracePeriodSeconds"]
    assert before + options.drain_delay + options.drain_grace + EXIT_S <= grace


@each_of_tokens
def test_keys_are_put_before_every_port(container: Mapping[str, Any]) -> None:
    assert manifests.environment(container)["MLSERVER_MODEL_REPOSITORY_IMPLEMENTATION"] == REPOSITORY


def _keyed() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the pod and the container of each manifest that has keys."""
    predictor = manifests.load("kserve/inference-service-keys.yaml")["spec"]["predictor"]
    pod = manifests.load("seldon/server-keys.yaml")["spec"]["podSpec"]
    return [(predictor, predictor["model"]), (pod, pod["containers"][0])]


@pytest.mark.parametrize(("pod", "container"), _keyed(), ids=["kserve", "seldon"])
def test_the_file_of_keys_is_mounted_where_the_server_looks_for_it(
    pod: Mapping[str, Any], container: Mapping[str, Any]
) -> None:
    (mount,) = container["volumeMounts"]
    (volume,) = pod["volumes"]
    assert volume["name"] == mount["name"] and volume["secret"]["secretName"] and mount["readOnly"]
    file = manifests.environment(container)["MLSERVER_TORCH_STREAM_API_KEYS_FILE"]
    assert file == f"{mount['mountPath']}/keys"


@each_of_tokens
def test_the_server_s_folder_is_not_the_model_s(container: Mapping[str, Any]) -> None:
    """MLServer puts its folder first on Python's path, so that files of the model could be imported."""
    program, verb, folder = [*container["command"], *container.get("args", ())]
    assert (program, verb) == ("mlserver", "start")
    assert folder != manifests.environment(container).get("MLSERVER_MODEL_URI")


@pytest.mark.parametrize("name", _UPSTREAM)
def test_what_is_proposed_to_kserve_starts_the_server_as_ours_does(name: str) -> None:
    sample, ours = (manifests.load(each) for each in _UPSTREAM[name])
    proposed = manifests.load(name)
    model, spec = sample["spec"]["predictor"]["model"], proposed["spec"]
    assert model["runtime"] == proposed["metadata"]["name"]
    assert model["modelFormat"]["name"] in [each["name"] for each in spec["supportedModelFormats"]]
    assert model["protocolVersion"] in spec["protocolVersions"]
    (theirs,), (own,) = spec["containers"], ours["spec"]["containers"]
    assert (theirs["command"], theirs.get("args")) == (own["command"], own.get("args"))
    variables, expected = manifests.environment(theirs), manifests.environment(own)
    differing = {key for key in variables if variables[key] != expected[key]}
    assert differing <= {f"MLSERVER_TORCH_STREAM_{each}" for each in ("DRAIN_DELAY", "DRAIN_GRACE", "CACHE")} | {
        "HF_HOME"
    }
    assert set(expected) - set(variables) <= {"MLSERVER_LOAD_MODELS_AT_STARTUP"}  # KServe's default is MLServer's
    options = read_options(variables)
    assert options.drain_delay + options.drain_grace + EXIT_S <= _POD_GRACE_S


@pytest.mark.parametrize("name", _UPSTREAM)
def test_kserve_s_kustomization_would_name_the_runtime_and_its_image(name: str) -> None:
    kustomization = manifests.load("upstream/kserve/config/runtimes/kustomization-images.yaml")
    (image,) = kustomization["images"]
    (container,) = manifests.load(name)["spec"]["containers"]
    assert container["image"] == f"{image['name']}:replace"
    assert name.rpartition("/")[2] in kustomization["resources"]


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
    words = shlex.split(start)
    joined = f'RAY_ADDRESS="{words[words.index("--node-ip-address") + 1]}:{words[words.index("--port") + 1]}"'
    assert (head["command"], server) == (["/bin/sh", "-c"], f"exec env {joined} mlserver start /etc/mlserver")
    assert [each["name"] for each in spec["supportedModelFormats"]] == ["huggingface"]
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
