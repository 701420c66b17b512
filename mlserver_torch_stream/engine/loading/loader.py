"""Loads a model onto the devices that the settings name.

Loading blocks, so call these functions in a thread.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.distributed import DistributedConfig

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.engine.config_fields import max_model_len, read_config, settle_positions
from mlserver_torch_stream.engine.forward.model_forward import give_contiguous_states
from mlserver_torch_stream.engine.loading.checkpoint import (
    check_bytes,
    check_finite,
    check_loaded,
    check_model,
)
from mlserver_torch_stream.engine.loading.file_damage import FLOATS, StoredTensor, read_header
from mlserver_torch_stream.engine.loading.generation_config import (
    eos_token_ids,
    generation_defaults,
    generation_rules,
    not_honoured,
)
from mlserver_torch_stream.engine.loading.gguf import load_gguf
from mlserver_torch_stream.engine.loading.locate import refuse_adapter, refuse_other_kinds
from mlserver_torch_stream.engine.loading.model_files import ALLOW_PICKLE, ModelFiles, attempt
from mlserver_torch_stream.engine.loading.pinned import pin_offloaded
from mlserver_torch_stream.engine.loading.placement import check_device_map, check_tied, read_placement
from mlserver_torch_stream.engine.loading.quantised import (
    check_agreed,
    check_kept,
    is_quantised,
    quantisation_method,
    quantised_as,
    quieten,
    read_quantisation,
    wants_packed_gguf,
)
from mlserver_torch_stream.engine.machine import Host, read_host, thread_count
from mlserver_torch_stream.engine_settings import EngineSettings
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import ResolvedSettings
from mlserver_torch_stream.types import GenerationRules
from mlserver_torch_stream.work_threads import raise_if_cancelled

logger = logging.getLogger(__name__)

# The weights' shares of a GPU's free memory; the rest is for the KV cache and activations. A larger share is better
# than weights on the CPU, because every step copies those to the GPU.
GPU_WEIGHT_SHARES = (0.7, 0.9)
_LEAST = GPU_WEIGHT_SHARES[0]
# The part of a GPU that stays empty, because a layer is never split over GPUs.
_LOST_PER_GPU = 0.03


def weight_share(weights: int | None, free: Sequence[int]) -> float:
    """Returns the smallest share of the GPUs' ``free`` bytes in which ``weights`` bytes fit, or else the largest share.

    Weights beyond the share go to the CPU. If ``weights`` is None because the size is unknown, the smallest share is
    returned.
    """
    if weights is None:
        logger.info("weights may take %.0f %% of the GPUs' free memory: their size is not known", 100 * _LEAST)
        return _LEAST
    whole = 1.0 - (_LOST_PER_GPU if len(free) > 1 else 0.0)
    fitting = (share for share in GPU_WEIGHT_SHARES if weights <= sum(free) * share * whole)
    share = next(fitting, None)
    rest = "" if share is not None else "; the rest stays on the CPU, and every step copies it to a GPU"
    share = share or GPU_WEIGHT_SHARES[-1]
    logger.info(
        "weights of %s may take %.0f %% of the %s that are free on %d GPUs%s",
        *(format_bytes(weights), 100 * share, format_bytes(sum(free)), len(free), rest),
    )
    return share


def weight_bytes(place: str, gguf_file: Path | None, dtype: str, **options: Any) -> int | None:
    """Returns how many bytes a model's weights take in memory; None if its files do not show this.

    The size is read from a folder's safetensors files, even for quantised weights. Without such files, the size is
    computed from the config, which is read with the ``options`` of ``from_pretrained``.
    """
    try:
        asked = None if dtype == "auto" else getattr(torch, dtype)
        if gguf_file is None and (files := sorted(Path(place).glob("*.safetensors"))):
            return sum(_stored_bytes(file, asked) for file in files)
        config = read_config(place, place, gguf_file, **options)
        if getattr(config, "quantization_config", None):
            return None
        kind = asked or getattr(config, "dtype", None) or torch.float32
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=kind, trust_remote_code=options.get("trust_remote_code", False)
            )
        return int(sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()))
    except Exception as error:  # a config or a model's code can raise any error; the load reports it
        logger.info("the size of the weights is not known: %s", " ".join(str(error).split())[:200])
        return None


def _stored_bytes(file: Path, asked: torch.dtype | None) -> int:
    """Returns the bytes that a safetensors file's tensors take in the dtype ``asked``."""
    return sum(_bytes_of(tensor, asked) for tensor in read_header(file).values())


def _bytes_of(tensor: StoredTensor, asked: torch.dtype | None) -> int:
    bits = asked.itemsize * 8 if asked is not None and tensor.dtype in FLOATS else FLOATS.get(tensor.dtype)
    return tensor.bits // 8 if bits is None else tensor.elements * bits // 8


_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PLACING = ("device_map", "max_memory", "offload_folder")  # errors name these settings


# torch calls these hooks for each module and parameter while a model is built and filled, in the thread of the load.
nn.modules.module.register_module_module_registration_hook(lambda *_: raise_if_cancelled())
nn.modules.module.register_module_parameter_registration_hook(lambda *_: raise_if_cancelled())


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to generate, with its tokenizer and the defaults from its files.

    ``default_sampling`` maps request parameters to the values in the settings, or else in ``generation_config.json``.
    """

    model: Any
    vocab_size: int
    tokenizer: Any
    default_sampling: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    rules: GenerationRules
    max_model_len: int
    description: str


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights that are shared by models with the same files and devices.

    An engine may replace the model's config later. ``vocab_size`` is the number of rows of the embedding.
    """

    model: Any
    generation_config: Any
    vocab_size: int
    description: str


def import_model_code() -> None:
    """Imports transformers' modeling code, torch's compiler and sympy, which takes 105 MB and some seconds.

    The imported objects are never freed, so the garbage collector is told to skip them from then on.
    """
    name = "transformers.modeling_utils"
    if name in sys.modules:
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(name)
    finally:
        if collects:
            gc.enable()
    gc.collect()
    gc.freeze()


def load_weights(files: ModelFiles, resolved: ResolvedSettings) -> LoadedWeights:
    """Loads the weights in these files onto their devices, and checks them. Raises LoadFailed if that fails."""
    settings, name = resolved.settings, resolved.source.name
    placing = {key: getattr(settings, key) for key in _PLACING}
    where = ", ".join(f"{key} {value!r}" for key, value in placing.items() if value is not None)
    model = attempt(f"{name} with {where}" if where else name, lambda: _load_weights(files, settings), files.place)
    attempt(name, lambda: check_finite(model))
    model.eval()
    model.requires_grad_(False)
    give_contiguous_states(model)
    pin_offloaded(model)
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    return LoadedWeights(model, model.generation_config, vocab_size, describe(name, model))


def complete(weights: LoadedWeights, tokenizer: Any, resolved: ResolvedSettings) -> LoadedModel:
    """Returns a model with these weights, its tokenizer, and the defaults from its files and settings."""
    settings = resolved.settings
    if ignored := not_honoured(weights.generation_config):
        logger.warning("The model's generation config has fields without effect here: %s", ", ".join(ignored))
    return LoadedModel(
        model=weights.model,
        vocab_size=weights.vocab_size,
        tokenizer=tokenizer,
        default_sampling={**generation_defaults(weights.generation_config), **settings.default_sampling},
        eos_token_ids=eos_token_ids(weights.generation_config, tokenizer),
        rules=generation_rules(weights.generation_config),
        max_model_len=max_model_len(weights.model, settings.max_model_len),
        description=f"{weights.description}; model from {resolved.origins.get('model', 'settings')}",
    )


def set_threads(settings: EngineSettings, host: Host) -> int:
    """Sets and returns the number of torch's threads: the setting, or else the number of the container's cores."""
    threads = thread_count(settings, host)
    torch.set_num_threads(threads)
    return threads


def describe(name: str, model: Any, weights: str | None = None) -> str:
    """Describes a loaded model: its name, size and devices.

    ``weights`` describes the weights; None means that their dtype is enough.
    """
    parameters = model.num_parameters()
    size = f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"
    dtype = str(model.dtype).removeprefix("torch.")
    kind = model.config.model_type
    quantised = (
        f", quantised by {model.hf_quantizer.quantization_config.quant_method.value}" if is_quantised(model) else ""
    )
    return f"{name} ({kind}, {size} parameters, {weights or dtype + quantised}) on {_devices(model)}"


def _devices(model: Any) -> str:
    placement = read_placement(model)
    if len(placement) == 1:
        return placement[0].place
    return ", ".join(f"{share.place} ({len(share.layers)} layers)" for share in placement)


def _load_weights(files: ModelFiles, settings: EngineSettings) -> Any:
    place, gguf_file = files.location, files.gguf_file
    code = {"revision": settings.revision or "main", "trust_remote_code": settings.trust_remote_code}
    check_device_map(settings.device_map, place, gguf_file, **code)
    options = _placement(settings, lambda: weight_bytes(place, gguf_file, settings.dtype, **code))
    if settings.attn_implementation is not None:
        options["attn_implementation"] = settings.attn_implementation
    asked = settings.quantization_config
    if gguf_file is not None:
        packed = wants_packed_gguf(asked)
        if asked is not None and not packed:
            raise LoadFailed(
                f"quantization_config needs a converted copy of {gguf_file.name}: set cache_dir to a writable folder"
            )
        model = load_gguf(gguf_file, settings.dtype, packed=packed, **options)
        if packed:
            check_kept(model, "gguf", asked)
        return model
    refuse_adapter(place, settings.revision)
    if not settings.allow_pickle:
        _refuse_pickles(Path(place))
        options["use_safetensors"] = True
    config = transformers.AutoConfig.from_pretrained(place, **code)
    refuse_other_kinds(config)
    own_code = not type(config).__module__.startswith("transformers.")  # it may read the config in its own way
    if settings.engine != "serial" and not own_code and settle_positions(config, settings.max_model_len):
        options["config"] = config
    # Otherwise transformers would ask a service of the hub to convert pickles, and load what that service proposes.
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")
    fields = config.to_dict()
    method = own = quantised_as(fields)
    if asked is not None:
        method = quantisation_method(asked)
        options["quantization_config"] = read_quantisation(asked, *_meant_for(settings))
    if files.tensors:
        check_bytes(fields, files.tensors)
        with torch.device("meta"):
            outline = transformers.AutoModelForCausalLM.from_config(
                config, trust_remote_code=settings.trust_remote_code
            )
        check_model(outline, files.tensors, quantised=method is not None)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        place, dtype=settings.dtype, output_loading_info=True, ignore_mismatched_sizes=True, **code, **options
    )
    check_loaded(model, info, quantised=method is not None)
    check_tied(model)
    if method is not None:
        check_kept(model, method, asked)
        quieten(method)
    if own is not None and asked is not None:
        check_agreed(model, options["quantization_config"], asked)
    return model


def _refuse_pickles(folder: Path) -> None:
    """Raises LoadFailed for a folder whose weights are pickles, which can hold code. A hub id is not checked here."""
    suffixes = {path.suffix: path.name for path in sorted(folder.glob("*"))}
    pickle = next((suffixes[suffix] for suffix in _PICKLES if suffix in suffixes), None)
    if pickle is not None and ".safetensors" not in suffixes:
        raise LoadFailed(f"{pickle} is a pickle, which can hold code; {ALLOW_PICKLE}")


def _meant_for(settings: EngineSettings) -> tuple[torch.device, torch.dtype]:
    """Returns the type of device that will compute with the weights, and the weights' dtype."""
    device_map = settings.device_map
    places = device_map.values() if isinstance(device_map, dict) else (device_map,)
    gpu = torch.cuda.is_available() and not all(place in ("cpu", "disk") for place in places)
    return torch.device("cuda" if gpu else "cpu"), getattr(
        torch, "bfloat16" if settings.dtype == "auto" else settings.dtype
    )


def _placement(settings: EngineSettings, weights: Callable[[], int | None]) -> dict[str, Any]:
    """Returns the placement in the settings; by default, weights fill the first GPU, then the other GPUs, then the CPU.

    ``weights()`` returns the bytes of the weights, or None.
    """
    options: dict[str, Any] = {}
    if settings.tensor_parallel_size > 1:
        return {"distributed_config": DistributedConfig(tp_size=settings.tensor_parallel_size)}
    if settings.device_map is not None:
        options["device_map"] = settings.device_map
    elif settings.max_memory is not None:
        options["device_map"] = "auto"
    elif torch.cuda.is_available():
        options["device_map"] = "sequential"
        free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
        share = weight_share(weights(), free)
        options["max_memory"] = {index: int(room * share) for index, room in enumerate(free)} | {
            "cpu": read_host().available_bytes
        }
    if settings.max_memory is not None:
        options["max_memory"] = settings.max_memory
    if settings.offload_folder is not None:
        os.makedirs(settings.offload_folder, exist_ok=True)
        options["offload_folder"] = settings.offload_folder
    return options
