"""Linear layers with packed weights: the model's logits, no second copy of the weights, or no change."""

from __future__ import annotations

import copy
import ctypes
import itertools
import platform
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.build import build_engine
from mlserver_torch_stream.engine.native import library as c
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions, open_kernels
from mlserver_torch_stream.engine.native.prepacked_linear import PackedProduct, pack_linears
from mlserver_torch_stream.engine.native.weights import DenseMatrix, Packer
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.settings import parse_settings
from tests.engine.tiny import greedy, run, tokens_of
from tests.engine.tiny_models import FAMILIES, byte_tokenizer, prompt_of, reference, tiny_model

READ_THEIR_WEIGHTS = ("jamba",)  # which a packed layer no longer has
LINEARS = (nn.Linear, transformers.Conv1D)
DTYPES = (torch.float32, torch.bfloat16)
_IDS = torch.tensor([[7, 30, 99, 12, 250, 3, 41, 77, 5, 8, 61]])


@pytest.fixture(scope="module")
def kernels(folder: Path) -> ctypes.CDLL:
    return open_kernels(folder, c.open_library)[0]


def packed(model: PreTrainedModel, folder: Path) -> int:
    with torch.inference_mode():
        return pack_linears(model, KernelOptions(2, folder))


def bf16(family: str, **changes: Any) -> PreTrainedModel:
    return tiny_model(family, **changes).to(torch.bfloat16)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(_IDS, use_cache=False).logits[0].float()


def product_of(layer: nn.Linear | transformers.Conv1D, kernels: ctypes.CDLL) -> PackedProduct:
    weight = layer.weight.detach()
    matrix = DenseMatrix([weight if isinstance(layer, nn.Linear) else weight.t()], weight.dtype, False)
    panels = torch.zeros(matrix.bytes, dtype=torch.uint8)
    matrix.pack(panels, Packer(kernels))
    return PackedProduct(layer, panels, kernels)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_near_to_float32_as_before(family: str, dtype: torch.dtype, folder: Path) -> None:
    model = tiny_model(family).to(dtype)
    exact, before = logits(copy.deepcopy(model).float()), logits(model)
    linears = sum(type(module) in LINEARS for module in model.modules())
    assert packed(model, folder) == (0 if family in READ_THEIR_WEIGHTS else linears)
    assert (logits(model) - exact).pow(2).mean() <= 1.2 * (before - exact).pow(2).mean() + 1e-6 * exact.var()


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_nobody_else_has_are_freed(tied: bool, folder: Path) -> None:
    model = bf16("phi3", tie_word_embeddings=tied)
    own = weakref.ref(model.model.layers[0].mlp.down_proj.weight)
    assert packed(model, folder) and own() is None
    on = {name: parameter.device.type for name, parameter in model.named_parameters()}
    assert on["model.embed_tokens.weight"] == "cpu"
    assert on["model.layers.0.mlp.down_proj.weight"] == "meta"
    assert model.lm_head.weight.device.type == ("cpu" if tied else "meta")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["phi3", "gpt2"])
def test_a_model_that_looks_at_its_weights_stays_as_it_was(family: str, dtype: torch.dtype, folder: Path) -> None:
    model = tiny_model(family).to(dtype)
    layer = [module for module in model.modules() if type(module) in LINEARS][-2]
    layer.register_forward_pre_hook(lambda module, given: (given[0] * module.weight.sum().sign(),))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    expected = logits(model)
    assert packed(model, folder) == 0
    assert torch.equal(logits(model), expected)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_cannot_do_without_a_cache_stays_as_it_was(folder: Path) -> None:
    model = bf16("phi3")
    own = model.forward

    def forward(*args: Any, use_cache: bool = True, **kwargs: Any) -> Any:
        if not use_cache:
            raise TypeError("this model's code needs its cache")
        return own(*args, **kwargs)

    model.forward = forward
    assert packed(model, folder) == 0
    assert model.model.layers[0].mlp.down_proj.weight.device.type == "cpu"


def test_a_layer_that_computes_something_else_is_found_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = bf16("phi3"), PackedProduct.__call__
    monkeypatch.setattr(PackedProduct, "__call__", lambda self, inputs: right(self, inputs) * 1.1)
    expected = logits(model)
    assert packed(model, folder) == 0
    assert torch.equal(logits(model), expected)


def test_without_kernels_nothing_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert packed(bf16("phi3"), tmp_path) == 0


def test_without_torchs_threads_nothing_is_packed_for_several(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c, "torch_pool", lambda: None)
    assert packed(bf16("phi3"), folder) == 0
    with torch.inference_mode():
        assert pack_linears(bf16("phi3"), KernelOptions(1, folder))


def test_bfloat16_on_an_arm_cpu_that_multiplies_it_is_left_to_torch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "processor: 0\nFeatures: asimd bf16\n")
    assert packed(bf16("phi3"), folder) == 0


@pytest.mark.parametrize("what", ["float16", "a layer with a forward of its own", "hooks of accelerate", "odd rows"])
def test_what_is_not_ours_is_left_alone(what: str, folder: Path) -> None:
    model = tiny_model("phi3").half() if what == "float16" else bf16("phi3")
    own = model.model.layers[1].mlp.down_proj
    if what == "a layer with a forward of its own":
        own.forward = nn.Linear.forward.__get__(own)
    if what == "hooks of accelerate":
        own._hf_hook = object()
    if what == "odd rows":  # whose words of two bfloat16 numbers would reach into the next row
        model.extra = own = nn.Linear(33, 5).to(torch.bfloat16)
    assert bool(packed(model, folder)) == (what in ("a layer with a forward of its own", "odd rows"))
    assert own.weight.device.type == "cpu" and not isinstance(vars(own).get("forward"), PackedProduct)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 576])
@pytest.mark.parametrize("inputs", [2, 64, 330, 1602])
def test_a_product_is_that_of_the_layer(
    inputs: int, outputs: int, bias: bool, dtype: torch.dtype, kernels: ctypes.CDLL
) -> None:
    layer = nn.Linear(inputs, outputs, bias=bias).to(dtype)
    product, exact = product_of(layer, kernels), copy.deepcopy(layer).double()
    for shape in ((0,), (), (1,), (2, 3), (40,), (1, 300)):
        given = torch.randn(*shape, inputs).to(dtype)
        got, expected = product(given), exact(given.double())
        assert got.shape == expected.shape and got.dtype == dtype
        torch.testing.assert_close(
            got.double(),
            expected,
            **({"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-9}),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_may_lie_in_any_order(dtype: torch.dtype, kernels: ctypes.CDLL) -> None:
    product = product_of(nn.Linear(64, 40).to(dtype), kernels)
    given = torch.randn(64, 3, 7).to(dtype).permute(1, 2, 0)
    assert torch.equal(product(given), product(given.clone(memory_format=torch.contiguous_format)))
    odd = torch.randn(1 + 5 * 64).to(dtype)[1:].view(5, 64)  # begins between two words
    assert torch.equal(product(odd), product(odd.clone()))


@pytest.mark.parametrize(
    "given",
    [
        torch.ones(3, 64),
        torch.ones(3, 62, dtype=torch.bfloat16),
        torch.ones(3, 64, dtype=torch.bfloat16, device="meta"),
    ],
)
def test_inputs_that_the_kernels_would_misread_are_refused(given: torch.Tensor, kernels: ctypes.CDLL) -> None:
    with pytest.raises(ValueError, match="a layer with 64 inputs in torch\\.bfloat16 was given"):
        product_of(nn.Linear(64, 40).to(torch.bfloat16), kernels)(given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_and_other_rows_change_no_bit(dtype: torch.dtype, kernels: ctypes.CDLL) -> None:
    product = product_of(nn.Linear(576, 200).to(dtype), kernels)
    given = torch.randn(300, 576).to(dtype)
    whole = product(given)
    for threads, rows in itertools.product((1, 2, 3, 5), (1, 4, 13, 33, 257)):
        torch.set_num_threads(threads)
        assert torch.equal(product(given[:rows]), whole[:rows])
        assert torch.equal(product(given[-rows:]), whole[-rows:])


_POOL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def test_much_work_runs_on_as_many_threads_of_the_pool_as_torch_has(kernels: ctypes.CDLL) -> None:
    """This pool has no threads but the caller's, which does the work of all."""
    asked: list[int] = []

    def run(work: int, data: int, threads: int, flags: int) -> None:
        asked.append(threads)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work)(data)

    pool, layer = _POOL(run), nn.Linear(64, 512)
    product = product_of(layer, kernels)
    product._pool = ctypes.cast(pool, ctypes.c_void_p).value
    for threads, rows, expected in ((1, 40, []), (3, 40, [3]), (3, 2, [3])):
        torch.set_num_threads(threads)
        given = torch.randn(rows, 64)
        torch.testing.assert_close(product(given), layer(given))
        assert asked == expected


def test_several_python_threads_multiply_at_once(kernels: ctypes.CDLL) -> None:
    """The engines of several models do so, each with its own number of threads."""
    products = [product_of(nn.Linear(300 + 2 * number, 200).to(DTYPES[number % 2]), kernels) for number in range(6)]
    given = [torch.randn(100, product.inputs).to(product.dtype) for product in products]
    expected = [product(inputs) for product, inputs in zip(products, given, strict=True)]
    wrong: list[int] = []

    def work(number: int) -> None:
        torch.set_num_threads(1 + number % 3)
        same = (torch.equal(products[number](given[number]), expected[number]) for _ in range(20))
        wrong.extend(number for each in same if not each)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(products))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


@pytest.mark.long
def test_an_engine_over_packed_layers_answers_as_generate_does(tmp_path: Path, folder: Path) -> None:
    model = tiny_model("gpt_neox", intermediate_size=600)  # wide enough for two threads
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    settings = {"dtype": "float32", "threads": 2, "kv_cache_memory": "8MiB", "cache_dir": str(folder)}
    built = build_engine(parse_settings(str(tmp_path), settings, environ={}), resources=ProcessResources())
    linears = sum(type(module) is nn.Linear for module in model.modules())
    try:
        assert f"{linears} linear layers laid out for this CPU" in built.summary
        assert run(tokens_of(built.engine, prompt_of(40), greedy(12))) == reference(model, prompt_of(40), 12)
    finally:
        if built.give_back():
            built.shutdown()
