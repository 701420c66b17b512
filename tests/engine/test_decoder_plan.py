"""A decoder built from a plan is bit-identical to the model from which the plan was made; the plan has no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mlserver_torch_stream.engine.failures import UnsupportedLayout
from mlserver_torch_stream.engine.loading.gguf_packed import load_packed, read_tensors, write_packed
from mlserver_torch_stream.engine.native.decoder_plan import build_decoder, plan_decoder
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.packed_rows import PackedRows
from mlserver_torch_stream.engine.native.rotary import angles_of
from mlserver_torch_stream.engine.native.structure import Decoder, read_decoder
from tests.engine.page_book import prefilled
from tests.engine.test_gguf_packed import FILES
from tests.engine.test_native import KNOWN, known_model
from tests.engine.tiny_gguf import write_tiny_gguf
from tests.engine.tiny_models import prompt_of, tiny_model

_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}


def assert_same_bits(model: Any, decoder: Decoder, folder: Path) -> None:
    ids = prompt_of(20, 1)
    with torch.inference_mode():
        (expected, _), (got, _) = (
            prefilled(NativeForward(each, KernelOptions(2, folder)), model, ids, 7) for each in (model, decoder)
        )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", KNOWN)
def test_every_layout_gives_the_same_bits(name: str, folder: Path) -> None:
    """The models include fused projections, of which the decoder holds parts, and tied weights."""
    model = known_model(name)
    tensors = dict(model.named_parameters())
    plan = plan_decoder(read_decoder(model), tensors)
    assert all(own.ndim == 1 for own in plan.own.values())  # norms and frequencies
    decoder = build_decoder(json.loads(json.dumps(plan.structure)), plan.own, tensors.__getitem__)
    assert (decoder.embedding is decoder.head.weights[0]) == model.config.tie_word_embeddings
    assert_same_bits(model, decoder, folder)


@pytest.mark.parametrize("name", FILES)
def test_every_packed_file_gives_the_same_bits(name: str, tmp_path: Path, folder: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", kinds=FILES[name], hidden=256)
    write_packed(file, tmp_path)
    packed = load_packed(tmp_path, file)
    plan = plan_decoder(read_decoder(packed.model), packed.tensors)
    assert sum(tensor.nbytes for tensor in plan.own.values()) < 0.1 * file.stat().st_size
    structure = json.loads(json.dumps(plan.structure))
    decoder = build_decoder(structure, plan.own, read_tensors(tmp_path, file)[0].__getitem__)
    assert isinstance(decoder.head.weights[0], PackedRows | torch.Tensor)
    assert_same_bits(packed.model, decoder, folder)


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 500.0}, _YARN])
def test_angles_are_those_of_the_rotary_module_at_far_positions_too(rope: dict[str, Any]) -> None:
    module = tiny_model("llama", rope_parameters=rope).model.rotary_emb
    x, positions = torch.zeros(1), torch.tensor([[0, 1, 2047, 2048, 100_000, 1_000_000]])
    for ours, theirs in zip(angles_of(module)[0](x, positions), module(x, positions), strict=True):
        assert torch.equal(ours, theirs)


def test_a_rotary_module_of_other_angles_is_refused() -> None:
    class Doubled(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inv_freq, self.attention_scaling = torch.ones(4), 1.0

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            angles = 2.0 * positions[..., None].float() * self.inv_freq.repeat(2)
            return angles.cos(), angles.sin()

    with pytest.raises(UnsupportedLayout, match="angles"):
        angles_of(Doubled())
