"""Reads a model's modules as a decoder of the Llama layout, or says where the model differs from that layout.

Every parameter must have a place in the layout, and every field of the config must be known. Norms and activations are
recognised by their results. The check at load finds any other difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear

from mlserver_torch_stream.engine.config_fields import declared_fields, rope_keys
from mlserver_torch_stream.engine.failures import UnsupportedLayout
from mlserver_torch_stream.engine.native.packed_rows import PackedExperts, PackedLinear, PackedRows, embedding_scale
from mlserver_torch_stream.engine.native.rotary import KindRotary, LayerRotary, Rotary

# Fields whose effects are read elsewhere: here from the modules, in the rotary table from the model's rotary module,
# and in the cache's layout from the config.
_READ = frozenset(
    (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act", "rms_norm_eps"),
        *("hidden_activation", "query_pre_attn_scalar"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
        *("attention_bias", "attention_out_bias", "mlp_bias", "use_bias"),
        *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
        *("attn_logit_softcapping", "final_logit_softcapping"),
        *("no_rope_layers", "no_rope_layer_interval", "rope_parameters", "rope_scaling", "rope_theta"),
        *("partial_rotary_factor", "max_position_embeddings", "original_max_position_embeddings"),
        *("layer_types", "sliding_window", "sliding_window_pattern", "use_sliding_window", "max_window_layers"),
        *("num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size"),
        *("decoder_sparse_step", "mlp_only_layers", "swiglu_alpha", "swiglu_limit"),
    )
)
# Fields without effect on the forward of a model in ``eval``: training, ids for tokenizer and sampler, bookkeeping.
_HARMLESS = frozenset(
    (
        *("initializer_range", "attention_dropout", "embd_pdrop", "resid_pdrop", "residual_dropout", "pretraining_tp"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "output_hidden_states", "return_dict"),
        *("dtype", "architectures", "transformers_version", "id2label", "label2id", "problem_type"),
        *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    )
)
# Values with which other fields and keys have no effect. None is such a value for all of them.
_OFF: Mapping[str, Any] = {
    "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False,
    "llama_4_scaling_beta": 0,
    "use_bidirectional_attention": False,
}
# Keys that transformers' rotary modules of the static kinds read, and a length that some checkpoints repeat.
_ROPE = frozenset(
    (
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor"),
        *("original_max_position_embeddings", "max_position_embeddings", "attention_factor"),
        *("short_factor", "long_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    )
)


def unknown_field(config: Any) -> str | None:
    """Returns the first field or rope key, with its value, that may change the model's results; None if there is none.

    Only fields that the config's class declares are checked, because the model's code cannot depend on other keys.
    """
    if getattr(config, "is_heterogeneous", False):
        return "per_layer_config"
    unknown = (name for name in declared_fields(type(config)) if name not in _READ | _HARMLESS)
    found = _first((name, getattr(config, name, None)) for name in unknown)
    return found or _first((name, value) for name, value in _ropes(rope_keys(config)) if name not in _ROPE)


def _ropes(keys: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields the keys of the model's rope, or of all ropes if each kind of layer has its own."""
    for name, value in keys:
        yield from value.items() if isinstance(value, Mapping) else ((name, value),)


def _first(pairs: Iterator[tuple[str, Any]]) -> str | None:
    on = ((name, value) for name, value in pairs if value is not None and value != _OFF.get(name))
    return next((f"{name} {value!r}" for name, value in on), None)


# Rotary embeddings whose angles depend on the position alone; the angles of dynamic ropes depend on the longest
# sequence.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
# The names of a layer's norms, by their role: before or after the attention and the MLP.
_NORM_ROLES = (
    {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"},
    {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"},
    {
        "before_attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    },
)
_NORM_NAMES = frozenset(name for roles in _NORM_ROLES for name in roles.values())


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix ``[outputs, inputs]`` and perhaps a bias; both consist of parts that have to be stacked.

    With several ``experts`` it is a matrix for each expert: the parts of the first expert, then those of the second.
    """

    weights: tuple[Tensor | PackedRows, ...]
    biases: tuple[Tensor | None, ...]
    experts: int = 1

    @property
    def interleaved(self) -> bool:
        """Whether the parts are gates and ups, which the kernels read in turn; no other projection has two parts."""
        return len(self.weights) == 2 * self.experts

    @property
    def matrices(self) -> list[Projection]:
        """The matrix of each expert."""
        if self.experts == 1:
            return [self]
        parts = len(self.weights) // self.experts
        firsts = range(0, len(self.weights), parts)
        return [Projection(self.weights[i : i + parts], self.biases[i : i + parts]) for i in firsts]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one decoder layer.

    ``norms`` has the float32 factors of the layer's norms by role, such as "before_mlp" or "query".
    """

    qkv: Projection
    out: Projection
    gate_up: Projection  # two parts: gates and ups
    down: Projection
    norms: dict[str, Tensor]
    rope: int  # 1 for the first rope of ``LayerRotary``; 0 if the layer has no positions
    router: Projection | None = None  # never rounded; None if the layer has one MLP for all tokens
    sinks: Tensor | None = None  # [heads]: an additional score in the softmax


@dataclass(frozen=True, slots=True)
class DecoderNumbers:
    """The numbers that all layers of a decoder share, with the field names of the kernels' ``KernelShape``."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    attention_scale: float
    attention_cap: float
    residual_scale: float
    embedding_scale: float
    logit_scale: float
    logit_cap: float
    experts: int = 0  # of each layer that has a router
    experts_used: int = 0  # for a token
    experts_normalised: bool = False  # whether the shares of a token's experts sum to 1
    swiglu_alpha: float = 0.0  # of the activation "clamped_swiglu", as in gpt-oss
    swiglu_limit: float = 0.0


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model's weights and constants in the form that the kernels need."""

    layers: tuple[DecoderLayer, ...]
    embedding: Tensor | PackedRows
    head: Projection
    last_norm: Tensor
    rotary: Rotary | LayerRotary
    whole_qk_norm: bool
    activation: str
    numbers: DecoderNumbers
    dense_dtype: torch.dtype | None = None  # to which dense matrices are rounded when they are packed; None: their own

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and of the cache."""
        if isinstance(self.embedding, PackedRows) or self.packed:
            return torch.bfloat16
        return self.dense_dtype or self.embedding.dtype

    @property
    def packed(self) -> bool:
        """Whether any projection has packed weights; if so, the dense tensors are in float32."""
        parts = (weight for projection in self.projections for weight in projection.weights)
        return any(isinstance(part, PackedRows) for part in parts)

    @property
    def table(self) -> Projection | None:
        """The embedding as a matrix if it has packed rows of its own; None if its rows are dense or are the head's."""
        if isinstance(self.embedding, Tensor) or self.embedding is self.head.weights[0]:
            return None
        return Projection((self.embedding,), (None,))

    @property
    def projections(self) -> list[Projection]:
        """The head, the projections of each layer, and the embedding if it has packed rows of its own; no routers."""
        layers = (part for layer in self.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down))
        return [self.head, *layers, *([] if self.table is None else [self.table])]


def read_decoder(model: Any) -> Decoder:
    """Reads transformers' model as a ``Decoder``. Raises UnsupportedLayout if the model differs from the layout."""
    reader = _StructureReader()
    base = reader.child(model, "model")
    head = reader.linear(model, "lm_head")
    embedding = reader.child(base, "embed_tokens")
    scale = embedding_scale(embedding)
    reader.take(embedding.weight)
    layers = reader.child(base, "layers")
    last_norm = reader.norm(base, "norm")
    rotary, kinds = _rotary(base)
    decoder_layers = tuple(reader.layer(layer, kinds) for layer in layers)
    left = [name for name, parameter in model.named_parameters() if id(parameter) not in reader.parameter_ids]
    if left:
        raise UnsupportedLayout(f"the parameter {left[0]} does not belong to the layout")
    _check_placement(model)
    unknown = unknown_field(model.config)
    if unknown is not None:
        raise UnsupportedLayout(f"its config has {unknown}, which the kernels do not support")
    shared = reader.shared_values()
    return Decoder(
        layers=decoder_layers,
        embedding=_weights(embedding),
        head=head,
        last_norm=last_norm,
        rotary=rotary,
        whole_qk_norm=shared.pop("whole_qk_norm"),
        activation=shared.pop("activation"),
        numbers=DecoderNumbers(
            **shared,
            embedding_scale=scale * float(getattr(base, "embedding_multiplier", 1.0)),
            logit_scale=1.0 / float(getattr(model.config, "logits_scaling", 1.0)),
            logit_cap=float(getattr(model.config, "final_logit_softcapping", None) or 0.0),
        ),
    )


@dataclass(slots=True)
class _StructureReader:
    """Reads modules. Records the parameters that were read and the values that all layers must share."""

    parameter_ids: set[int] = field(default_factory=set)
    noted: dict[str, set[Any]] = field(default_factory=dict)

    def shared_values(self) -> dict[str, Any]:
        """Returns the recorded values by name. Raises UnsupportedLayout if layers have different values."""
        for name, values in self.noted.items():
            if len(values) != 1:
                raise UnsupportedLayout(f"layers differ in {name}: {sorted(values, key=str)}")
        return {name: next(iter(values)) for name, values in self.noted.items()}

    def note(self, **values: Any) -> None:
        for name, value in values.items():
            self.noted.setdefault(name, set()).add(value)

    def take(self, *parameters: Tensor | None) -> None:
        self.parameter_ids.update(id(parameter) for parameter in parameters if parameter is not None)

    def child(self, module: Any, name: str) -> Any:
        found = getattr(module, name, None)
        if not isinstance(found, nn.Module):
            raise UnsupportedLayout(f"its layout is not that of Llama: {type(module).__name__} has no {name}")
        return found

    def linear(self, module: Any, *names: str) -> Projection:
        parts = [self.child(module, name) for name in names]
        for part in parts:
            if type(part) not in (nn.Linear, PackedLinear):
                raise UnsupportedLayout(f"the model has a projection of type {type(part).__name__}")
            self.take(part.weight, part.bias)
        return Projection(tuple(map(_weights, parts)), tuple(part.bias for part in parts))

    def layer(self, layer: Any, kinds: Sequence[str]) -> DecoderLayer:
        """Reads a layer.

        ``kinds`` are the kinds of layers, in the order of their ropes; it is empty if all layers have the same rope.
        """
        attention, mlp = self.child(layer, "self_attn"), self.child(layer, "mlp")
        norm_names = {name for name, _ in layer.named_children()} & _NORM_NAMES
        roles = next((each for each in _NORM_ROLES if set(each.values()) == norm_names), None)
        if roles is None:
            raise UnsupportedLayout(f"the model has a layer with the norms {', '.join(sorted(norm_names)) or 'none'}")
        norms = {role: self.norm(layer, name) for role, name in roles.items()}
        self.note(residual_scale=float(getattr(layer, "residual_multiplier", 1.0)))
        return DecoderLayer(
            qkv=self._qkv(attention),
            out=self.linear(attention, "o_proj"),
            norms=norms | self._qk_norms(attention),
            rope=_rope(attention, kinds),
            sinks=self._sinks(attention),
            **(self._experts(mlp) if hasattr(mlp, "experts") else self._mlp(mlp)),
        )

    def _mlp(self, mlp: Any) -> dict[str, Any]:
        """Returns the fields of a ``DecoderLayer`` for an MLP."""
        fused = hasattr(mlp, "gate_up_proj")
        gate_up = self.linear(mlp, "gate_up_proj") if fused else self.linear(mlp, "gate_proj", "up_proj")
        self.note(activation=_activation(getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)))
        return {"gate_up": _halves(gate_up) if fused else gate_up, "down": self.linear(mlp, "down_proj")}

    def _experts(self, mlp: Any) -> dict[str, Any]:
        """Returns the fields of a ``DecoderLayer`` for a mixture of experts."""
        experts, gate = self.child(mlp, "experts"), self.child(mlp, "router" if hasattr(mlp, "router") else "gate")
        gate_up, down = _expert_projections(experts)
        self.take(*(getattr(experts, name, None) for name in _EXPERT_PARAMETERS))
        alpha, limit = _swiglu(experts)
        activation = "clamped_swiglu" if limit else _activation(getattr(experts, "act_fn", None))
        self.note(activation=activation, swiglu_alpha=alpha, swiglu_limit=limit, experts=down.experts)
        return {"router": self._router(gate, down.experts), "gate_up": gate_up, "down": down}

    def _router(self, gate: Any, experts: int) -> Projection:
        """Calls a router to measure how many experts it chooses, and whether it normalises their probabilities.

        The router gets other weights and biases, whose logits are about 0.5, so that the probabilities of the chosen
        experts alone sum to clearly less than 1.
        """
        parameters = dict(gate.named_parameters())
        weight, bias = parameters.get("weight"), parameters.get("bias")
        other = UnsupportedLayout(f"the model has a router of type {type(gate).__name__}")
        if weight is None or len(weight) != experts or len(parameters) != 1 + (bias is not None):
            raise other
        self.take(weight, bias)
        random = torch.Generator().manual_seed(0)
        normal = partial(torch.randn, generator=random, dtype=torch.float32)
        x = normal((8, weight.shape[1])) * weight.shape[1] ** -0.5
        values = {name: 0.5 * normal(each.shape) for name, each in parameters.items()}
        try:
            found = functional_call(gate, values, x)
        except TypeError:  # it has more inputs
            raise other from None
        match found:
            case Tensor(), Tensor() as shares, Tensor(dtype=torch.int64) as chosen:
                probabilities = linear(x, **values).softmax(1)
                expected, largest = probabilities.gather(1, chosen), probabilities.topk(chosen.shape[1]).values
            case _:
                raise other
        same = partial(torch.allclose, rtol=0.03)
        for normalised, wanted in ((True, expected / expected.sum(1, keepdim=True)), (False, expected)):
            if same(expected, largest) and same(shares.float(), wanted):
                self.note(experts_used=chosen.shape[1], experts_normalised=normalised)
                return Projection((weight.detach(),), (None if bias is None else bias.detach(),))
        raise other

    def _qkv(self, attention: Any) -> Projection:
        if not hasattr(attention, "head_dim"):
            raise UnsupportedLayout("the model has attention without one head_dim for queries, keys and values")
        head_dim = int(attention.head_dim)
        out = self.child(attention, "o_proj").weight
        heads = out.shape[1] // head_dim
        kv_heads = heads // int(attention.num_key_value_groups)
        names = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
        qkv = self.linear(attention, *names)
        if sum(weight.shape[0] for weight in qkv.weights) != (heads + 2 * kv_heads) * head_dim:
            raise UnsupportedLayout("the model has query, key and value projections of unexpected sizes")
        self.note(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            attention_scale=float(attention.scaling),
            attention_cap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
        )
        return qkv

    def _sinks(self, attention: Any) -> Tensor | None:
        sinks: Tensor | None = getattr(attention, "sinks", None)
        if sinks is None:
            return None
        if sinks.shape != (attention.o_proj.weight.shape[1] // attention.head_dim,):
            raise UnsupportedLayout(f"the model has sinks of shape {list(sinks.shape)}")
        self.take(sinks)
        return sinks.detach()

    def _qk_norms(self, attention: Any) -> dict[str, Tensor]:
        names = {"query": "q_norm", "key": "k_norm"}
        norms = {role: self.norm(attention, name) for role, name in names.items() if hasattr(attention, name)}
        if len(norms) == 1:
            raise UnsupportedLayout("the model has a norm of only the queries or only the keys")
        self.note(whole_qk_norm=bool(norms) and norms["query"].numel() != attention.head_dim)
        return norms

    def norm(self, module: Any, name: str) -> Tensor:
        """Calls an RMS norm to measure its factors: ``weight`` or, in some families, ``1 + weight``."""
        norm = self.child(module, name)
        eps = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
        weight = getattr(norm, "weight", None)
        if not isinstance(weight, Tensor) or eps is None or len(list(norm.parameters())) != 1:
            raise UnsupportedLayout(f"{name} is not a plain RMS norm")
        self.take(weight)
        self.note(eps=float(eps))
        x = torch.linspace(-2.0, 3.0, weight.numel(), dtype=torch.float32)
        got = norm(x.to(weight.dtype)[None])[0].float()
        normed = x * torch.rsqrt(x.pow(2).mean() + eps)
        for multiplier in (weight.float(), weight.float() + 1):
            if torch.allclose(got, normed * multiplier, rtol=0.03, atol=0.03):
                return multiplier.detach()
        raise UnsupportedLayout(f"{name} does not compute an RMS norm")


def _weights(module: Any) -> Tensor | PackedRows:
    found: Tensor | PackedRows = getattr(module, "rows", module.weight)
    return found


_EXPERT_PARAMETERS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


def _expert_projections(experts: Any) -> tuple[Projection, Projection]:
    """Returns the gates and ups of each expert in turn, and the second matrix of each expert."""
    if isinstance(experts, PackedExperts):
        return _unbiased(experts.gates_and_ups, len(experts.downs)), _unbiased(experts.downs, len(experts.downs))
    parameters: list[Any] = [getattr(experts, name, None) for name in _EXPERT_PARAMETERS]
    gate_up, down, gate_up_bias, down_bias = parameters
    flags = [getattr(experts, name, None) for name in ("has_gate", "is_concatenated", "is_transposed", "has_bias")]
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or not flags[0] or None in flags:
        raise UnsupportedLayout(f"the model has experts of type {type(experts).__name__}")
    if experts.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)

    def halves(of_experts: Tensor) -> Iterator[Tensor]:
        for each in of_experts.detach():
            yield from each.chunk(2) if experts.is_concatenated else (each[::2], each[1::2])

    weights = tuple(halves(gate_up)), tuple(down.detach())
    if not experts.has_bias:
        return _unbiased(weights[0], len(down)), _unbiased(weights[1], len(down))
    biases = tuple(halves(gate_up_bias)), tuple(down_bias.detach())
    return Projection(weights[0], biases[0], len(down)), Projection(weights[1], biases[1], len(down))


def _unbiased(weights: Sequence[Tensor | PackedRows], experts: int) -> Projection:
    return Projection(tuple(weights), (None,) * len(weights), experts)


def _swiglu(experts: Any) -> tuple[float, float]:
    """Calls gpt-oss's activation to measure that it depends only on ``alpha`` and ``limit``, and returns these.

    Returns zeros if the experts have another activation.
    """
    alpha, limit = (float(getattr(experts, name, 0.0)) for name in ("alpha", "limit"))
    if hasattr(experts, "act_fn") or experts.is_concatenated or limit <= 0:
        return 0.0, 0.0
    gates, ups = torch.meshgrid(*[torch.linspace(-2, 2, 17, dtype=torch.float32) * limit] * 2, indexing="ij")
    got = experts._apply_gate(torch.stack((gates, ups), 2).flatten(1))
    gates, ups = gates.clamp(max=limit), ups.clamp(-limit, limit)
    same = torch.allclose(got, gates * (gates * alpha).sigmoid() * (ups + 1), atol=1e-5)
    return (alpha, limit) if same else (0.0, 0.0)


def _halves(fused: Projection) -> Projection:
    weight, bias = fused.weights[0], fused.biases[0]
    return Projection(weight.chunk(2), (None, None) if bias is None else bias.chunk(2))


def _activation(function: Any) -> str:
    x = torch.linspace(-6, 6, 97, dtype=torch.float32)
    known = {"silu": nn.functional.silu(x), "gelu_tanh": nn.functional.gelu(x, approximate="tanh")}
    for name, expected in known.items():
        if callable(function) and torch.allclose(function(x), expected, atol=1e-5):
            return name
    raise UnsupportedLayout("the model has an activation other than silu, tanh-gelu and gpt-oss's")


def _rotary(base: Any) -> tuple[Rotary | LayerRotary, Sequence[str]]:
    """Returns the rotary module, and the kinds of layers if each kind has its own rope."""
    rotary: Any = getattr(base, "rotary_emb", None)
    kind = getattr(rotary, "rope_type", None)
    if isinstance(kind, dict) and kind and all(each in _STATIC_ROPE for each in kind.values()):
        return LayerRotary(tuple(KindRotary(rotary, name) for name in kind)), tuple(kind)
    if kind == "longrope" and not _same_factors(rotary.config):
        raise UnsupportedLayout("the model has positions that change with the length of a sequence")
    if isinstance(kind, dict) or kind not in (*_STATIC_ROPE, "longrope"):
        raise UnsupportedLayout(f"the model has positions of kind {kind!r}")
    return rotary, ()


def _rope(attention: Any, kinds: Sequence[str]) -> int:
    if not getattr(attention, "use_rope", True):
        return 0
    kind = getattr(attention, "layer_type", None)
    if kinds and kind not in kinds:
        raise UnsupportedLayout(f"the model has layers of kind {kind!r}, which have no rope of their own")
    return 1 + (kinds.index(kind) if kinds else 0)


def _same_factors(config: Any) -> bool:
    """Returns whether "longrope" uses the same factors for all sequence lengths, as in a Llama from a GGUF file."""
    rope = config.rope_parameters
    return bool(rope["short_factor"] == rope["long_factor"])


def _check_placement(model: Any) -> None:
    parameters: Iterable[Tensor] = model.parameters()
    kinds = {(parameter.device.type, parameter.dtype) for parameter in parameters}
    if kinds not in ({("cpu", torch.bfloat16)}, {("cpu", torch.float32)}):
        found = ", ".join(sorted(f"{str(dtype).removeprefix('torch.')} on {place}" for place, dtype in kinds))
        advice = "; set dtype to bfloat16" if kinds == {("cpu", torch.float16)} else ""
        raise UnsupportedLayout(f"the weights are in {found}{advice}")
    if any(hasattr(module, "_hf_hook") or module._forward_hooks for module in model.modules()):
        raise UnsupportedLayout("the model has modules with hooks")
