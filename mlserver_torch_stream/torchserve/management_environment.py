"""Turns what a TorchServe's configuration says of its management API into environment variables of this package.

Knows nothing of the API. It is opened only if the configuration names its address, and a token is set or not needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mlserver_torch_stream.torchserve.properties import whole_number
from mlserver_torch_stream.torchserve.server_environment import address
from mlserver_torch_stream.torchserve.server_properties import is_true

_PREFIX = "MLSERVER_TORCH_STREAM_"
_TOKENS = (f"{_PREFIX}MANAGEMENT_TOKEN", f"{_PREFIX}MANAGEMENT_TOKEN_FILE")
_KEYS = ("management_address", "grpc_management_port", "enable_model_api", "allowed_urls")


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
    if "grpc_management_port" in properties:
        port = whole_number("grpc_management_port", properties["grpc_management_port"])
        wanted["GRPC_MANAGEMENT_PORT_TORCHSERVE"] = str(port)
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
