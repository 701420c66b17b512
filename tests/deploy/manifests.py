"""The manifests under deploy/, as Kubernetes, KServe and Seldon Core 2 transform them before a container starts.

Knows nothing of the server in the container.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
EXIT_S = 5.0  # the server's own bound for its exit
SERVER_TYPE = "serving.kserve.io/server-type"

Environment = dict[str, str]


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    return document


# Of each runtime of ours, the InferenceServices that ask for it.
KSERVE_RUNTIMES = {
    "kserve/cluster-serving-runtime.yaml": (
        "kserve/inference-service.yaml",
        "kserve/inference-service-gguf.yaml",
        "kserve/inference-service-autoscaling.yaml",
        "kserve/inference-service-keys.yaml",
    ),
    "kserve/cluster-serving-runtime-gpu.yaml": (
        "kserve/inference-service-gpu.yaml",
        "kserve/inference-service-device-map.yaml",
        "kserve/inference-service-tensor-parallel.yaml",
    ),
    "kserve/cluster-serving-runtime-two-nodes.yaml": ("kserve/inference-service-two-nodes.yaml",),
}
SELDON_SERVERS = ("seldon/server.yaml", "seldon/server-autoscaling.yaml", "seldon/server-keys.yaml")
LLM_SERVICES = ("kserve/llm-inference-service.yaml", "kserve/llm-inference-service-picker.yaml")


def kserve_container(runtime: str = "kserve/cluster-serving-runtime.yaml") -> dict[str, Any]:
    (container,) = load(runtime)["spec"]["containers"]
    return dict(container)


def llm_container() -> dict[str, Any]:
    (container,) = load("kserve/llm-inference-service-config.yaml")["spec"]["template"]["containers"]
    return dict(container)


def llm_environment(service: str = LLM_SERVICES[0]) -> Environment:
    """Returns the environment of the LLMInferenceService's container ``main``, with that of its base."""
    spec = load(service)["spec"]
    (own,) = spec["template"]["containers"]
    merged = {**environment(llm_container()), **environment(own)}
    return {key: value.replace("{{ .Spec.Model.Name }}", spec["model"]["name"]) for key, value in merged.items()}


def runtime_of(service: Mapping[str, Any]) -> str:
    """Returns the file of the runtime that the service names."""
    wanted = service["spec"]["predictor"]["model"]["runtime"]
    return next(name for name in KSERVE_RUNTIMES if load(name)["metadata"]["name"] == wanted)


def torchserve_container() -> dict[str, Any]:
    (container,) = load("kserve/torchserve-serving-runtime.yaml")["spec"]["containers"]
    return dict(container)


def torchserve_environment(protocol: str) -> Environment:
    """Returns the environment of an InferenceService's container for this protocolVersion.

    If the runtime's annotation says ``torchserve``, KServe (SetTorchServeDefaults in
    pkg/apis/serving/v1beta1/inference_service_defaults.go) sets a label for the protocol and adds a variable.
    """
    annotations = load("kserve/torchserve-serving-runtime.yaml")["metadata"]["annotations"]
    assert annotations[SERVER_TYPE] == "torchserve"
    label = "kserve" if protocol == "v1" else "kservev2"
    own = environment(torchserve_container())
    filled = {key: value.replace("{{.Labels.serviceEnvelope}}", label) for key, value in own.items()}
    return {**filled, "PROTOCOL_VERSION": protocol}


def seldon_container() -> dict[str, Any]:
    containers = load("seldon/server-config.yaml")["spec"]["podSpec"]["containers"]
    return next(container for container in containers if container["name"] == "mlserver")


def seldon_environment(server: str) -> Environment:
    """Returns the environment of the server's container.

    Seldon merges the server's podSpec over that of its ServerConfig, by name.
    """
    (own,) = load(server)["spec"].get("podSpec", {}).get("containers", [{}])
    return {**environment(seldon_container()), **environment(own)}


def environment(container: Mapping[str, Any]) -> Environment:
    """Returns the variables that have plain values."""
    return {each["name"]: each["value"] for each in container.get("env", ()) if "value" in each}


def port_of(container: Mapping[str, Any], name: str) -> int:
    return next(int(port["containerPort"]) for port in container["ports"] if port["name"] == name)


def kserve_environment(service: Mapping[str, Any], *, annotated: bool = False) -> Environment:
    """Returns the environment of an InferenceService's container.

    If the runtime's annotation, which ours lacks, says ``mlserver``, KServe
    (pkg/apis/serving/v1beta1/inference_service_defaults.go) adds variables that the service does not set. Then the
    service's variables are merged over those of the runtime, and {{.Name}} is filled in.
    """
    model = service["spec"]["predictor"]["model"]
    name = service["metadata"]["name"]
    own = environment(model)
    if annotated and ("storageUri" in model or "storage" in model):
        own = {"MLSERVER_MODEL_NAME": name, "MLSERVER_MODEL_URI": "/mnt/models", **own}
    elif annotated:
        own = {"MLSERVER_LOAD_MODELS_AT_STARTUP": "false", **own}
    merged = {**environment(kserve_container(runtime_of(service))), **own}
    return {key: value.replace("{{.Name}}", name) for key, value in merged.items()}
