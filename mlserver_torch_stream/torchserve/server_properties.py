"""Reads the configuration of a whole TorchServe: its file, its command line and its environment variables.

Knows nothing of archives. ``properties`` reads the file's syntax and what it says of one model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.torchserve.properties import ELSEWHERE, read_properties_file

_BY_VARIABLES = "enable_envvars_config"
_ALLOWED_URLS, _ALLOWED_BY_VARIABLE = "allowed_urls", "use_env_allowed_urls"
# TorchServe reads no variable of these keys.
_FILE_ONLY = {
    "enable_envvars_config",
    "io_ratio",
    "metric_time_interval",
    "model_snapshot",
    "models",
    "plugins_path",
    "system_metrics_cmd",
    "use_env_allowed_urls",
    "use_native_io",
    "version",
    "vmargs",
}
TLS = "TLS ends at the ingress, or is switched on by MLSERVER_TORCH_STREAM_TLS_CERT_FILE and …_TLS_KEY_FILE"
REFUSED = {
    "keystore": TLS,
    "keystore_pass": TLS,
    "keystore_type": TLS,
    "certificate_file": TLS,
    "private_key_file": TLS,
    "enable_grpc_ssl": TLS,  # unless false
}
# Key -> what it sets here.
HONOURED = {
    "inference_address": "MLServer's host and REST port",
    "metrics_address": "the port of the metrics, on the host of inference_address",
    "enable_metrics_api": "false: no metrics",
    "metrics_mode": "prometheus: the metrics under TorchServe's names too",
    "grpc_inference_port": "the port of TorchServe's gRPC service, 7070 without it",
    "grpc_inference_address": "the host of inference_address, and a line where it is another one",
    "max_request_size": "the largest body over REST, the largest message over gRPC",
    "cors_allowed_origin": "MLServer's cors_settings",
    "cors_allowed_methods": "MLServer's cors_settings",
    "cors_allowed_headers": "MLServer's cors_settings",
    "number_of_gpu": "CUDA_VISIBLE_DEVICES: the first that are visible",
    "decode_input_request": "the environment: TS_DECODE_INPUT_REQUEST",
    "ts_header_key_sequence_id": "the environment: TS_REQUEST_SEQUENCE_ID",
    "ts_header_key_sequence_start": "the environment: TS_REQUEST_SEQUENCE_START",
    "ts_header_key_sequence_end": "the environment: TS_REQUEST_SEQUENCE_END",
    "default_response_timeout": "each model's responseTimeout",
    "default_startup_timeout": "each model's startupTimeout",
    "default_workers_per_model": "each model's minWorkers; without it, 1",
    "job_queue_size": "each model's jobQueueSize",
    "metrics_config": "each model's metrics_config",
    "service_envelope": "each model's envelope; with kserve or kservev2 a body of either protocol is understood",
    "limit_max_image_pixels": "each handler's system_properties",
    "blacklist_env_vars": "variables of the server that workers do not see, by their whole names",
    "install_py_dep_per_model": "true: pip installs an archive's requirements into its unpacked folder",
    "models": "what it says of a model's version, where the archive's YAML does not say it",
    "model_snapshot": "the archives to load and what it says of each, which beats the archive's YAML",
    "load_models": "all, none, or names of archives, each with or without a model's name before it",
    "model_store": "where the archives are",
    "management_address": "the management API's address, if a token is there or none needed, and no other has the port",
    "grpc_management_port": "the same API over gRPC, on the host of management_address",
    "enable_model_api": "true: the management API registers and unregisters models",
    "allowed_urls": "patterns of URLs that the management API downloads archives from; without it, none",
    "disable_token_authorization": "true: the management API needs no token",
    "enable_envvars_config": "true: TS_ variables beat the file and the command line",
    "use_env_allowed_urls": "true: TS_ALLOWED_URLS is read",
}
_READ_BY_MODELS = ("TS_DECODE_INPUT_REQUEST", "TS_METRICS_CONFIG")  # in any case
_REFERENCE = re.compile(r"\$\$([^$]+)\$\$")


def read_server_properties(
    file: Path | None, arguments: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """``arguments``: keys from the command line, which beat the file. Variables beat both where they are enabled.

    Raises SettingsError: also for a key that is refused.
    """
    given = read_properties_file(file) if file is not None else {}
    found = {key: _resolved(key, value, environ) for key, value in given.items()} | dict(arguments)
    if is_true(found, _BY_VARIABLES):
        found |= {key: environ[name] for key, name in _variables(found).items() if name in environ}
    for key, why in REFUSED.items():
        if key in found and not (key == "enable_grpc_ssl" and not is_true(found, key)):
            raise SettingsError(f"config.properties: {key}: is not implemented: {why}")
    return {key: value.strip() for key, value in found.items()}


def is_true(properties: Mapping[str, str], key: str, default: bool = False) -> bool:
    """As Java reads a boolean: true in any case of letters, and nothing else."""
    given = properties.get(key)
    return default if given is None else given.strip().lower() == "true"


def ignored(properties: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """One line for each key, and for each variable of TorchServe, that has no effect."""
    for key in properties:
        if key not in HONOURED and key not in REFUSED:
            yield f"{key}: ignored: {ELSEWHERE.get(key, 'TorchServe 0.12 does not know it either')}"
    if not is_true(properties, "disable_token_authorization"):
        yield "token authorization: it is not disabled, but here the management API alone needs a token"
    for key, name in _all_variables().items():
        if name in _READ_BY_MODELS:
            continue
        if name in environ and not (is_true(properties, _BY_VARIABLES) and key in _variables(properties)):
            switch = _ALLOWED_BY_VARIABLE if key == _ALLOWED_URLS else _BY_VARIABLES
            yield f"{name}: ignored: {switch} is not true"


def _variables(properties: Mapping[str, str]) -> dict[str, str]:
    """Key -> the variable that sets it."""
    found = _all_variables()
    if not is_true(properties, _ALLOWED_BY_VARIABLE):
        del found[_ALLOWED_URLS]
    return found


def _all_variables() -> dict[str, str]:
    own = {"token_expiration_min": "TS_TOKEN_EXPIRATION_TIME_MIN"}
    keys = (key for key in {**HONOURED, **REFUSED, **ELSEWHERE} if key not in _FILE_ONLY)
    return {key: own.get(key, f"TS_{key.removeprefix('ts_').upper()}") for key in keys}


def _resolved(key: str, value: str, environ: Mapping[str, str]) -> str:
    """The value with the variables in it that are written ``$$NAME$$``."""

    def variable(match: re.Match[str]) -> str:
        if match[1] not in environ:
            raise SettingsError(f"config.properties: {key}: no variable {match[1]} in the environment")
        return environ[match[1]]

    return _REFERENCE.sub(variable, value)
