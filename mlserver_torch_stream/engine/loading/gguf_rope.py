"""Reads a GGUF file's parameters for rotary positions: the base, the scaling, and the factors of single frequencies.

A value that transformers' rotary modules cannot express is refused by name.
"""

from __future__ import annotations

from typing import Any

from mlserver_torch_stream.engine.loading.gguf_file import GgufFile
from mlserver_torch_stream.errors import LoadFailed

_YARN = {  # the keys of yarn, and transformers' names for them
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


def rope_parameters(file: GgufFile, head_dim: int, context: int, partial: bool = False) -> dict[str, Any]:
    """Returns transformers' ``rope_parameters``. Raises LoadFailed for values that they cannot express.

    ``context`` is the maximum number of positions. ``partial`` says whether the model can rotate only a part of
    ``head_dim``.
    """
    rotated = _rotated(file, head_dim, partial)
    base = {"rope_theta": file.take("rope.freq_base", float) or 10000.0}
    if rotated != head_dim:
        base["partial_rotary_factor"] = rotated / head_dim
    scaling = _scaling(file)
    factors = _factors(file, rotated // 2, context)
    if scaling["rope_type"] == "longrope" and factors is None:
        raise file.refused("rope.scaling.type", "is longrope, but the file lacks the tensor rope_factors_long.weight")
    if factors is not None and scaling["rope_type"] not in ("default", "longrope"):
        raise file.refused(
            "rope.scaling.type",
            f"is {scaling['rope_type']}, which cannot be combined with tensors of rope factors",
        )
    return {**base, **(factors or scaling)}


def _rotated(file: GgufFile, head_dim: int, partial: bool) -> int:
    """Returns the number of a head's dimensions that are rotated."""
    rotated = file.take("rope.dimension_count", int) or head_dim
    fits = 0 < rotated <= head_dim and int(head_dim * (rotated / head_dim)) == rotated
    if not fits or (rotated != head_dim and not partial):
        raise file.refused(
            "rope.dimension_count", f"is {rotated}, which is not supported for heads of {head_dim} dimensions"
        )
    return rotated


def _scaling(file: GgufFile) -> dict[str, Any]:
    """Returns the scaling.

    As in llama.cpp, a factor without a type means linear scaling; if the type is ``none``, the factor is ignored.
    """
    kind = file.take("rope.scaling.type", str) or "linear"
    old = file.take("rope.scale_linear", float)
    factor = file.take("rope.scaling.factor", float) or old or 1.0
    if kind == "yarn":
        if file.take("rope.scaling.yarn_ext_factor", float) not in (None, 1.0):
            raise file.refused("rope.scaling.yarn_ext_factor", "is not 1; other values are not supported here")
        fields = {name: file.take(key, float) for key, name in _YARN.items()}
        original = file.need("rope.scaling.original_context_length", int)
        if original < 1:
            raise file.refused("rope.scaling.original_context_length", f"is {original}, but must be at least 1")
        own = {name: value for name, value in fields.items() if value is not None}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **own}
    if kind not in ("linear", "none", "longrope"):
        raise file.refused("rope.scaling.type", f"is {kind!r}, which is not supported here")
    if kind == "linear" and factor != 1.0:
        file.take("rope.scaling.original_context_length", int)  # the original length, on which no result depends
        return {"rope_type": "linear", "factor": factor}
    return {"rope_type": "longrope" if kind == "longrope" else "default"}


def _factors(file: GgufFile, count: int, context: int) -> dict[str, Any] | None:
    """Returns the divisors of the frequencies: a set for short and a set for long sequences, or one set for both.

    One set for both is called ``rope_freqs``. Files store Llama 3.1's scaling in this way, without its parameters.
    """
    original = file.take("rope.scaling.original_context_length", int)
    attention = file.take("rope.scaling.attn_factor", float)
    named = {name: file.vector(f"{name}.weight") for name in ("rope_freqs", "rope_factors_short", "rope_factors_long")}
    factors = {name: values for name, values in named.items() if values is not None}
    for name, values in factors.items():
        if len(values) != count or not all(0.0 < value < float("inf") for value in values):
            raise LoadFailed(
                f"the tensor {name}.weight has {len(values)} factors, but must have {count}, all positive and finite"
            )
    if not factors:
        if attention not in (None, 1.0):
            raise file.refused(
                "rope.scaling.attn_factor",
                f"is {attention}, which is not supported without tensors of rope factors",
            )
        return None
    short, long = factors.get("rope_factors_short"), factors.get("rope_factors_long")
    if "rope_freqs" in factors:
        if len(factors) > 1:
            raise LoadFailed(
                "the tensor rope_freqs.weight is not supported together with rope_factors_short.weight or "
                "rope_factors_long.weight"
            )
        short = long = factors["rope_freqs"]
        original = context  # beyond it the long factors apply, which are the same
    if short is None or long is None or original is None:
        lacking = "the key rope.scaling.original_context_length" if original is None else "its counterpart"
        raise LoadFailed(f"the file has the tensor {min(factors)}.weight without {lacking}")
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "factor": context / original,
        "original_max_position_embeddings": original,
        "attention_factor": 1.0 if attention is None else attention,
    }
