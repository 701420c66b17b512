"""GGUF files give the tokens of the models from which they were made; anything unknown in them is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig

from mlserver_torch_stream.engine.checks.decoder_check import check_packed, verify_kernels
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.config_fields import settle_positions
from mlserver_torch_stream.engine.failures import NotPacked
from mlserver_torch_stream.engine.loading.gguf import converted_folder, load_gguf
from mlserver_torch_stream.engine.loading.gguf_model import loads_by_transformers
from mlserver_torch_stream.engine.loading.gguf_packed import load_packed, write_packed
from mlserver_torch_stream.engine.loading.gguf_tokenizer import load_gguf_tokenizer
from mlserver_torch_stream.engine.loading.tokenizer_files import loader_of
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.structure import read_decoder
from mlserver_torch_stream.errors import LoadFailed
from tests.engine.gguf_originals import CONTEXT, ORIGINALS, make_original, write_original
from tests.engine.page_book import prefilled
from tests.engine.tiny_gguf import TOKENS

Change = Callable[[gguf.GGUFWriter], None]

# Longer than windows, and than the lengths before scaling.
PROMPT = [(7 * position) % 250 + 2 for position in range(40)]
WITHOUT_KERNELS = {"qwen2 with experts": "mlp.shared_expert.gate_proj.weight does not belong to the layout"}


def check_same(got: Any, original: Any) -> None:
    """Compares the logits of a long and a short prompt, and greedy tokens."""
    with torch.inference_mode():
        for prompt in (PROMPT, PROMPT[:10]):
            ids = torch.tensor([prompt])
            expected = original(ids).logits
            assert (got(ids).logits - expected).abs().max() < 1e-3 * expected.std()
        assert torch.equal(greedy(got), greedy(original))


def greedy(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    return found


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_file_gives_the_tokens_of_its_original(name: str, tmp_path: Path) -> None:
    original = make_original(name)
    check_same(load_gguf(write_original(original, tmp_path / "m.gguf"), "float32"), original)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("llama", "mixtral", "gemma3") else pytest.param(name, marks=pytest.mark.long)
        for name in ORIGINALS
        if name not in WITHOUT_KERNELS
    ],
)
def test_packed_weights_give_the_tokens_of_the_original(name: str, tmp_path: Path) -> None:
    original = make_original(name)
    file = write_original(original, tmp_path / "m.gguf", "Q8_0")
    write_packed(file, tmp_path)
    check_same(load_packed(tmp_path, file).model, original)


@pytest.mark.parametrize("name", WITHOUT_KERNELS)
def test_weights_that_cannot_stay_packed_are_refused_by_name(name: str, tmp_path: Path, folder: Path) -> None:
    file = write_original(make_original(name), tmp_path / "m.gguf", "Q8_0")
    write_packed(file, tmp_path)
    with torch.inference_mode(), pytest.raises(NotPacked, match=WITHOUT_KERNELS[name]):
        check_packed(tmp_path, file, "m", KernelOptions(1, folder))


def test_experts_in_a_format_without_kernels_are_refused_by_name(tmp_path: Path) -> None:
    file = write_original(make_original("mixtral"), tmp_path / "m.gguf", "F16")
    with pytest.raises(NotPacked, match=r"experts in F16 \(model.layers.0.mlp.experts"):
        write_packed(file, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        *("llama 3.1", "qwen2, yarn", "smollm3", "gemma2", "gemma3", "phi3", "phi3, long"),
        *("mixtral", "qwen3 with experts"),
    ],
)
def test_our_kernels_give_the_logits_of_the_original(name: str, tmp_path: Path, folder: Path) -> None:
    original = make_original(name)
    file = write_original(original, tmp_path / "m.gguf", "Q8_0")
    write_packed(file, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    settle_positions(config, CONTEXT)
    model = load_packed(tmp_path, file, config).model
    with torch.inference_mode():
        forward, findings = verify_kernels(
            ExpectedLogits(model, torch.int8), read_decoder(model), KernelOptions(1, folder)
        )
        got, _ = prefilled(forward, original, PROMPT, chunk=16)
        exact = original(torch.tensor([PROMPT])).logits[0, -1]
    assert findings.problem is None
    assert (got - exact).pow(2).mean().sqrt() < 0.1 * exact.std()


def without(tensor: str) -> Change:
    def change(writer: gguf.GGUFWriter) -> None:
        del writer.tensors[0][tensor]

    return change


def with_tensor(tensor: str, *shape: int) -> Change:
    return lambda writer: writer.add_tensor(tensor, np.ones(shape, np.float32))


def with_key(key: str, value: str | float | bool | list[int]) -> Change:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    return change


REFUSED: dict[str, tuple[str, Change, str]] = {
    "a missing matrix": ("llama", without("blk.1.attn_q.weight"), "lacks the tensor blk.1.attn_q.weight"),
    "a missing norm": ("qwen3", without("blk.0.attn_q_norm.weight"), "lacks the tensor blk.0.attn_q_norm.weight"),
    "missing experts": ("mixtral", without("blk.0.ffn_up_exps.weight"), "lacks the tensor blk.0.ffn_up_exps.weight"),
    "a missing embedding": ("llama", without("token_embd.weight"), "lacks the tensor token_embd.weight"),
    "an unknown tensor": ("llama", with_tensor("blk.0.attn_sub_norm.weight", 64), "tensor blk.0.attn_sub_norm.weight"),
    "a scale of weights": ("qwen2", with_tensor("blk.0.attn_q.scale", 1), "tensor blk.0.attn_q.scale"),
    "a bias without a place": ("qwen2", with_tensor("blk.0.ffn_up.bias", 96), "tensor blk.0.ffn_up.bias"),
    "a norm's bias": ("llama", with_tensor("blk.0.attn_norm.bias", 64), "tensor blk.0.attn_norm.bias"),
    "biases of experts": ("mixtral", with_tensor("blk.0.attn_q.bias", 64), "tensor blk.0.attn_q.bias"),
    "more layers": ("llama", with_tensor("blk.2.attn_q.weight", 64, 64), "block_count is 2, .* 3 blocks"),
    "too many layers": ("llama", with_key("llama.block_count", 10**9), "block_count is 1000000000, .* 2 blocks"),
    "old experts": ("mixtral", with_tensor("blk.0.ffn_gate.0.weight", 96, 64), "belongs to an old layout"),
    "another shape": ("llama", with_key("llama.feed_forward_length", 128), r"shape \[96, 64\], .* needs \[128, 64\]"),
    "an unknown key": ("llama", with_key("llama.logit_scale", 0.5), "llama.logit_scale is 0.5"),
    "a key of another type": ("llama", with_key("llama.block_count", "two"), "block_count is two, but must be"),
    "layers that differ": (
        "llama",
        with_key("llama.feed_forward_length", [96, 64]),
        r"llama.feed_forward_length is \[96, 64\], but must be a single int",
    ),
    "an embedding model": ("qwen3", with_key("qwen3.pooling_type", 3), "qwen3.pooling_type is 3"),
    "attention to later tokens": ("llama", with_key("llama.attention.causal", False), "attention.causal is False"),
    "other values": ("llama", with_key("llama.attention.value_length", 8), "attention.value_length is 8"),
    "another choice of experts": ("mixtral", with_key("llama.expert_gating_func", 2), "expert_gating_func is 2"),
    "a part of the rotation": ("llama", with_key("llama.rope.dimension_count", 8), "rope.dimension_count is 8"),
    "an unknown scaling": ("llama", with_key("llama.rope.scaling.type", "ntk"), "rope.scaling.type is 'ntk'"),
    "yarn's extrapolation": (
        "llama, yarn",
        with_key("llama.rope.scaling.yarn_ext_factor", 0.5),
        "yarn_ext_factor is not 1",
    ),
    "yarn's multiplier": (
        "llama, yarn",
        with_key("llama.rope.scaling.yarn_log_multiplier", 0.1),
        "yarn_log_multiplier is 0.1",
    ),
    "scaling beside factors": (
        "llama, linear",
        with_tensor("rope_freqs.weight", 8),
        "scaling.type is linear, which cannot be combined with tensors of rope factors",
    ),
    "factors of another size": ("llama", with_tensor("rope_freqs.weight", 4), "rope_freqs.weight has 4 factors"),
    "factors of short sequences alone": (
        "phi3, long",
        without("rope_factors_long.weight"),
        "rope_factors_short.weight without its counterpart",
    ),
    "scaled attention alone": ("llama", with_key("llama.rope.scaling.attn_factor", 1.2), "attn_factor is 1.2"),
    "long rope without factors": ("llama", with_key("llama.rope.scaling.type", "longrope"), "lacks the tensor rope_f"),
    "a negative epsilon": ("llama", with_key("llama.attention.layer_norm_rms_epsilon", -1.0), "epsilon is -1.0"),
    "a base that is NaN": ("llama", with_key("llama.rope.freq_base", float("nan")), "freq_base is nan"),
    "an infinite factor": ("llama, linear", with_key("llama.rope.scaling.factor", float("inf")), "factor is inf"),
    "yarn from no positions": (
        "llama, yarn",
        with_key("llama.rope.scaling.original_context_length", 0),
        "original_context_length is 0",
    ),
    "no experts used": ("mixtral", with_key("llama.expert_used_count", 0), "used_count is 0, but must be from 1 to 4"),
    "too many experts used": (
        "qwen3 with experts",
        with_key("qwen3moe.expert_used_count", 9),
        "is 9, but must be from 1 to 4, the number of experts",
    ),
    "an end that is no token": (
        "llama",
        with_key("tokenizer.ggml.eos_token_id", 2**30),
        "tokenizer.ggml.eos_token_id is 1073741824, which is not one of",
    ),
    "a padding that is no token": ("llama", with_key("tokenizer.ggml.padding_token_id", -1), "padding_token_id is -1"),
    "an adapter": ("llama", with_key("general.type", "adapter"), "general.type is 'adapter'"),
    "a part of a file": ("llama", with_key("split.count", 2), "split.count is 2: merge the 2 parts"),
    "another architecture": ("llama", with_key("general.architecture", "falcon"), "architecture falcon are not supp"),
}


def test_a_file_of_an_architecture_that_transformers_does_not_know_has_its_own_tokenizer(tmp_path: Path) -> None:
    tokenizers = []
    for name in ("llama", "smollm3"):
        (tmp_path / name).mkdir()
        tokenizers.append(load_gguf_tokenizer(write_original(make_original(name), tmp_path / name / "m.gguf")))
    usual, own = tokenizers
    assert own.backend_tokenizer.to_str() == usual.backend_tokenizer.to_str()
    assert (own.bos_token_id, own.eos_token_id, own.chat_template) == (0, 1, usual.chat_template)


def test_a_template_for_conversations_with_tools_is_used_for_them(tmp_path: Path) -> None:
    """As files of Hermes models have it; their other template ignores tools."""
    change = with_key("tokenizer.chat_template.tool_use", "{{ tools }}")
    file = write_original(make_original("llama"), tmp_path / "m.gguf", change=change)
    folder = converted_folder(file, tmp_path / "cache")
    assert folder is not None
    for tokenizer in (load_gguf_tokenizer(file), loader_of(folder).from_pretrained(folder)):
        assert tokenizer.get_chat_template(tools=[{}]) == "{{ tools }}"
        assert "<|start|>" in tokenizer.get_chat_template()


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_missing_or_not_known_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, change, said = REFUSED[case]
    file = write_original(make_original(name), tmp_path / "m.gguf", "Q8_0", change)
    for load in (lambda: load_gguf(file, "float32"), lambda: write_packed(file, tmp_path)):
        with pytest.raises(LoadFailed, match=said):
            load()


HARMLESS: dict[str, Change] = {
    "descriptions": with_key("general.basename", "tiny"),
    "the quantiser's notes": with_key("quantize.imatrix.entries_count", 3),
    "no experts": with_key("llama.expert_count", 0),
    "attention to earlier tokens": with_key("llama.attention.causal", True),
    "no window": with_key("llama.attention.sliding_window", 0),
    "no cap": with_key("llama.attn_logit_softcapping", 0.0),
    "no pooling": with_key("llama.pooling_type", 0),
    "no scaling": with_key("llama.rope.scaling.type", "none"),
    "one count for each layer": with_key("llama.attention.head_count_kv", [2, 2]),
    "factors of one": with_tensor("rope_freqs.weight", 8),
}


@pytest.mark.long
@pytest.mark.parametrize("case", HARMLESS)
def test_what_changes_no_result_is_accepted(case: str, tmp_path: Path) -> None:
    original = make_original("llama")
    check_same(load_gguf(write_original(original, tmp_path / "m.gguf", change=HARMLESS[case]), "float32"), original)


def test_every_token_that_the_file_says_ends_an_answer_does(tmp_path: Path) -> None:
    """For example ``<|eot_id|>`` beside ``<|end_of_text|>``."""
    change = with_key("tokenizer.ggml.eot_token_id", 5)
    file = write_original(make_original("llama"), tmp_path / "m.gguf", change=change)
    assert load_gguf(file, "float32").generation_config.eos_token_id == [1, 5]


@pytest.mark.parametrize(("kind", "ends"), [(gguf.TokenType.CONTROL, [5, 1]), (gguf.TokenType.NORMAL, 5)])
def test_a_control_token_that_ends_a_turn_ends_an_answer_though_no_key_names_it(
    kind: int, ends: Any, tmp_path: Path
) -> None:
    """For example ``<|end|>``, the second token here: files of Phi name only ``<|endoftext|>``."""

    def change(writer: gguf.GGUFWriter) -> None:
        with_key("tokenizer.ggml.token_type", [int(kind)] * len(TOKENS))(writer)
        with_key("tokenizer.ggml.eos_token_id", 5)(writer)

    file = write_original(make_original("llama"), tmp_path / "m.gguf", change=change)
    assert load_gguf(file, "float32").generation_config.eos_token_id == ends


def test_a_bias_of_some_modules_alone_is_zero_in_the_others(tmp_path: Path) -> None:
    original = make_original("llama with biases")
    with torch.no_grad():
        original.model.layers[1].self_attn.o_proj.bias.zero_()
    file = write_original(original, tmp_path / "m.gguf", change=without("blk.1.attn_output.bias"))
    check_same(load_gguf(file, "float32"), original)


QWEN35: dict[str, int | float | str | list[int] | list[bool]] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.recurrent_layers": [True, False],
    "full_attention_interval": 2,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
    "rope.freq_base": 1e4,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rope.scaling.type", "yarn", "qwen35.rope.scaling.type is yarn, which is not supported here"),
        ("attention.recurrent_layers", [False, True], "recurrent_layers does not match full_attention_interval"),
        ("attention.value_length", 8, "value_length is 8, but must equal the length of the keys, which is 16"),
        ("vocab_size", 261, ""),
    ],
)
def test_keys_that_transformers_would_ignore_are_refused_too(key: str, value: Any, said: str, tmp_path: Path) -> None:
    """The file has one of the architectures that this package reads itself."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen35")
    for name, each in {**QWEN35, key: value}.items():
        writer.add_key_value(f"qwen35.{name}", each, gguf.GGUFValueType.get_type(each))
    writer.add_token_list(["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(LoadFailed, match=said) if said else nullcontext():
        assert loads_by_transformers(tmp_path / "m.gguf")
