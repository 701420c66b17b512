"""Checks weights that transformers quantises: the config must be valid, be able to run here, and take effect.

By itself, transformers ignores unknown keys, and dequantises the weights if it has no kernel; at most, it logs a
warning. In both cases this module raises an error that names the setting.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.utils import is_bitsandbytes_available, is_kernels_available, is_torchao_available

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.did_you_mean import did_you_mean_or_known
from mlserver_torch_stream.engine.loading.placement import bytes_of
from mlserver_torch_stream.errors import LoadFailed

_KEY = "parameters.extra.quantization_config"
_OURS = "pip install 'mlserver-torch-stream[quantised]'"
# A size that is divisible by every usual group of weights.
_TRIAL = 256


def read_quantisation(fields: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Returns transformers' config for the setting's ``fields``, for weights of ``dtype`` on ``device``.

    Raises LoadFailed for a method that is unknown, not installed, or cannot run there; the message names the key.
    """
    method = quantisation_method(fields)
    if method == "gguf":
        raise LoadFailed(f"{_KEY}.quant_method: 'gguf' is only for .gguf files")
    _require(method)
    kind = _configs()[method]
    known = [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "kwargs")]
    for key in fields:
        if key not in (*known, "quant_method"):
            raise LoadFailed(f"{_KEY}: unknown key {key!r} for {method}{did_you_mean_or_known(key, known)}")
    arguments = {key: value for key, value in fields.items() if key != "quant_method"}
    if method == "torchao":
        arguments["quant_type"] = _torchao_type(fields.get("quant_type"), device, dtype)
    try:
        return kind(**arguments)
    except Exception as error:  # each config checks its values in its own way
        raise LoadFailed(f"{_KEY}: {method}: {error or type(error).__name__}") from None


def _configs() -> Mapping[str, Any]:
    """Returns transformers' config classes by method.

    The import of these classes imports transformers' modeling code.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    configs: Mapping[str, Any] = AUTO_QUANTIZATION_CONFIG_MAPPING
    return configs


def quantisation_method(fields: Mapping[str, Any]) -> str:
    """Returns the method under transformers' name. Raises LoadFailed if the method is unknown or keys contradict it."""
    method = fields.get("quant_method")
    width = next((width for width in ("4bit", "8bit") if fields.get(f"load_in_{width}")), None)
    if width is not None:
        if method not in (None, "bitsandbytes", f"bitsandbytes_{width}"):
            raise LoadFailed(
                f"{_KEY}.quant_method: {method!r} cannot be combined with load_in_{width}, which is an option of "
                "bitsandbytes"
            )
        return f"bitsandbytes_{width}"
    if method in ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit"):
        raise LoadFailed(f"{_KEY}: bitsandbytes needs load_in_4bit or load_in_8bit")
    if not isinstance(method, str) or method not in _configs():
        named = "quant_method is missing" if method is None else f"quant_method: unknown {method!r}"
        raise LoadFailed(f"{_KEY}: {named}{did_you_mean_or_known(str(method), _configs())}")
    return str(method)


def quieten(method: str) -> None:
    """Silences a warning that LLM.int8 repeats in each layer of each step: it rounds other dtypes to float16."""
    if method.startswith("bitsandbytes"):
        logging.getLogger("bitsandbytes.autograd._functions").addFilter(_no_cast)


def _no_cast(record: logging.LogRecord) -> bool:
    return "inputs will be cast" not in str(record.msg)


def _require(method: str) -> None:
    """Checks that a method's package is installed, if it is a method that we test; transformers checks the others."""
    if method.startswith("bitsandbytes") and not is_bitsandbytes_available():
        raise LoadFailed(f"{_KEY}: {method} needs the package bitsandbytes: {_OURS}")
    if method == "torchao" and not is_torchao_available():
        raise LoadFailed(f"{_KEY}: torchao is not installed: {_OURS}")


def _torchao_type(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Reads a torchao config.

    The config is given as a class name, as a name with arguments, or in transformers' format (``default``).
    """
    from torchao import quantization
    from torchao.core.config import AOBaseConfig, config_from_dict

    key = f"{_KEY}.quant_type"
    name, arguments = (value, {}) if isinstance(value, str) else _single(value, key)
    classes = {n: kind for n, kind in vars(quantization).items() if isinstance(kind, type)}
    kinds = {n: kind for n, kind in classes.items() if issubclass(kind, AOBaseConfig) and kind is not AOBaseConfig}
    if name != "default" and name not in kinds:
        raise LoadFailed(f"{key}: unknown {name!r}{did_you_mean_or_known(name, kinds)}")
    try:
        config = config_from_dict(arguments) if name == "default" else kinds[name](**arguments)
        trial = nn.Linear(_TRIAL, _TRIAL, bias=False, device=device, dtype=dtype)
        quantization.quantize_(trial, config)
        trial(torch.ones(1, _TRIAL, device=device, dtype=dtype))
    except Exception as error:
        what = str(error).split("\n")[0] or type(error).__name__
        where = f"on {device} in {str(dtype).removeprefix('torch.')}"
        raise LoadFailed(f"{key}: {name} does not work {where}: {what}") from None
    return config


def _single(value: Any, key: str) -> tuple[str, dict[str, Any]]:
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, arguments),) = value.items()
        if isinstance(arguments, Mapping):
            return str(name), dict(arguments)
    raise LoadFailed(f"{key}: must be the name of a torchao config, or an object that maps this name to its arguments")


def quantised_as(config: Mapping[str, Any]) -> str | None:
    """Returns the method that a checkpoint's own config names; None for dense weights."""
    nested = config.get("text_config") or {}
    own = config.get("quantization_config") or nested.get("quantization_config")
    if own is None:
        return None
    if own.get("quant_method") in _configs() or own.get("quant_method") == "bitsandbytes":
        return str(own["quant_method"])
    known = ", ".join(_configs())
    raise LoadFailed(f"the checkpoint is quantised as {own.get('quant_method')!r}; transformers knows {known}")


def is_quantised(model: Any) -> bool:
    """Returns whether the model's weights are quantised by one of transformers' quantisers."""
    return getattr(model, "hf_quantizer", None) is not None


def check_kept(model: Any, method: str, asked: Mapping[str, Any] | None) -> None:
    """Raises LoadFailed if a model that should be quantised is dense, unless the settings ask for dense weights."""
    if asked is not None and asked.get("dequantize") is True:
        return
    quantizer = getattr(model, "hf_quantizer", None)
    config = getattr(quantizer, "quantization_config", None)
    kept = config is not None and not getattr(config, "dequantize", False)
    if kept and (method != "gguf" or getattr(quantizer, "packed_modules", None)):
        return
    size = format_bytes(sum(bytes_of(parameter) for parameter in model.parameters()))
    wanted = f'set {_KEY} to {{"quant_method": "{method}", "dequantize": true}}' if method != "gguf" else "omit the key"
    raise LoadFailed(
        f"{_KEY}: {method} weights cannot be kept packed here: transformers has dequantised them to {size}; if you "
        f"want this, {wanted}"
    )


def check_agreed(model: Any, config: Any, asked: Mapping[str, Any]) -> None:
    """Raises LoadFailed if an already quantised checkpoint keeps its own config instead of the settings' config."""
    config_of_checkpoint = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    for key in asked if config_of_checkpoint is not None else ():
        own, wanted = getattr(config_of_checkpoint, key, None), getattr(config, key, None)
        if key != "quant_method" and own != wanted:
            raise LoadFailed(
                f"{_KEY}.{key}: {asked[key]!r} cannot be applied, because the checkpoint is already quantised with "
                f"{own!r}"
            )


def wants_packed_gguf(fields: Mapping[str, Any] | None) -> bool:
    """Returns whether the settings ask to keep a GGUF file's weights packed.

    Raises LoadFailed if that is not possible.
    """
    if fields is None or fields.get("quant_method") != "gguf":
        return False
    if set(fields) != {"quant_method"}:
        raise LoadFailed(f"{_KEY}: gguf has no other keys; without quantization_config a GGUF file is dequantised")
    if not is_kernels_available():
        raise LoadFailed(
            f"{_KEY}: GGUF weights can be kept packed only with GPU kernels, which need the package kernels: pip "
            "install kernels; without quantization_config the weights are dequantised"
        )
    return True


def rounding_dtype(model: transformers.PreTrainedModel) -> torch.dtype:
    """Returns the dtype to which a model's matrix products are rounded; it may be coarser than the weights' dtype.

    On CPUs with bfloat16 instructions, bitsandbytes multiplies four-bit weights in bfloat16 for every model dtype.
    """
    config = getattr(model.config, "quantization_config", None)
    four_bits = bool(getattr(config, "load_in_4bit", False))
    dtype: torch.dtype = torch.bfloat16 if four_bits and model.device.type == "cpu" else model.dtype
    return dtype
