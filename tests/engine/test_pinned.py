"""Weights that are copied to the device at every step are moved to pinned memory, and nothing else changes.

The device is the CPU under another name, which suffices for accelerate to copy weights to it; the memory is ordinary.
"""

import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.loading import loader, pinned
from mlserver_torch_stream.engine.loading.pinned import pin_offloaded
from tests.engine.test_quantised import built, together
from tests.engine.tiny import prompt_of, reference, run
from tests.engine.tiny import tiny_model as make

DEVICE = torch.device("cpu")  # to accelerate another place than "cpu"
SPLIT = {
    "model.embed_tokens": DEVICE, "model.rotary_emb": DEVICE, "model.layers.0": DEVICE, "model.layers.1": "cpu",
    "model.norm": "cpu", "lm_head": DEVICE,
}  # fmt: skip
PROMPT = prompt_of(7)


class Memory:
    """A host with ``free`` bytes; allocating another block fails after ``fails`` blocks."""

    def __init__(self, free: int = 2**40, fails: int = 1000) -> None:
        self.blocks: list[torch.Tensor] = []
        self.free = free
        self._fails = fails

    def allocate(self, count: int) -> torch.Tensor:
        if len(self.blocks) == self._fails:
            raise RuntimeError("CUDA error: out of memory\nand much more")
        self.blocks.append(torch.zeros(count, dtype=torch.uint8))
        self.free -= count
        return self.blocks[-1]

    @property
    def taken(self) -> list[int]:
        return [len(block) for block in self.blocks]

    def pin(self, model: PreTrainedModel, **limits: int) -> int:
        return pin_offloaded(model, DEVICE.type, self.allocate, lambda: self.free, **limits)


def offloaded(*places: str, **config: object) -> PreTrainedModel:
    """A model of three layers, in which the parts named by ``places`` are on the host."""
    model = make("llama", **config)
    parts = [
        "model.embed_tokens",
        "model.rotary_emb",
        *(f"model.layers.{i}" for i in range(3)),
        "model.norm",
        "lm_head",
    ]
    dispatch_model(model, {part: "cpu" if part in places else DEVICE for part in parts}, main_device=DEVICE)
    return model


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights that the hooks read."""
    hooks = (hook for module in model.modules() for hook in pinned._offloading(module))
    found: dict[str, torch.Tensor] = next(hooks).weights_map.dataset.state_dict
    return found


def test_a_model_reads_the_pinned_copies_and_gives_the_tokens_of_one_device(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory()
    with built(tiny_model, None, fast_path="off") as engine:
        expected = run(together(engine))
    monkeypatch.setattr(loader, "_placement", lambda settings, weights: {"device_map": SPLIT})
    monkeypatch.setattr(loader, "pin_offloaded", memory.pin)
    caplog.set_level(logging.INFO)
    with built(tiny_model, None, fast_path="off") as engine:
        assert run(together(engine)) == expected
        assert caplog.text.count("Pinned 144.8 KiB of the 144.8 KiB of weights that are moved at every step") == 1
        with torch.inference_mode():
            for block in memory.blocks:
                block.zero_()
        assert run(together(engine)) != expected


def test_weights_share_blocks_because_torch_rounds_each_of_them_up() -> None:
    """Each matrix of these feed-forward layers has 6 KiB, and would take 8 KiB as a block of its own."""
    memory, model = Memory(), offloaded("model.layers.1", "model.layers.2")
    expected = reference(model, PROMPT, 10)
    count = memory.pin(model, block=2**15)
    assert reference(model, PROMPT, 10) == expected
    each = [weight.nbytes for weight in weights_of(model).values()]
    assert count == sum(each)
    assert memory.taken == [2**15, 2**15] and sum(memory.taken) < sum(1 << (size - 1).bit_length() for size in each)


def test_the_host_keeps_half_of_what_it_had_free() -> None:
    memory, model = Memory(free=2**16), offloaded("model.layers.1", "model.layers.2")
    before, expected = dict(weights_of(model)), reference(model, PROMPT, 10)
    count = memory.pin(model, block=2**13)
    assert 0 < count <= sum(memory.taken) <= 2**15 <= memory.free
    kept = [key for key, weight in weights_of(model).items() if weight is before[key]]
    assert kept and len(kept) < len(before)
    assert reference(model, PROMPT, 10) == expected


def test_tied_weights_are_pinned_once_and_not_at_all_where_the_device_has_them() -> None:
    model = offloaded("model.embed_tokens", "lm_head", tie_word_embeddings=True)
    expected = reference(model, PROMPT, 10)
    table = model.config.vocab_size * model.config.hidden_size * 4
    assert Memory().pin(model) == table
    weights = weights_of(model)
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    assert reference(model, PROMPT, 10) == expected
    assert Memory().pin(offloaded("lm_head", tie_word_embeddings=True)) == 0


def test_what_cannot_be_pinned_stays_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    memory, model = Memory(fails=2), offloaded("model.layers.1", "model.layers.2")
    before, expected = dict(weights_of(model)), reference(model, PROMPT, 10)
    caplog.set_level(logging.INFO)
    assert 0 < memory.pin(model, block=2**13) <= sum(memory.taken)
    assert "pinning more failed: CUDA error: out of memory" in caplog.text and "much more" not in caplog.text
    assert any(weight is before[key] for key, weight in weights_of(model).items())
    assert reference(model, PROMPT, 10) == expected


def test_without_a_gpu_nothing_is_pinned() -> None:
    memory = Memory()
    allocate = partial(pin_offloaded, allocate=memory.allocate, room=lambda: memory.free)
    assert allocate(offloaded("model.layers.1")) == allocate(make("llama")) == 0
    assert memory.blocks == []


def test_packed_weights_are_left_alone() -> None:
    """A tensor subclass may consist of several tensors inside, so a copy of its apparent bytes would be wrong."""

    class Packed(torch.Tensor):
        pass

    model = offloaded("lm_head")
    weights = weights_of(model)
    packed = weights["lm_head.weight"] = weights["lm_head.weight"].as_subclass(Packed)
    assert Memory().pin(model) == 0
    assert weights["lm_head.weight"] is packed
