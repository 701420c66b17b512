"""Mixtures of experts on our kernels: where rows go, what experts without rows do, and which routers are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from mlserver_torch_stream.engine.failures import UnsupportedLayout
from mlserver_torch_stream.engine.loading.gguf_packed import load_packed, write_packed
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.quantise import ROUNDED
from mlserver_torch_stream.engine.native.structure import read_decoder
from tests.engine.gguf_originals import make_original, write_original
from tests.engine.page_book import PageBook, prefilled
from tests.engine.test_first_start import cache  # noqa: F401 a fixture
from tests.engine.test_native import in_company, known_model
from tests.engine.test_record import PROMPT, loaded, logits
from tests.engine.tiny_models import prompt_of, tiny_model

_QWEN = "qwen3 with experts, one layer without"
_GPT_OSS = "gpt-oss"


def logits_of(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0, -1]


def mixtral(**changes: Any) -> PreTrainedModel:
    return tiny_model("mixtral", max_position_embeddings=2048, **changes)


def send_all_to(model: PreTrainedModel, experts: Sequence[int]) -> None:
    """Makes each router choose these experts for all rows, the first one with the largest share."""
    model.model.embed_tokens.weight[:, 0] = 9.0  # so this dimension stays above 0 in each layer
    for layer in model.model.layers:
        router = layer.mlp.gate.weight
        router.zero_()
        for place, expert in enumerate(experts):
            router[expert, 0] = 0.5 - 0.1 * place
        for name in ("down_proj", "gate_up_proj"):
            weights = getattr(layer.mlp.experts, name)
            others = [expert for expert in range(len(weights)) if expert not in experts]
            weights[others] = torch.nan


@pytest.mark.parametrize("used, experts", [(1, [2]), (2, [3, 1]), (4, [0, 1, 2, 3])])
@pytest.mark.parametrize("tokens", [1, 5, 600])
def test_experts_without_rows_are_not_computed_and_one_expert_may_get_all_rows(
    used: int, experts: list[int], tokens: int, folder: Path
) -> None:
    """The weights of the other experts are NaN."""
    model, ids = mixtral(num_experts_per_tok=used), prompt_of(tokens, 1)
    with torch.inference_mode():
        send_all_to(model, experts)
        expected = logits_of(model, ids)
        found, _ = prefilled(NativeForward(model, KernelOptions(2, folder)), model, ids, tokens)
    assert expected.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", _QWEN, _GPT_OSS])
def test_a_step_of_decode_rows_and_a_chunk_has_the_logits_of_the_model(name: str, folder: Path) -> None:
    model = known_model(name)
    begun = {str(length): prompt_of(length, length) for length in (3, 17, 40)}
    with torch.inference_mode():
        forward, book = NativeForward(model, KernelOptions(3, folder)), PageBook(model)
        book.step(forward, {**begun, "long": prompt_of(90, 9)[:30]}, dict.fromkeys(begun, 1) | {"long": 0})
        found = book.step(forward, {"17": [5], "long": prompt_of(90, 9)[30:], "3": [6], "40": [7]})
        for row, ids in (
            *((str(length), [*begun[str(length)], token]) for length, token in ((17, 5), (3, 6), (40, 7))),
            ("long", prompt_of(90, 9)),
        ):
            torch.testing.assert_close(found[row][0], logits_of(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", _GPT_OSS])
@pytest.mark.parametrize("chunk", [1, 100, 700])
def test_a_long_prompt_in_pieces_of_any_size_gives_the_logits_of_the_whole(name: str, chunk: int, folder: Path) -> None:
    model, ids = known_model(name), prompt_of(700, 1)
    with torch.inference_mode():
        found, _ = prefilled(NativeForward(model, KernelOptions(2, folder)), model, ids, chunk)
        torch.testing.assert_close(found, logits_of(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "dtype, rounded",
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8"), (torch.bfloat16, "int4")],
)
@pytest.mark.parametrize("name", [_QWEN, _GPT_OSS])
def test_a_row_gets_the_same_bits_in_any_company_and_with_any_threads(
    name: str, dtype: torch.dtype, rounded: str | None, folder: Path
) -> None:
    model, rounding = known_model(name).to(dtype), None if rounded is None else ROUNDED[rounded]
    first, *others = in_company(model, lambda threads: NativeForward(model, KernelOptions(threads, folder), rounding))
    assert first.isfinite().all() and all(torch.equal(logits, first) for logits in others)


def test_a_row_of_nan_is_alone_with_it(folder: Path) -> None:
    model = mixtral()
    model.get_input_embeddings().weight.data[9] = torch.nan
    with torch.inference_mode():
        forward, book = NativeForward(model, KernelOptions(2, folder)), PageBook(model)
        book.step(forward, {name: [3, 4, 5] for name in "abc"})
        found = book.step(forward, {"a": [1], "b": [9], "c": [2], "d": [8, 9, 8], "e": [8, 8, 8]})
    assert [bool(logits.isnan().any()) for logits in found.values()] == [False, True, False, True, False]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("joined", [False, True])
def test_files_have_the_tensors_of_single_experts_or_of_all(
    family: str,
    joined: bool,
    tmp_path: Path,
    cache: Path,  # noqa: F811
) -> None:
    """A later start builds the decoder from the files, without transformers' model."""
    options = {"num_experts_per_tok": 2, "num_experts": 4} if family == "qwen3_moe" else {}
    model, place = tiny_model(family, **options).to(torch.bfloat16), tmp_path / "model"
    model.save_pretrained(place, save_original_format=not joined)
    with safe_open(place / "model.safetensors", "pt") as file:
        assert joined == any(name.endswith("experts.down_proj") for name in file.keys())  # noqa: SIM118
    first, counts = loaded(place, cache)
    assert counts == {"new": 1} and first.has_threads
    again, counts = loaded(place, cache)
    assert not counts and torch.equal(logits(again), logits(first))


@pytest.mark.parametrize("extra", [{}, {"weights": "int8"}, {"weights": "int4"}])
def test_a_later_start_of_gpt_oss_has_the_bits_of_its_first_and_of_the_model(
    extra: dict[str, str],
    tmp_path: Path,
    cache: Path,  # noqa: F811
) -> None:
    """Files have an expert's matrices transposed, with gates and ups in turn, and here all values in float32."""
    known_model(_GPT_OSS).save_pretrained(tmp_path / "model")
    first, counts = loaded(tmp_path / "model", cache, dtype="bfloat16", **extra)
    assert counts == {"new": 1} and first.has_threads
    again, counts = loaded(tmp_path / "model", cache, dtype="bfloat16", **extra)
    assert not counts and torch.equal(logits(again), logits(first))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    with torch.inference_mode():
        forward = NativeForward(model, KernelOptions(2, cache), ROUNDED.get(extra.get("weights", "")))
        assert torch.equal(prefilled(forward, model, PROMPT, chunk=4)[0], logits(first))


def test_a_checkpoint_in_mxfp4_runs_on_the_kernels_once_it_is_dequantised(
    tmp_path: Path,
    cache: Path,  # noqa: F811
) -> None:
    known_model(_GPT_OSS).to(torch.bfloat16).save_pretrained(place := tmp_path / "model")
    tensors, blocks = load_file(place / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj")]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=blocks)
        tensors[f"{name}_scales"] = torch.full(shape, 123, dtype=torch.uint8)  # 2**(123 - 127)
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    prepared, _ = loaded(place, cache, quantization_config={"quant_method": "mxfp4", "dequantize": True})
    assert prepared.choice is not None and isinstance(prepared.choice.forward, NativeForward)


@pytest.mark.parametrize("up", [-500.0, -3.0, 3.0, 500.0])
@pytest.mark.parametrize("gate", [-500.0, -90.0, -6.0, 6.0, 500.0])
def test_far_gates_and_ups_are_clamped(gate: float, up: float, folder: Path) -> None:
    model, ids = tiny_model("gpt_oss"), prompt_of(20, 1)
    with torch.inference_mode():
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj_bias[:, ::2] = gate
            layer.mlp.experts.gate_up_proj_bias[:, 1::2] = up
        expected = logits_of(model, ids)
        found, _ = prefilled(NativeForward(model, KernelOptions(2, folder)), model, ids, 20)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", [lambda gated: 2 * gated, lambda gated: gated.clamp(max=3.0)])
def test_gated_units_that_compute_something_else_are_refused(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt_oss")
    experts = model.model.layers[1].mlp.experts
    apply_gate = experts._apply_gate
    monkeypatch.setattr(experts, "_apply_gate", lambda gate_up: change(apply_gate(gate_up)))
    with torch.inference_mode(), pytest.raises(UnsupportedLayout, match="an activation other than"):
        read_decoder(model)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3 with experts"])
def test_packed_experts_have_the_logits_of_the_file(name: str, kind: str, tmp_path: Path, folder: Path) -> None:
    """The reference computes the same blocks in float32; the kernels round activations to int8."""
    file = write_original(make_original(name), tmp_path / "m.gguf", kind)
    write_packed(file, tmp_path)
    model, ids = load_packed(tmp_path, file).model, prompt_of(30, 1)
    ids = [token % model.config.vocab_size for token in ids]
    with torch.inference_mode():
        expected = logits_of(model, ids)
        found, _ = prefilled(NativeForward(model, KernelOptions(2, folder)), model, ids, 7)
    assert (found - expected).pow(2).mean().sqrt() < 0.1 * expected.std()


class _Doubled(torch.nn.Module):  # type: ignore[misc]
    """A router whose shares sum to two."""

    def __init__(self, router: torch.nn.Module) -> None:
        super().__init__()
        self.weight, self.router = router.weight, router

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, shares, chosen = self.router(x)
        return logits, 2 * shares, chosen


class _Lowest(_Doubled):
    """A router that chooses the experts with the smallest logits."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.router(-x)


@pytest.mark.parametrize("other", [_Doubled, _Lowest, lambda router: torch.nn.Linear(32, 4, bias=False)])
def test_a_router_that_computes_something_else_is_refused(other: Any) -> None:
    model = mixtral()
    model.model.layers[1].mlp.gate = other(model.model.layers[1].mlp.gate)
    with torch.inference_mode(), pytest.raises(UnsupportedLayout, match="the model has a router of type"):
        read_decoder(model)


def test_layers_with_different_numbers_of_chosen_experts_are_refused() -> None:
    model = mixtral()
    model.model.layers[1].mlp.gate.top_k = 3
    with torch.inference_mode(), pytest.raises(UnsupportedLayout, match=r"layers differ in experts_used: \[2, 3\]"):
        read_decoder(model)


def test_a_router_with_more_inputs_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(UnsupportedLayout, match="a router of type MiniMaxM2TopKRouter"):
        read_decoder(tiny_model("minimax_m2", num_local_experts=4, num_experts_per_tok=2))


def test_experts_beside_a_shared_one_are_refused() -> None:
    sizes = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    with torch.inference_mode(), pytest.raises(UnsupportedLayout, match="shared_expert"):
        read_decoder(tiny_model("qwen2_moe", **sizes))
