"""Turns TorchServe's configuration of a server into environment variables of MLServer and of this package.

A variable of MLServer that is set already wins, and a line says so.

It is opened only if the configuration names its address, and a token is set or not needed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.handlers.config.properties import TLS, is_true, whole_number

_ADDRESS = re.compile(r"(?P<scheme>https?)://(?P<host>[^:/]+)(?::(?P<port>\d+))?/?", re.IGNORECASE)
_METRICS_ENDPOINT = "MLSERVER_METRICS_ENDPOINT"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LOCAL = "127.0.0.1"
_GRPC_VARIABLE, _GRPC_PORTS = "MLSERVER_GRPC_PORT", (8081, *range(8083, 8087))  # the first of no other endpoint
_OWN_GRPC_VARIABLE, _USUAL_GRPC_PORT = "MLSERVER_TORCH_STREAM_GRPC_PORT_TORCHSERVE", "7070"
_NAMES_VARIABLE = "MLSERVER_TORCH_STREAM_TORCHSERVE_METRIC_NAMES"
# Settings of the server that suit handlers, streams and a model store.
_FIXED = {
    "MLSERVER_PARALLEL_WORKERS": "0",
    "MLSERVER_GZIP_ENABLED": "false",
    "MLSERVER_DEBUG": "false",
    "MLSERVER_TORCH_STREAM_SKIP_FAILED_MODELS": "true",
    "MLSERVER_MODEL_REPOSITORY_IMPLEMENTATION": "mlserver_torch_stream.GuardedModelRepository",  # for keys and TLS
}
_UNNAMED = {*_FIXED, _GRPC_VARIABLE, _VISIBLE}  # set by no key, or computed from the variable itself
_PASSED_ON = {
    "decode_input_request": "TS_DECODE_INPUT_REQUEST",
    "ts_header_key_sequence_id": "TS_REQUEST_SEQUENCE_ID",
    "ts_header_key_sequence_start": "TS_REQUEST_SEQUENCE_START",
    "ts_header_key_sequence_end": "TS_REQUEST_SEQUENCE_END",
}
_CORS = {
    "cors_allowed_origin": "allow_origins",
    "cors_allowed_methods": "allow_methods",
    "cors_allowed_headers": "allow_headers",
}


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int


def server_environment(
    properties: Mapping[str, str], gpus: Callable[[], int], environ: Mapping[str, str] = os.environ
) -> tuple[dict[str, str], list[str]]:
    """The variables to set, and lines for the user. ``gpus``: the number of visible ones. Raises SettingsError."""
    wanted = {**_FIXED, **_addresses(properties), **_bounds(properties), **_cors(properties)}
    wanted |= {name: properties[key] for key, name in _PASSED_ON.items() if key in properties}
    if "number_of_gpu" in properties:
        most = whole_number("number_of_gpu", properties["number_of_gpu"])
        if most < 0:
            raise SettingsError(f"config.properties: number_of_gpu: must not be below 0, got {most}")
        wanted |= _visible(most, gpus, environ)
    lines = [
        f"{name}: {environ[name]}, as the environment says, not {value}"
        for name, value in wanted.items()
        if name not in _UNNAMED and environ.get(name, value) != value
    ]
    if properties.get("metrics_mode", "").lower() == "prometheus":
        wanted[_NAMES_VARIABLE] = "true"
    host = wanted["MLSERVER_HOST"]
    if properties.get("grpc_inference_address", host) != host:
        lines.append(f"grpc_inference_address: it is the host of inference_address, {host}")
    metrics = address(properties, "metrics_address", 8082)
    if metrics.host != wanted["MLSERVER_HOST"] and wanted.get(_METRICS_ENDPOINT) != "":
        lines.append(f"metrics_address: its host is that of inference_address, {wanted['MLSERVER_HOST']}")
    kept = {name: value for name, value in wanted.items() if name not in environ or name == _VISIBLE}
    return kept, lines


def address(properties: Mapping[str, str], key: str, usual: int, without_port: int = 0) -> Address:
    """The host and the port of a key. ``without_port``: the port of an address that names none.

    Raises SettingsError for what cannot be listened on here.
    """
    given = properties.get(key)
    if given is None:
        return Address(_LOCAL, usual)
    match = _ADDRESS.fullmatch(given)
    place = f"config.properties: {key}"
    if given.startswith("unix:"):
        raise SettingsError(f"{place}: a Unix socket is not implemented: give http://HOST:PORT")
    if match is None:
        raise SettingsError(f"{place}: must be http://HOST:PORT, got {given!r}")
    if match["scheme"].lower() == "https":
        raise SettingsError(f"{place}: https is not implemented: {TLS}")
    port = int(match["port"] or without_port or usual)
    if not 0 < port < 1 << 16:
        raise SettingsError(f"{place}: must have a port from 1 to 65535, got {given!r}")
    return Address(match["host"], port)


def _addresses(properties: Mapping[str, str]) -> dict[str, str]:
    inference = address(properties, "inference_address", 8080, 80)
    metrics = address(properties, "metrics_address", 8082)
    found = {
        "MLSERVER_HOST": inference.host,
        "MLSERVER_HTTP_PORT": str(inference.port),
        "MLSERVER_METRICS_PORT": str(metrics.port),
    }
    shown = is_true(properties, "enable_metrics_api", True)
    if not shown:
        found[_METRICS_ENDPOINT] = ""
    elif metrics.port == inference.port:
        raise SettingsError("config.properties: metrics_address: must have another port than inference_address")
    managed = address(properties, "management_address", 8081, 80).port if "management_address" in properties else 0
    grpc_port = whole_number("grpc_inference_port", properties.get("grpc_inference_port", _USUAL_GRPC_PORT))
    if not 0 < grpc_port < 1 << 16:
        raise SettingsError(f"config.properties: grpc_inference_port: must be from 1 to 65535, got {grpc_port}")
    found[_OWN_GRPC_VARIABLE] = str(grpc_port)
    taken = (inference.port, metrics.port, managed, grpc_port)
    found[_GRPC_VARIABLE] = str(next(port for port in _GRPC_PORTS if port not in taken))
    return found


def _bounds(properties: Mapping[str, str]) -> dict[str, str]:
    if "max_request_size" not in properties:
        return {}
    size = whole_number("max_request_size", properties["max_request_size"])
    if size < 1:
        raise SettingsError(f"config.properties: max_request_size: must be above 0, got {size}")
    return {"MLSERVER_TORCH_STREAM_MAX_BODY_BYTES": str(size), "MLSERVER_GRPC_MAX_MESSAGE_LENGTH": str(size)}


def _cors(properties: Mapping[str, str]) -> dict[str, str]:
    """None without an origin, as in TorchServe."""
    if not properties.get("cors_allowed_origin"):
        return {}
    lists = {name: [each.strip() for each in properties.get(key, "").split(",")] for key, name in _CORS.items()}
    return {"MLSERVER_CORS_SETTINGS": json.dumps({name: values for name, values in lists.items() if values != [""]})}


def _visible(most: int, gpus: Callable[[], int], environ: Mapping[str, str]) -> dict[str, str]:
    """The first ``most`` of the visible GPUs; no variable where no more are visible."""
    given = environ.get(_VISIBLE)
    visible = given.split(",") if given is not None else [str(number) for number in range(gpus())]
    return {_VISIBLE: ",".join(visible[:most])} if len(visible) > most else {}


_PREFIX = "MLSERVER_TORCH_STREAM_"
_TOKENS = (f"{_PREFIX}MANAGEMENT_TOKEN", f"{_PREFIX}MANAGEMENT_TOKEN_FILE")
_KEYS = ("management_address", "enable_model_api", "allowed_urls")


def management_environment(
    properties: Mapping[str, str], file: Path | None, environ: Mapping[str, str] = os.environ
) -> tuple[dict[str, str], list[str]]:
    """The variables to set, and lines for the user. ``file``: where the properties are from. Raises SettingsError."""
    why = _why_not(properties, environ)
    if why is not None:
        return {}, [f"{key}: ignored: {why}" for key in _KEYS if key in properties]
    managed = address(properties, "management_address", 8081, 80)
    wanted = {
        "MANAGEMENT_PORT_TORCHSERVE": str(managed.port),
        "MANAGEMENT_ADDRESS": managed.host,
        "ENABLE_MODEL_API": str(is_true(properties, "enable_model_api")).lower(),
        "MODEL_STORE": os.path.abspath(properties["model_store"]),
    }
    if file is not None:
        wanted["TORCHSERVE_CONFIG"] = str(file.absolute())
    if "allowed_urls" in properties:
        wanted["ALLOWED_URLS"] = properties["allowed_urls"]
    if is_true(properties, "disable_token_authorization"):
        wanted["DISABLE_TOKEN_AUTHORIZATION"] = "true"
    return {f"{_PREFIX}{name}": value for name, value in wanted.items() if f"{_PREFIX}{name}" not in environ}, []


def _why_not(properties: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    """Why the API is not opened; None if it is."""
    if "management_address" not in properties:
        return "there is no management_address"
    managed = address(properties, "management_address", 8081, 80)
    if managed.port == address(properties, "inference_address", 8080, 80).port:
        return "management_address has the port of inference_address: name another one"
    if not is_true(properties, "disable_token_authorization") and not any(name in environ for name in _TOKENS):
        return f"set {' or '.join(_TOKENS)}, or disable_token_authorization=true"
    return None
