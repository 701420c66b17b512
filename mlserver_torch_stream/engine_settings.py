"""Defines the keys of ``parameters.extra``, with types, bounds and defaults.

The table in docs/settings.md is made from this file.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

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
from mlserver_torch_stream.types import SamplingParameters


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
    """How tokens are drafted. A step verifies the drafts together with the sequence's newest token."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_lookup: int = Field(gt=0, le=64)  # the maximum number of drafts for one sequence in one step

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

# With ``vllm``, a key that has no meaning there is refused, because its value would be ignored.
_MEANINGLESS_TO_VLLM = (
    *("device_map", "max_memory", "offload_folder", "pipeline", "attn_implementation", "quantization_config"),
    *("engine", "fast_path", "weights", "chunked_prefill_size", "step_target", "prefix_cache_memory", "speculative"),
    "replicas",
)
# The keys that vLLM has too, with the names that it gives them.
VLLM_NAMES: Mapping[str, str] = {
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "dtype": "dtype",
    "tensor_parallel_size": "tensor_parallel_size",
    "kv_cache_memory": "kv_cache_memory_bytes",
    "revision": "revision",
    "trust_remote_code": "trust_remote_code",
    "tokenizer": "tokenizer",
}
READ_HERE_TOO = ("revision", "trust_remote_code", "tokenizer")  # those of them that the server itself needs
MAX_ADAPTERS = 128
_GPU_DEFAULTS = {"max_num_seqs": 256, "chunked_prefill_size": 2048}
_PICKLE_FORMATS = ("auto", "hf", "pt", "npcache")  # values of vLLM's ``load_format`` with which it reads pickles


class EngineSettings(BaseModel):
    """The keys of ``parameters.extra``.

    The defaults do not depend on the host: where a value is None, the loader or the engine chooses a value and logs it
    when the model loads.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None
    """The model: a folder, a `.gguf` file, a hub id, `hf://…` or `embedded://…`; it overrides `parameters.uri`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    tokenizer: str | None = None
    """A folder or a hub id; default: the model's own tokenizer."""
    chat_template: str | None = None
    """A Jinja template, or a file that contains one; default: the tokenizer's template."""
    tool_parser: Literal["auto", "template", "hermes", "llama3", "mistral", "qwen3_coder", "glm45", "none"] = "auto"
    """The notation of the model's tool calls ([tools.md](tools.md#how-models-write-calls)); `auto` finds it, and with
    `none` calls stay text."""
    reasoning_parser: Literal["auto", "think", "none"] = "auto"
    """With `think` the text between `<think>` and `</think>` is the reasoning of an answer, and with `none` it is part
    of the text; `auto` means `think` if the chat template contains `</think>`."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """`bfloat16`, `float16` or `float32`; `auto` uses the checkpoint's type, and `bfloat16` for a quantised GGUF file.
    Our own CPU kernels do not compute in `float16`."""
    device_map: DeviceMap | None = None
    """A device map of accelerate: `auto`, `balanced`, `sequential`, a device, or an object of modules and devices."""
    max_memory: MaxMemory | None = None
    """The maximum memory for weights on each device of a `device_map`, such as `{"0": "20GiB", "cpu": "60GiB"}`."""
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
    """`off` runs transformers' forward with torch's own operators: without our own kernels, without linear layers
    repacked for the CPU, and without varlen attention on GPUs."""
    weights: Literal["auto", "packed", "int8", "int4"] = "auto"
    """`packed` keeps a GGUF file quantised, and `int8` or `int4` round a bfloat16 model's projections at load
    ([weights.md](weights.md)); `auto` does neither, and dequantises a GGUF file."""
    max_model_len: int | None = Field(default=None, gt=1)
    """The maximum number of tokens of a prompt and its answer together; default: the model's own limit."""
    max_num_seqs: int = Field(default=32, gt=0)
    """The maximum number of sequences that are decoded together; default where the KV cache is on GPUs alone: 256."""
    max_queued_requests: int = Field(default=256, gt=0)
    """The maximum number of prompts that wait; further prompts are refused."""
    max_queued_tokens: int | None = Field(default=None, gt=0)
    """The maximum number of tokens of all waiting prompts together; default: no bound."""
    queue_timeout: float | None = Field(default=None, gt=0)
    """Seconds that a prompt may wait; default: no bound."""
    request_timeout: float | None = Field(default=None, gt=0)
    """Seconds from a request's arrival to its last token; default: no bound."""
    step_timeout: float = Field(default=1800.0, gt=0)
    """Seconds after which a step with a chunk of prompts ends the process ([why](operations.md#a-step-that-hangs))."""
    chunked_prefill_size: int = Field(default=512, gt=0)
    """The maximum number of prompt tokens that one step computes, over all prompts together; default where the KV cache
    is on GPUs alone: 2048."""
    step_target: float = Field(default=500.0, gt=0)
    """How many milliseconds a step should take if it computes prompts while sequences decode
    ([scaling.md](scaling.md#pauses-between-tokens))."""
    stream_interval: int = Field(default=1, gt=0)
    """The minimum number of tokens in each event of a stream except the first and the last, as in vLLM."""
    stream_interval_ms: float | None = Field(default=None, gt=0)
    """Milliseconds after a stream's last event at which the next event is sent with fewer tokens, too. Without
    `stream_interval`, no event but the last is sent earlier."""
    kv_cache_memory: Bytes | None = None
    """The maximum memory of the KV cache, whose [pages](engine.md#memory) sequences take as they grow; default: half of
    the memory that the container or `ulimit` leaves free, or 0.8 of what a GPU has free."""
    prefix_cache_memory: BytesOrNone | None = None
    """How much of the KV cache's memory pages of ended sequences may keep for later prompts; default: on GPUs all of
    it, on CPUs an eighth of it and at most 256 MiB."""
    speculative: Speculative | None = None
    """`{"prompt_lookup": 8}` drafts up to 8 tokens of a sequence from its own text and verifies them in one step;
    default: no drafts."""
    threads: int | None = Field(default=None, gt=0, le=1024)
    """CPU threads, at most 1,024; default: the container's share of the host's cores."""
    tensor_parallel_size: int = Field(default=1, gt=0)
    """Number of ranks over which each layer is split; each rank is a process with its own device
    ([scaling.md](scaling.md))."""
    replicas: int = Field(default=1, gt=0)
    """Number of engines behind one model name; each engine has the whole model on its own GPU."""
    default_sampling: Sampling = Field(default_factory=dict)
    """Default values of request parameters; they override the model's generation config."""
    cache_dir: str | None = None
    """The folder for compiled kernels, converted GGUF files and records of checked loads; default:
    `MLSERVER_TORCH_STREAM_CACHE`, else `mlserver-torch-stream` in `XDG_CACHE_HOME` or `~/.cache`."""
    vllm_python: str | None = None
    """The Python interpreter of an environment in which vLLM is installed ([engines.md](engines.md#install)); default:
    `MLSERVER_TORCH_STREAM_VLLM_PYTHON`."""
    vllm: dict[str, Any] | None = None
    """The engine arguments, which may be `{}`, with which vLLM generates the tokens ([engines.md](engines.md));
    default: this package's own engine generates them."""
    lora_modules: dict[str, str] | None = None
    """The folders or hub ids, by name, of LoRA adapters that are loaded with the model
    ([engines.md](engines.md#adapters))."""

    def on_gpus(self) -> EngineSettings:
        """Returns the settings with the defaults for GPUs: a GPU needs more tokens in a step to be well utilised."""
        defaults = {key: value for key, value in _GPU_DEFAULTS.items() if key not in self.model_fields_set}
        return self.model_copy(update=defaults)

    @property
    def event_interval(self) -> tuple[int, float]:
        """The tokens and the seconds after a stream's last event, of which the first to be reached makes the next event
        due."""
        if self.stream_interval_ms is None:
            return self.stream_interval, math.inf
        tokens = self.stream_interval if "stream_interval" in self.model_fields_set else sys.maxsize
        return tokens, self.stream_interval_ms / 1000

    @property
    def fits_cpu_kernels(self) -> bool:
        """Whether the settings allow our own CPU kernels.

        If ``device_map`` is None, the kernels also require a host without a GPU.
        """
        free = (self.quantization_config, self.max_memory, self.offload_folder, self.attn_implementation)
        return (
            self.device_map in (None, "cpu")
            and all(each is None for each in free)
            and self.dtype in ("auto", "bfloat16")
            and self.engine != "serial"
            and self.fast_path == "auto"
            and self.tensor_parallel_size == 1
        )

    @field_validator("vllm")
    @classmethod
    def _goes_with_vllm(cls, vllm: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
        if vllm is None:
            return None
        for key in _MEANINGLESS_TO_VLLM:
            if key in info.data and info.data[key] != cls.model_fields[key].default:
                raise ValueError(f"{key} has no meaning to vLLM")
        if "model" in vllm:
            raise ValueError("parameters.uri names the model")
        load_format = vllm.get("load_format")
        # vLLM ignores the case.
        if str(load_format).lower() in _PICKLE_FORMATS and not info.data.get("allow_pickle"):
            raise ValueError(
                f"load_format {load_format!r} reads pickles, which can hold code; set allow_pickle to true"
            )
        return vllm

    @model_validator(mode="after")
    def _agrees_with_vllm(self) -> EngineSettings:
        vllm = self.vllm or {}
        for key, name in VLLM_NAMES.items():
            ours = getattr(self, key)
            if name in vllm and key in self.model_fields_set and ours not in (None, vllm[name]):
                raise ValueError(f"{name} is {vllm[name]!r}, but parameters.extra.{key} is {ours!r}")
        return self

    @field_validator("lora_modules")
    @classmethod
    def _needs_lora(cls, modules: dict[str, str] | None, info: ValidationInfo) -> dict[str, str] | None:
        if modules is not None and not (info.data.get("vllm") or {}).get("enable_lora"):
            raise ValueError('adapters need "enable_lora": true in parameters.extra.vllm')
        if modules is not None and len(modules) > MAX_ADAPTERS:
            raise ValueError(f"at most {MAX_ADAPTERS} adapters can be loaded")
        return modules

    @field_validator("weights")
    @classmethod
    def _needs_our_kernels(cls, weights: str, info: ValidationInfo) -> str:
        if weights != "auto":
            for key, allowed in _ROUNDING_NEEDS.items():
                if info.data.get(key, allowed[0]) not in allowed:
                    raise ValueError(f"{weights} needs our own kernels in bfloat16, not {key}: {info.data[key]!r}")
        return weights
