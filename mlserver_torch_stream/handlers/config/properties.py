"""Parses ``config.properties``, and reads the settings of one model from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.handlers.config.model_config import KEYS

# Server-wide keys that are defaults of every model, each with the name of the model's own setting.
CARRIED = {
    "default_response_timeout": "responseTimeout",
    "default_startup_timeout": "startupTimeout",
    "default_workers_per_model": "minWorkers",
    "job_queue_size": "jobQueueSize",
}
METRICS_CONFIG = "metrics_config"  # the path of a file, which is copied next to each model's settings
MODEL_SNAPSHOT = "model_snapshot"  # JSON: the archives to load, each with its settings
_MODELS = "models"  # JSON: settings by model and version
MAR, DEFAULT_VERSION = "marName", "defaultVersion"  # here the model's folder says both
_ADDRESS = "settings.json: host, http_port, grpc_port"
_TLS = "the environment: MLSERVER_TORCH_STREAM_TLS_CERT_FILE, MLSERVER_TORCH_STREAM_TLS_KEY_FILE"
_MANAGED = "set by the environment: MLSERVER_TORCH_STREAM_MANAGEMENT_PORT_TORCHSERVE and the related variables"
_INSIDE = "internal to TorchServe"
_WHERE = {
    _ADDRESS: "inference_address grpc_inference_address grpc_inference_port",
    "settings.json: metrics_port": "metrics_address enable_metrics_api",
    _MANAGED: "management_address enable_model_api",
    "the management API is served only over REST, at management_address": (
        "grpc_management_address grpc_management_port"
    ),
    "the environment: MLSERVER_TORCH_STREAM_MAX_BODY_BYTES; for gRPC, settings.json: grpc_max_message_length": (
        "max_request_size"
    ),
    "streams have no bound; a whole response has a bound of 1 GiB": "max_response_size",
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
    "TorchServe's environment variables are not read": "enable_envvars_config",
    "all metrics of a handler are exported on metrics_port": "metrics_mode model_metrics_auto_detect",
    "the node exporter exports host metrics": "disable_system_metrics system_metrics_cmd metric_time_interval",
    "MLServer's logging": "async_logging debug",
    "workflows are not carried over": "workflow_store",
    "the C++ backend is not carried over": "cpp_log_config",
    "up to the handler": "ipex_enable ipex_gpu_enable cpu_launcher_enable cpu_launcher_args",
    "MLServer always speaks V2": "ts_open_inference_protocol",
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


def is_true(value: object) -> bool:
    """Parses a boolean as Java does: ``true`` in any case is true, and every other text is false."""
    return str(value).strip().lower() == "true"


def words(keys: str) -> frozenset[str]:
    """Returns the set of the words in ``keys``, which are separated by white space."""
    return frozenset(keys.split())


def read_properties_file(file: Path) -> dict[str, str]:
    """Returns the keys and values of a file. Raises SettingsError if the file cannot be read or parsed.

    The file is decoded as UTF-8, with or without a byte order mark; if it is not UTF-8, as Latin-1, as Java reads it.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read {file}: {error}") from None
    try:
        return read_properties(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return read_properties(content.decode("latin-1"))


def read_properties(text: str) -> dict[str, str]:
    """Parses comments, continued lines and escapes as Java does. Raises SettingsError for half a surrogate pair."""
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
    """Returns a model's keys for ``parameters.extra``: the model's own settings, then the server's defaults.

    Keys that the model's YAML sets are left out, since the YAML overrides the file. Raises SettingsError.
    """
    extra: dict[str, Any] = {}
    for key, name in CARRIED.items():
        if key in properties and (number := whole_number(key, properties[key])):  # 0 lets TorchServe choose
            extra[name] = number
    extra |= model_keys(own_settings(properties, model, version))
    return {key: value for key, value in extra.items() if yaml.get(key) is None}


def not_carried_over(properties: Mapping[str, str], model: str, version: str | None) -> Iterator[str]:
    """Yields one line for each key that has no place in the model's settings; the line says where it belongs."""
    for key in properties:
        if key not in (*CARRIED, METRICS_CONFIG, _MODELS):
            yield f"{key}: {ELSEWHERE.get(key, 'TorchServe 0.12 does not know it either')}"
    for key in own_settings(properties, model, version):
        if key not in KEYS and key not in (MAR, DEFAULT_VERSION):
            yield f"{_MODELS}.{model}.{key}: not a setting of a model"


def own_settings(properties: Mapping[str, str], model: str, version: str | None) -> dict[str, Any]:
    """Returns the settings of this version in ``models``; if ``version`` is None, the settings of the only version
    there.
    """
    versions = settings_by_version(_MODELS, properties.get(_MODELS, "{}")).get(model, {})
    if version is None:
        return dict(next(iter(versions.values()))) if len(versions) == 1 else {}
    return dict(versions.get(version, {}))


def settings_by_version(key: str, value: str) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Parses the JSON of ``models`` or ``model_snapshot`` into model -> version -> settings. Raises SettingsError."""
    try:
        document = json.loads(value)
        models = document["models"] if key == MODEL_SNAPSHOT else document
        return {
            model: {version: {**settings} for version, settings in versions.items()}
            for model, versions in models.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise SettingsError(f"config.properties: {key}: must be a JSON object of models and their versions") from None


def model_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model's settings, leaving out those whose value is below 1; for them TorchServe uses its own
    default."""
    left_out = {key for key, value in settings.items() if type(value) is int and value < 1}
    return {key: value for key, value in settings.items() if key in KEYS and key not in left_out}


def whole_number(key: str, value: str) -> int:
    """Parses the whole number that is the value of ``key``. Raises SettingsError, which names the key."""
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
        return unescaped.encode("utf-16", "surrogatepass").decode("utf-16")  # two escapes may make one character
    except UnicodeDecodeError:
        raise SettingsError(f"config.properties: {text!r}: has half of a surrogate pair") from None
