"""Our kernels against transformers: equal tokens in float32, logits no worse in bfloat16; other models are refused."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.checks import forward_choice
from mlserver_torch_stream.engine.failures import UnsupportedLayout
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.native import native_forward
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.quantise import ROUNDED
from mlserver_torch_stream.engine.native.structure import read_decoder
from tests.engine.kernels import kernels_of
from tests.engine.page_book import PageBook, answers, errors_of, expected_answers, prefilled
from tests.engine.tiny import check_forward
from tests.engine.tiny_models import FAMILIES, VOCAB, prompt_of, tiny_model

# (prompt length, answer length): short and long prompts, some longer than a window of 6, answers that end in turn.
REQUESTS = [(5, 20), (17, 6), (3, 14), (11, 9), (23, 12), (1, 5)]
CHUNK = 4  # of a prompt in a step

_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}

# Family and changes to its tiny config: what the kernels must know of the layout, each at least once.
KNOWN = {
    "llama": ("llama", {}),
    "llama, untied": ("llama", {"tie_word_embeddings": False}),
    "llama, tied, biases everywhere": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama, odd sizes": (
        "llama",
        {
            "hidden_size": 60,
            "intermediate_size": 74,
            "head_dim": 20,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
    ),
    "llama, one key head per query head": ("llama", {"num_key_value_heads": 4}),
    "llama, eight query heads per key head": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "llama, heads of 128": ("llama", {"head_dim": 128}),
    "llama, heads of 256": ("llama", {"head_dim": 256}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral, window of 6": ("mistral", {}),
    "phi3": ("phi3", {}),
    "smollm3": ("smollm3", {}),
    "olmo2": ("olmo2", {}),
    "gemma2, caps": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3, two ropes": ("gemma3_text", {}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0, "attention_multiplier": 0.2},
    ),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3 with experts, one layer without": (
        "qwen3_moe",
        {**_EXPERTS, "num_experts": 40, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3 with experts in every second layer": ("qwen3_moe", {**_EXPERTS, "num_experts": 6, "decoder_sparse_step": 2}),
    # With a limit that most gates and ups exceed.
    "gpt-oss": ("gpt_oss", {"num_local_experts": 5, "intermediate_size": 64, "swiglu_limit": 0.5}),
}
# The modules of these are those of a known family, and only the logits tell them apart.
DISGUISED = ["exaone4"]
ELSEWHERE = sorted(set(FAMILIES) - {family for family, _ in KNOWN.values()} - {*DISGUISED})


def known_model(name: str) -> PreTrainedModel:
    """Returns a tiny model with random biases and sinks, which transformers would make 0 or small."""
    family, changes = KNOWN[name]
    model = tiny_model(family, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_()
    return model


@pytest.mark.parametrize("name", KNOWN)
def test_in_float32_sequences_that_join_and_leave_get_the_tokens_of_generate(name: str, folder: Path) -> None:
    model = known_model(name)
    expected = expected_answers(model, REQUESTS)
    with torch.inference_mode():
        assert answers(model, NativeForward(model, KernelOptions(2, folder)), REQUESTS, CHUNK) == expected


@pytest.mark.long
@pytest.mark.parametrize("name", KNOWN)
def test_in_bfloat16_logits_are_as_near_to_float32_as_transformers_are(name: str, folder: Path) -> None:
    model = known_model(name).to(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    with torch.inference_mode():
        errors = errors_of(
            {"ours": NativeForward(model, KernelOptions(2, folder)), "theirs": ModelForward(model)}, model, exact
        )
    assert errors["ours"] <= 1.1 * errors["theirs"]


@pytest.mark.parametrize("rounded", [None, "int8"])
def test_torch_s_default_dtype_changes_no_bit(rounded: str | None, folder: Path) -> None:
    """transformers changes the default for all threads while it builds another model; the kernels write float32."""
    model = tiny_model("llama", attention_bias=True).to(torch.bfloat16)

    def logits() -> torch.Tensor:
        forward = NativeForward(model, KernelOptions(1, folder), ROUNDED[rounded] if rounded else None)
        return prefilled(forward, model, prompt_of(20, 1), 20)[0].clone()

    with torch.inference_mode():
        expected = logits()
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert torch.equal(logits(), expected)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("gate", [-500.0, -90.0, -12.0, 12.0, 90.0, 500.0])
def test_a_far_gate_is_shut_or_open(activation: str, gate: float, folder: Path) -> None:
    """float32 overflows beyond e^88; an activation that overflows would open a gate that should be shut."""
    model = tiny_model("llama", hidden_act=activation, mlp_bias=True)
    with torch.inference_mode():
        for layer in model.model.layers:
            layer.mlp.gate_proj.bias.fill_(gate)
        expected = model(torch.tensor([prompt_of(20, 1)]), use_cache=False).logits[0, -1]
        logits, _ = prefilled(NativeForward(model, KernelOptions(2, folder)), model, prompt_of(20, 1), 20)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("chunk", [1, 7, 100, 600])
def test_a_long_prompt_in_pieces_of_any_size_gives_the_logits_of_the_whole(
    family: str, chunk: int, folder: Path
) -> None:
    """600 tokens exceed the 512 of one call, a block of 256 keys and, for mistral, the window of 45."""
    changes = {"sliding_window": 45} if family == "mistral" else {}
    model = tiny_model(family, max_position_embeddings=4096, **changes)
    ids = prompt_of(600, 1)
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        logits, _ = prefilled(NativeForward(model, KernelOptions(2, folder)), model, ids, chunk)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_positions_go_on_beyond_the_first_table(folder: Path) -> None:
    model = tiny_model("llama", max_position_embeddings=4096)
    ids = prompt_of(2100, 1)
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        logits, _ = prefilled(NativeForward(model, KernelOptions(2, folder)), model, ids, 700)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_nan_is_alone_with_it(dtype: torch.dtype, folder: Path) -> None:
    model = tiny_model().to(dtype)
    model.get_input_embeddings().weight.data[9] = float("nan")
    with torch.inference_mode():
        forward, book = NativeForward(model, KernelOptions(2, folder)), PageBook(model)
        book.step(forward, {name: [3, 4, 5] for name in "abc"})
        found = book.step(forward, {"a": [1], "b": [9], "c": [2], "d": [8, 9, 8], "e": [8, 8, 8]})
    assert [bool(logits.isnan().any()) for logits in found.values()] == [False, True, False, True, False]
    assert not found["b"].isfinite().any()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_without_an_embedding_fails_its_step_alone(token: int, tied: bool, folder: Path) -> None:
    """Constraints can force such tokens, because a tokenizer can have more ids than the model."""
    model, prompt = tiny_model("llama", tie_word_embeddings=tied), prompt_of(20, 1)
    with torch.inference_mode():
        forward = NativeForward(model, KernelOptions(2, folder))
        books = [prefilled(forward, model, prompt, 20)[1] for _ in range(2)]
        with pytest.raises(RuntimeError, match=f"the embedding has no token {token}$"):
            forward(books[0].batch({"row": [token]}), books[0].cache)
        found, expected = (book.step(forward, {"row": [VOCAB - 1]})["row"] for book in books)
    assert torch.equal(found, expected)


def test_the_kernels_keep_an_untied_embedding_that_the_model_gives_up(folder: Path, tmp_path: Path) -> None:
    """They read it where the model has it, here in a mapped file."""
    model, prompt = tiny_model("llama", tie_word_embeddings=False).to(torch.bfloat16), prompt_of(20, 1)
    weight, file = model.get_input_embeddings().weight, tmp_path / "embedding"
    file.write_bytes(weight.detach().view(torch.uint8).numpy().tobytes())
    weight.data = torch.from_file(str(file), size=weight.numel(), dtype=weight.dtype).view_as(weight)
    with torch.inference_mode():
        forward = NativeForward(model, KernelOptions(2, folder))
        expected = PageBook(model).step(forward, {"row": prompt})["row"]
    model.float()
    assert str(file) in Path("/proc/self/maps").read_text()
    with torch.inference_mode():
        assert torch.equal(PageBook(model).step(forward, {"row": prompt})["row"], expected)


@pytest.mark.parametrize("lacks", ["pages", "logits"])
def test_a_step_without_memory_leaves_the_forward_as_it_was(
    lacks: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is lacking for a cache with pages of another size, or for more rows of logits."""
    model = tiny_model()
    other = PagedCache(CacheLayout(model.config), 8, [2**44], 0)

    def answers_of(fail: Callable[[NativeForward, PageBook], object]) -> dict[str, torch.Tensor]:
        forward, book = NativeForward(model, KernelOptions(2, folder)), PageBook(model)
        book.step(forward, {name: prompt_of(12, number) for number, name in enumerate("abc")})
        fail(forward, book)
        return book.step(forward, {"a": [7], "b": [8]})

    def no_memory(*given: object) -> None:
        raise MemoryError

    def fail(forward: NativeForward, book: PageBook) -> None:
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            if lacks == "pages":
                forward(PageBook(model, 8).batch({"d": [1]}), other)
            else:
                patch.setattr(native_forward, "array", no_memory)
                forward(book.batch({name: [1] for name in "defgh"}), book.cache)

    with torch.inference_mode():
        found, expected = answers_of(fail), answers_of(lambda forward, book: None)
    assert all(torch.equal(found[name], expected[name]) for name in "ab")


@pytest.mark.parametrize("family", ELSEWHERE)
def test_other_layouts_are_refused_with_a_reason(family: str) -> None:
    with torch.inference_mode(), pytest.raises(UnsupportedLayout, match=r"\w"):
        read_decoder(tiny_model(family))


@pytest.mark.parametrize("family", DISGUISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_layouts_with_known_modules_are_found_out(family: str, dtype: torch.dtype, folder: Path) -> None:
    with torch.inference_mode():
        assert "logits differ" in str(kernels_of(tiny_model(family).to(dtype), folder))


def test_half_precision_other_than_bfloat16_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(UnsupportedLayout, match="float16 on cpu; set dtype to bfloat16"):
        read_decoder(tiny_model().half())


def test_a_parameter_without_a_place_is_refused() -> None:
    model = tiny_model()
    model.model.layers[1].self_attn.gains = torch.nn.Parameter(torch.zeros(4))
    with torch.inference_mode(), pytest.raises(UnsupportedLayout, match="gains"):
        read_decoder(model)


def test_sinks_of_another_shape_are_refused() -> None:
    model = tiny_model("gpt_oss")
    model.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(3))
    with torch.inference_mode(), pytest.raises(UnsupportedLayout, match=r"sinks of shape \[3\]"):
        read_decoder(model)


def test_a_dynamic_rope_is_refused() -> None:
    model = tiny_model(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with torch.inference_mode(), pytest.raises(UnsupportedLayout, match="dynamic"):
        read_decoder(model)


def test_once_taken_the_models_own_weights_are_gone(folder: Path) -> None:
    model = tiny_model()
    with torch.inference_mode():
        assert isinstance(kernels_of(model, folder), NativeForward)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.get_input_embeddings().weight.shape[0] == VOCAB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_compute_something_else_are_found_out(
    dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rotation by the wrong position stands for any mistake; the model must stay usable without the kernels."""
    model = tiny_model().to(dtype)

    class Wrong(NativeForward):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            self._rotary.cos = self._rotary.cos.roll(1, 0)

    monkeypatch.setattr(forward_choice, "NativeForward", Wrong)
    with torch.inference_mode(), caplog.at_level(logging.INFO):
        assert "differ" in str(kernels_of(model, folder))
        assert check_forward(model, ModelForward(model)) is None
    assert "our own kernels are not used" in caplog.text and "differ" in caplog.text


def in_company(model: PreTrainedModel, forward_of: Callable[[int], Forward]) -> list[torch.Tensor]:
    """Returns a row's logits in steps with 1 to 40 unrelated rows. ``forward_of`` gets the number of threads."""
    seen: list[torch.Tensor] = []
    with torch.inference_mode():
        for threads, rows in ((1, 1), (2, 1), (2, 2), (3, 7), (2, 13), (4, 32), (4, 40)):
            forward, book = forward_of(threads), PageBook(model)
            others = {str(row): prompt_of(3 + 5 * row % 17, row) for row in range(rows - 1)}
            book.step(forward, {**others, "own": prompt_of(5, 5)})
            for token in (3, 1, 4):
                logits = book.step(forward, {**{name: [int(name)] for name in others}, "own": [token]})
            seen.append(logits["own"])
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_same_bits_in_any_company_and_with_any_threads(dtype: torch.dtype, folder: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True).to(dtype)
    first, *others = in_company(model, lambda threads: NativeForward(model, KernelOptions(threads, folder)))
    assert all(torch.equal(logits, first) for logits in others)


def test_many_steps_with_more_threads_than_cores_all_come_to_the_same_end(folder: Path) -> None:
    """Threads descheduled in the middle of a step must neither skip a piece of it nor compute one of another step."""
    model = tiny_model()
    seen: set[bytes] = set()
    with torch.inference_mode():
        forward = NativeForward(model, KernelOptions(8, folder))
        for _ in range(150):
            _, book = prefilled(forward, model, prompt_of(20, 1), 9)
            logits = book.step(forward, {"row": [7], "other": prompt_of(9, 2)})["row"]
            seen.add(logits.numpy().tobytes())
    assert len(seen) == 1


def test_an_exception_of_the_kernels_keeps_its_message(folder: Path) -> None:
    """Packing with a negative number of threads raises an error of C++'s containers, whose text varies."""
    message = r"packing weights failed in the kernels: .*vector"
    with torch.inference_mode(), pytest.raises(UnsupportedLayout, match=message):
        NativeForward(tiny_model(), KernelOptions(-1, folder))


_ENDS_IN_A_STEP = """
import sys, threading
from pathlib import Path
import torch
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from tests.engine.page_book import PageBook
from tests.engine.tiny_models import prompt_of, tiny_model

model, begun = tiny_model(hidden_size=256, max_position_embeddings=4096), threading.Event()
book = PageBook(model)
batch = book.batch({"row": prompt_of(2000, 1)})
with torch.inference_mode():
    forward = NativeForward(model, KernelOptions(2, Path(sys.argv[1])))
    forward(batch, book.cache)

def compute():
    begun.set()
    while True:
        forward(batch, book.cache)

threading.Thread(target=compute, daemon=True).start()
begun.wait()
print("the end")
"""


@pytest.mark.long
def test_a_process_ends_while_a_thread_computes_a_step(folder: Path) -> None:
    """A step must not find its decoder freed; the thread of an engine is such a daemon thread."""
    command = [sys.executable, "-c", _ENDS_IN_A_STEP, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "the end\n"), ended.stderr[-2000:]
