"""Reads TorchServe's ``config.properties``, its command line and its environment variables.

The file is for a whole TorchServe: it is read when a model is imported, not by our server.

``properties`` reads the file's syntax and what it says of one model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.handlers.config.model_config import KEYS

# A key of the whole server that is a default of every model: its name as a model's own setting.
CARRIED = {
    "default_response_timeout": "responseTimeout",
    "default_startup_timeout": "startupTimeout",
    "default_workers_per_model": "minWorkers",
    "job_queue_size": "jobQueueSize",
}
METRICS_CONFIG = "metrics_config"  # a file, which is copied beside each model's settings
MODEL_SNAPSHOT = "model_snapshot"  # which archives to load, with the settings of each, as JSON
_MODELS = "models"  # settings by model and version, as JSON
_OF_MODELS_ONLY = ("marName", "defaultVersion")  # here the model's folder has both
_ADDRESS = "settings.json: host, http_port, grpc_port"
_TLS = "the environment: MLSERVER_TORCH_STREAM_TLS_CERT_FILE, MLSERVER_TORCH_STREAM_TLS_KEY_FILE"
_MANAGED = "the environment: MLSERVER_TORCH_STREAM_MANAGEMENT_PORT_TORCHSERVE and those beside it"
_INSIDE = "TorchServe's own machinery"
_WHERE = {
    _ADDRESS: "inference_address grpc_inference_address grpc_inference_port",
    "settings.json: metrics_port": "metrics_address enable_metrics_api",
    _MANAGED: "management_address enable_model_api",
    "the management API is served over REST alone, at management_address": (
        "grpc_management_address grpc_management_port"
    ),
    "the environment: MLSERVER_TORCH_STREAM_MAX_BODY_BYTES; for gRPC, settings.json: grpc_max_message_length": (
        "max_request_size"
    ),
    "streams have no bound, a whole response 1 GiB": "max_response_size",
    "settings.json: cors_settings": "cors_allowed_origin cors_allowed_methods cors_allowed_headers",
    "deviceIds of the model, or CUDA_VISIBLE_DEVICES": "number_of_gpu",
    "the environment: TS_DECODE_INPUT_REQUEST": "decode_input_request",
    "the environment: TS_REQUEST_SEQUENCE_ID, TS_REQUEST_SEQUENCE_START, TS_REQUEST_SEQUENCE_END": (
        "ts_header_key_sequence_id ts_header_key_sequence_start ts_header_key_sequence_end"
    ),
    "parameters.extra.limit_max_image_pixels": "limit_max_image_pixels",
    "parameters.extra.service_envelope, or `envelope` in the archive's manifest": "service_envelope",
    "an archive names its handler": "default_service_handler",
    "parameters.extra.install_py_dep_per_model": "install_py_dep_per_model",
    "each model has a folder with a model-settings.json": "load_models model_store model_snapshot",
    _TLS: "keystore keystore_pass keystore_type certificate_file private_key_file enable_grpc_ssl",
    "the environment: MLSERVER_TORCH_STREAM_DISABLE_TOKEN_AUTHORIZATION, of the management API alone": (
        "disable_token_authorization"
    ),
    "a token does not expire": "token_expiration_min",
    "the environment: MLSERVER_TORCH_STREAM_ALLOWED_URLS": "allowed_urls use_env_allowed_urls",
    "parameters.extra.blacklist_env_vars": "blacklist_env_vars",
    "variables of TorchServe are not read": "enable_envvars_config",
    "each of a handler's metrics is shown on metrics_port": "metrics_mode model_metrics_auto_detect",
    "host metrics are the node exporter's": "disable_system_metrics system_metrics_cmd metric_time_interval",
    "MLServer's logging": "async_logging debug",
    "workflows are not carried over": "workflow_store",
    "the C++ backend is not carried over": "cpp_log_config",
    "the handler's own matter": "ipex_enable ipex_gpu_enable cpu_launcher_enable cpu_launcher_args",
    "V2 is what MLServer speaks": "ts_open_inference_protocol",
    _INSIDE: (
        "vmargs plugins_path model_server_home prefer_direct_buffer number_of_netty_threads netty_client_threads "
        "use_native_io io_ratio initial_worker_port initial_distribution_port unregister_model_timeout version "
        "grpc_inference_max_connection_age_ms grpc_inference_max_connection_age_grace_ms "
        "grpc_management_max_connection_age_ms grpc_management_max_connection_age_grace_ms"
    ),
}
ELSEWHERE = {key: where for where, keys in _WHERE.items() for key in keys.split()}
_LINE_END, _BLANKS = re.compile(r"\r\n|\r|\n"), " \t\f"  # the line ends and blanks that Java knows
_ENTRY = re.compile(r"(?P<key>(?:\\.|[^\\=: \t\f])+)[ \t\f]*[=:]?[ \t\f]*(?P<value>.*)")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)")
_ESCAPED = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def read_properties_file(file: Path) -> dict[str, str]:
    """In UTF-8, with or without its mark at the beginning, else in Latin-1, as Java reads it. Raises SettingsError."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read {file}: {error}") from None
    try:
        return read_properties(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return read_properties(content.decode("latin-1"))


def read_properties(text: str) -> dict[str, str]:
    """Reads the text as Java does: with comments, continued lines and escapes. Raises SettingsError."""
    found = {}
    lines = iter(_LINE_END.split(text))
    for line in lines:
        entry = line.lstrip(_BLANKS)
        if not entry or entry[0] in "#!":
            continue
        while (len(entry) - len(entry.rstrip("\\"))) % 2:
            entry = entry[:-1] + next(lines, "").lstrip(_BLANKS)
        match = _ENTRY.fullmatch(entry)
        if match:
            found[_unescaped(match["key"])] = _unescaped(match["value"])
    return found


def carried(properties: Mapping[str, str], model: str, version: str | None, yaml: Mapping[str, Any]) -> dict[str, Any]:
    """The keys for ``parameters.extra`` of a model: its own settings, else the defaults of all models.

    A key of the model's YAML is left out. Raises SettingsError.
    """
    extra: dict[str, Any] = {}
    for key, name in CARRIED.items():
        if key in properties and (number := whole_number(key, properties[key])):  # 0: TorchServe chooses
            extra[name] = number
    extra |= own_keys(_own(properties, model, version))
    return {key: value for key, value in extra.items() if yaml.get(key) is None}


def not_carried_over(properties: Mapping[str, str], model: str, version: str | None) -> Iterator[str]:
    """One line for each key that is not carried over."""
    for key in properties:
        if key not in (*CARRIED, METRICS_CONFIG, _MODELS):
            yield f"{key}: {ELSEWHERE.get(key, 'TorchServe 0.12 does not know it either')}"
    for key in _own(properties, model, version):
        if key not in KEYS and key not in _OF_MODELS_ONLY:
            yield f"{_MODELS}.{model}.{key}: not a setting of a model"


def _own(properties: Mapping[str, str], model: str, version: str | None) -> dict[str, Any]:
    """The settings of the archive's version, or of the only version if the archive names none."""
    versions = settings_by_version(_MODELS, properties.get(_MODELS, "{}")).get(model, {})
    if version is None:
        return dict(next(iter(versions.values()))) if len(versions) == 1 else {}
    return dict(versions.get(version, {}))


def default_of_models(properties: Mapping[str, str], model: str, version: str) -> bool:
    """Whether ``models`` names this version the default one."""
    return _own(properties, model, version).get("defaultVersion") is True


def settings_by_version(key: str, value: str) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Reads ``models``, or those of ``model_snapshot``: model -> version -> settings. Raises SettingsError."""
    try:
        document = json.loads(value)
        models = document["models"] if key == MODEL_SNAPSHOT else document
        return {
            model: {version: {**settings} for version, settings in versions.items()}
            for model, versions in models.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise SettingsError(f"config.properties: {key}: must be a JSON object of models and their versions") from None


def own_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of one model, without numbers below 1, which TorchServe takes for its own default."""
    left_out = {key for key, value in settings.items() if type(value) is int and value < 1}
    return {key: value for key, value in settings.items() if key in KEYS and key not in left_out}


def whole_number(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise SettingsError(f"config.properties: {key}: must be a whole number, got {value!r}") from None


def _unescaped(text: str) -> str:
    def plain(match: re.Match[str]) -> str:
        escaped = match[1]
        return chr(int(escaped[1:], 16)) if len(escaped) > 1 else _ESCAPED.get(escaped, escaped)

    unescaped = _ESCAPE.sub(plain, text)
    try:
        return unescaped.encode("utf-16", "surrogatepass").decode("utf-16")  # two escapes may be one character
    except UnicodeDecodeError:
        raise SettingsError(f"config.properties: {text!r}: half of a character is missing") from None


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
