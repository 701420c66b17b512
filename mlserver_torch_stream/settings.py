"""Reads a model's settings into one frozen, validated object, with the origin of each of its values.

Knows nothing of torch, of MLServer's classes or of loading; it reads the file system only to find the model.
"""

from __future__ import annotations

import contextlib
import json
import os
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from mlserver_torch_stream.byte_size import parse_bytes
from mlserver_torch_stream.did_you_mean import did_you_mean_or_known
from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.model_source import ModelSource, find_path, resolve_source
from mlserver_torch_stream.types import SamplingParameters

ENV_PREFIX = "MLSERVER_MODEL_"
ENV_EXTRA = "MLSERVER_MODEL_EXTRA"
ENV_URI = "MLSERVER_MODEL_URI"
ENV_CACHE = "MLSERVER_TORCH_STREAM_CACHE"
SETTINGS_FILE = "model-settings.json"
_DEFAULT = "default"


def _number_keys(value: Any) -> Any:
    """Reads ``{"0": "20GiB"}`` as device 0, because JSON has only string keys."""
    return {_number(key): item for key, item in value.items()} if isinstance(value, dict) else value


def _number_devices(value: Any) -> Any:
    return {key: _number(item) for key, item in value.items()} if isinstance(value, dict) else value


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _known_sampling(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    known = [item.name for item in fields(SamplingParameters)]
    for key in value:
        if key not in known:
            raise ValueError(f"unknown request parameter {key!r}{did_you_mean_or_known(str(key), known)}")
    try:
        TypeAdapter(SamplingParameters).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None
    return value


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
BytesOrNone = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
DeviceMap = Annotated[str | int | dict[str, str | int], BeforeValidator(_number_devices)]
MaxMemory = Annotated[dict[str | int, str | int], BeforeValidator(_number_keys)]
Sampling = Annotated[dict[str, Any], BeforeValidator(_known_sampling)]


class Speculative(BaseModel):
    """How tokens are drafted that a step verifies beside a sequence's newest one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_lookup: int = Field(gt=0, le=64)  # most drafts of a sequence and a step, from its own text

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        for key in value if isinstance(value, dict) else ():
            if key not in cls.model_fields:
                raise ValueError(f"unknown key {key!r}{did_you_mean_or_known(str(key), list(cls.model_fields))}")
        return value


_ROUNDING_NEEDS: Mapping[str, tuple[Any, ...]] = {
    "dtype": ("auto", "bfloat16"),
    "quantization_config": (None,),
    "engine": ("auto", "batched"),
    "fast_path": ("auto",),
}


class EngineSettings(BaseModel):
    """The keys of ``parameters.extra``.

    Knows nothing of the host: None means that the loader or the engine derives the value and logs it at load.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None
    """The model: a folder, a `.gguf` file, a hub id, `hf://…` or `embedded://…`; it beats `parameters.uri`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    tokenizer: str | None = None
    """A folder or a hub id; default: the model's own tokenizer."""
    chat_template: str | None = None
    """A Jinja template, or the file that holds it; default: the tokenizer's template."""
    tool_parser: Literal["auto", "template", "hermes", "llama3", "mistral", "qwen3_coder", "glm45", "none"] = "auto"
    """The notation of the model's tool calls ([tools.md](tools.md)): `hermes`, `llama3`, `mistral`, `qwen3_coder`,
    `glm45`, or `template` for the one that the tokenizer declares; with `none`, calls stay text; `auto` finds the
    notation in the tokenizer or the chat template."""
    reasoning_parser: Literal["auto", "think", "none"] = "auto"
    """`think`: the text between `<think>` and `</think>` is the reasoning of an answer; `none`: it is part of the text;
    `auto`: `think`, if the chat template contains `</think>`."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """`bfloat16`, `float16` or `float32`; `auto` uses the checkpoint's type."""
    device_map: DeviceMap | None = None
    """A device map of accelerate: `auto`, `balanced`, `sequential`, a device, or an object of modules and devices."""
    max_memory: MaxMemory | None = None
    """Most memory of the weights on each device of a `device_map`, such as `{"0": "20GiB", "cpu": "60GiB"}`."""
    offload_folder: str | None = None
    """The folder for weights that fit on no device."""
    pipeline: Literal["auto", "off"] = "auto"
    """With `auto` the devices of a map work at the same time, each on another batch; with `off` they work one after
    another."""
    attn_implementation: str | None = None
    """The name of an attention implementation of transformers, such as `sdpa` or `eager`."""
    quantization_config: dict[str, Any] | None = None
    """How transformers quantises the weights, such as `{"load_in_4bit": true}`
    ([devices.md](devices.md#quantised-weights))."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the model is run."""
    allow_pickle: bool = False
    """Whether weights are read from pickles, such as `pytorch_model.bin`, where a model has no safetensors
    ([security.md](security.md#models))."""
    engine: Literal["auto", "batched", "serial"] = "auto"
    """`batched` or `serial` (one request at a time) overrides the result of the check at load."""
    fast_path: Literal["auto", "off"] = "auto"
    """`off` runs transformers' forward as it is: without our own kernels, without linear layers repacked for the CPU,
    and without CUDA graphs."""
    weights: Literal["auto", "packed", "int8", "int4"] = "auto"
    """`auto` leaves a checkpoint's weights as they are, and dequantises a GGUF file. `packed` keeps a GGUF file
    quantised ([below](#small-weights)); `int8` and `int4` round a bfloat16 model's projections at load. These three
    need our own kernels on a CPU; if the kernels cannot run the model, the load fails."""
    max_model_len: int | None = Field(default=None, gt=0)
    """Most tokens of a prompt and its answer together; default: the model's own limit. Models with "longrope" positions
    (Phi-3.5) change their positions at a length that the config names; for them this length is the default. With a
    larger value such a model runs one request at a time."""
    max_num_seqs: int = Field(default=32, gt=0)
    """Most sequences that are decoded together."""
    max_queued_requests: int = Field(default=256, gt=0)
    """Most prompts that may wait; further ones are refused."""
    max_queued_tokens: int | None = Field(default=None, gt=0)
    """Most tokens of all waiting prompts together; default: no bound."""
    queue_timeout: float | None = Field(default=None, gt=0)
    """Seconds that a prompt may wait; default: no bound."""
    request_timeout: float | None = Field(default=None, gt=0)
    """Seconds from a request's arrival to its last token; default: no bound."""
    step_timeout: float = Field(default=1800.0, gt=0)
    """Seconds for one step with a chunk of prompts. A step that takes longer ends the process
    ([why](operations.md#a-step-that-hangs))."""
    chunked_prefill_size: int = Field(default=512, gt=0)
    """Most prompt tokens of one step, of all prompts together; running sequences decode in the same step. A smaller
    value means shorter pauses between tokens and a later first token. On CPUs only a quarter of it is used in steps in
    which sequences decode. Models that take their tokens [in rows](families.md) compute each chunk in a separate
    forward, which counts as at least 64 tokens."""
    kv_cache_memory: Bytes | None = None
    """Most memory of the KV cache, whose [pages](architecture.md#memory) sequences take as they grow; default: a share
    of the memory that the container, `ulimit` or the GPU leaves free."""
    prefix_cache_memory: BytesOrNone | None = None
    """The most memory that pages of ended sequences may keep in the KV cache for later prompts; a sequence that needs
    the pages gets them. `0`: only running sequences share pages. Default: on GPUs all of the cache, on
    CPUs an eighth of it and at most 256 MiB."""
    speculative: Speculative | None = None
    """`{"prompt_lookup": 8}` drafts up to 8 tokens of a sequence from its own text and verifies them in one step. The
    tokens stay the same, and text that repeats itself comes faster. The engine measures the time that drafts save, and
    makes none if they save no time. The load fails with models that keep states, that cannot take prompts in chunks, or
    that run one request at a time. Default: no drafts."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads; default: the container's share of the host's cores."""
    tensor_parallel_size: int = Field(default=1, gt=0)
    """Number of ranks over which each layer is split; each rank is a process with its own device
    ([scaling.md](scaling.md))."""
    replicas: int = Field(default=1, gt=0)
    """Number of engines behind one model name; each engine has the whole model on its own GPU."""
    default_sampling: Sampling = Field(default_factory=dict)
    """Default values of request parameters; they override the model's generation config."""
    cache_dir: str | None = None
    """The folder for compiled kernels and converted GGUF files. A GGUF conversion is deleted when it has not been used
    for 30 days; a damaged file is made again. Everybody who can write to this folder can run code in the server.
    Default: `MLSERVER_TORCH_STREAM_CACHE`, else the user's cache folder."""

    @field_validator("weights")
    @classmethod
    def _no_way_round_our_kernels(cls, weights: str, info: ValidationInfo) -> str:
        if weights != "auto":
            for key, allowed in _ROUNDING_NEEDS.items():
                if info.data.get(key, allowed[0]) not in allowed:
                    raise ValueError(f"{weights} needs our own kernels in bfloat16, not {key}: {info.data[key]!r}")
        return weights


KNOWN_KEYS = tuple(EngineSettings.model_fields)


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """The settings, the model that they name, and the origin of each key's value."""

    settings: EngineSettings
    source: ModelSource
    origins: Mapping[str, str]

    @property
    def cache_dir(self) -> Path:
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
    """Validates the settings that MLServer and the environment give, and finds the model.

    ``uri`` and ``extra`` are ``ModelSettings.parameters``' (None where it has none: then the environment counts),
    ``parameter_level_extras`` its ``model_extra``, ``source_folder`` the folder of ``model-settings.json`` if any.
    Raises SettingsError, which names the key.
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
        key = str(first["loc"][0])
        message = first["msg"].removeprefix("Value error, ")
        raise SettingsError(f"parameters.extra.{key}: {message}, got {values.get(key)!r}") from None


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
    tokenizer = values.get("tokenizer")
    if isinstance(tokenizer, str):
        path = find_path(tokenizer, source_folder)
        values["tokenizer"] = str(path) if path else tokenizer.removeprefix("hf://")


def _refuse_unknown(values: Mapping[str, Any]) -> None:
    for key in values:
        if key not in KNOWN_KEYS:
            raise SettingsError(f"parameters.extra: unknown key {key!r}{did_you_mean_or_known(str(key), KNOWN_KEYS)}")


def _refuse_misplaced(strays: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Refuses settings in places where MLServer swallows or ignores them.

    MLServer also passes every line of a ``.env`` file in ``parameters``, in lower case, with its own prefix or without
    (that depends on pydantic-settings): such a line is refused only if it has the prefix and one of our names.
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
            raise SettingsError(f"parameters.{stray}: belongs into parameters.extra.{key}")
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
    """The ``parameters`` block of the file itself, by which its values are distinguished from the environment's."""
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
