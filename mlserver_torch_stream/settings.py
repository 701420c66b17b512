"""Reads a model's settings into one frozen, validated object, with the origin of each of its values."""

from __future__ import annotations

import contextlib
import json
import os
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from mlserver_torch_stream.did_you_mean import did_you_mean_or_known
from mlserver_torch_stream.engine_settings import READ_HERE_TOO, EngineSettings
from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.model_source import ModelSource, find_path, is_hub_id, resolve_source

ENV_PREFIX = "MLSERVER_MODEL_"
ENV_EXTRA = "MLSERVER_MODEL_EXTRA"
ENV_URI = "MLSERVER_MODEL_URI"
ENV_CACHE = "MLSERVER_TORCH_STREAM_CACHE"
SETTINGS_FILE = "model-settings.json"
_DEFAULT = "default"


KNOWN_KEYS = tuple(EngineSettings.model_fields)


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """The settings, the model that they name, and the origin of each key's value."""

    settings: EngineSettings
    source: ModelSource
    origins: Mapping[str, str]

    @property
    def cache_dir(self) -> Path:
        """The folder for compiled kernels, converted GGUF files and records of checked loads."""
        assert self.settings.cache_dir is not None  # filled in by parse_settings
        return Path(self.settings.cache_dir)

    @property
    def summary(self) -> str:
        """The values that are not defaults, by origin, as the end of a log line that names the model already."""
        places: dict[str, list[str]] = {}
        for key, origin in self.origins.items():
            if origin != _DEFAULT and key != "model":
                places.setdefault(origin, []).append(f"{key}={reprlib.repr(getattr(self.settings, key))}")
        return "".join(f"; {origin}: {', '.join(values)}" for origin, values in places.items())


def parse_settings(
    uri: str | None = None,
    extra: Mapping[str, Any] | None = None,
    parameter_level_extras: Mapping[str, Any] | None = None,
    source_folder: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> ResolvedSettings:
    """Validates the settings from MLServer and the environment, and finds the model.

    ``uri`` and ``extra`` come from ``ModelSettings.parameters``, and ``parameter_level_extras`` is its ``model_extra``.
    If ``uri`` or ``extra`` is None, the environment applies. ``source_folder`` is the folder of
    ``model-settings.json``, if there is such a file. Raises SettingsError, which names the key.
    """
    environ = os.environ if environ is None else environ
    _refuse_misplaced(parameter_level_extras or {}, environ)
    from_environment = _environment_extra(environ)
    in_file = _file_parameters(source_folder)
    values = typed_values(from_environment if extra is None else extra, EngineSettings)

    _refuse_unknown(values)
    origins = dict.fromkeys(KNOWN_KEYS, _DEFAULT)
    file_keys = in_file.get("extra") or {}
    for key in values:
        if key in file_keys:
            merged = key in from_environment and values[key] != file_keys[key]
            origins[key] = f"{SETTINGS_FILE} and {ENV_EXTRA}" if merged else SETTINGS_FILE
        else:
            origins[key] = ENV_EXTRA if key in from_environment else "parameters.extra"

    if values.get("model") is None:
        if uri is None:
            uri = environ.get(ENV_URI) or source_folder
        if uri is None:
            raise SettingsError(f"no model given: set parameters.uri in {SETTINGS_FILE}, or {ENV_URI}")
        values["model"] = uri
        origins["model"] = _uri_origin(uri, in_file, environ)
    if values.get("cache_dir") is None:
        values["cache_dir"], origins["cache_dir"] = _default_cache(environ)
    _take_from_vllm(values)
    _read_files(values, source_folder)
    settings = _validate(values)
    assert settings.model is not None
    return ResolvedSettings(settings, resolve_source(settings.model, source_folder), origins)


def typed_values(values: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Reads strings as JSON if the model's field is not for text: Seldon's ``spec.parameters`` hold only strings."""
    typed = dict(values)
    for key, value in values.items():
        field = model.model_fields.get(key)
        if isinstance(value, str) and field is not None and _reads_as_json(value, field.annotation):
            with contextlib.suppress(ValueError):  # the validation names what is wrong with it
                typed[key] = json.loads(value)
    return typed


def _reads_as_json(value: str, annotation: Any) -> bool:
    kinds = set(_kinds(annotation))
    return not kinds & {str, Literal} or (dict in kinds and value.lstrip().startswith("{"))


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yields the plain types of a field's annotation."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType, Annotated):
        for part in get_args(annotation)[: 1 if origin is Annotated else None]:
            yield from _kinds(part)
    else:
        yield origin or annotation


def _validate(values: Mapping[str, Any]) -> EngineSettings:
    try:
        return EngineSettings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else "vllm"  # the check of the whole is about vLLM's arguments
        message = first["msg"].removeprefix("Value error, ")
        raise SettingsError(f"parameters.extra.{key}: {message}, got {values.get(key)!r}") from None


def _take_from_vllm(values: dict[str, Any]) -> None:
    """Moves the engine arguments that the server itself needs from ``vllm`` to the settings of the same name, in place.

    An argument that differs from the setting stays, and is refused later.
    """
    vllm = values.get("vllm")
    if isinstance(vllm, dict):
        values["vllm"] = vllm = dict(vllm)
        for name in READ_HERE_TOO:
            if name in vllm and values.get(name) in (None, vllm[name]):
                values[name] = vllm.pop(name)


def _read_files(values: dict[str, Any], source_folder: str | None) -> None:
    """Replaces relative paths by absolute ones, and the file of a template by its text, in place."""
    template = values.get("chat_template")
    if isinstance(template, str) and "{" not in template:
        path = find_path(template, source_folder)
        if path is None or not path.is_file():
            raise SettingsError(f"parameters.extra.chat_template: no such file: {template}")
        try:
            values["chat_template"] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"parameters.extra.chat_template: cannot read {path}: {error}") from None
    modules = values.get("lora_modules")
    if isinstance(modules, dict):
        found = {name: find_path(path, source_folder) for name, path in modules.items() if isinstance(path, str)}
        values["lora_modules"] = {
            name: str(found.get(name) or str(path).removeprefix("hf://")) for name, path in modules.items()
        }
    python = values.get("vllm_python")
    if isinstance(python, str):  # a link is not resolved: Python finds its virtual environment by the link's folder
        candidates = [Path(python).expanduser().absolute()]
        if source_folder is not None:
            candidates.insert(0, Path(source_folder, python).absolute())
        values["vllm_python"] = next((str(each) for each in candidates if each.is_file()), None)
        if values["vllm_python"] is None:
            raise SettingsError(f"parameters.extra.vllm_python: no such interpreter: {python}")
    tokenizer = values.get("tokenizer")
    if isinstance(tokenizer, str):
        path = find_path(tokenizer, source_folder)
        if path is None and not is_hub_id(tokenizer):
            raise SettingsError(f"parameters.extra.tokenizer: no such folder: {tokenizer}; write a hub id as org/name")
        values["tokenizer"] = str(path) if path else tokenizer.removeprefix("hf://")


def _refuse_unknown(values: Mapping[str, Any]) -> None:
    for key in values:
        if key not in KNOWN_KEYS:
            raise SettingsError(f"parameters.extra: unknown key {key!r}{did_you_mean_or_known(str(key), KNOWN_KEYS)}")


def _refuse_misplaced(strays: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Refuses settings in places where MLServer swallows or ignores them.

    MLServer also passes each line of a ``.env`` file in ``parameters``, lower-cased. Depending on the version of
    pydantic-settings, MLServer's prefix is kept or not. Such a line is refused only if it has the prefix and the name
    of one of our keys.
    """
    for variable in environ:
        key = variable.removeprefix(ENV_PREFIX).lower()
        if variable.startswith(ENV_PREFIX) and key in KNOWN_KEYS:
            raise SettingsError(f"{variable} is not read: put {key!r} into {ENV_EXTRA}, as JSON")
    prefix = ENV_PREFIX.lower()
    lines = _dotenv_names() if strays else frozenset()
    for stray in strays:
        key = stray.removeprefix(prefix)
        if stray in lines and not stray.startswith(prefix):
            continue
        if key in KNOWN_KEYS:
            raise SettingsError(f"parameters.{stray}: belongs in parameters.extra.{key}")
        if f"{prefix}{key}" not in lines:
            hint = did_you_mean_or_known(key, ("uri", "extra", *KNOWN_KEYS))
            raise SettingsError(f"parameters: unknown key {stray!r}{hint}")


def _dotenv_names() -> frozenset[str]:
    try:
        lines = Path(".env").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(
        line.split("=")[0].strip().removeprefix("export ").strip().lower() for line in lines if "=" in line
    )


def _environment_extra(environ: Mapping[str, str]) -> dict[str, Any]:
    text = environ.get(ENV_EXTRA)
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{ENV_EXTRA}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SettingsError(f"{ENV_EXTRA}: must be a JSON object")
    return value


def _file_parameters(source_folder: str | None) -> dict[str, Any]:
    """Returns the ``parameters`` block of the settings file, so that its values can be distinguished from those of the
    environment.
    """
    if source_folder is None:
        return {}
    try:
        parameters = json.loads(Path(source_folder, SETTINGS_FILE).read_text(encoding="utf-8")).get("parameters")
    except (OSError, ValueError):
        return {}
    return parameters if isinstance(parameters, dict) else {}


def _uri_origin(uri: str, in_file: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    if in_file.get("uri") == uri:
        return f"parameters.uri in {SETTINGS_FILE}"
    return ENV_URI if environ.get(ENV_URI) == uri else "parameters.uri"


def _default_cache(environ: Mapping[str, str]) -> tuple[str, str]:
    if folder := environ.get(ENV_CACHE):
        return folder, ENV_CACHE
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "mlserver-torch-stream"), _DEFAULT
