"""In a packed step of our kernels, each sequence gets the same bits as alone.

That holds for any other sequences, any chunks of prompts and any page size.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward, PackedBatch
from tests.engine.page_book import PageBook, prefilled
from tests.engine.test_native import KNOWN, known_model
from tests.engine.tiny_models import prompt_of, tiny_model

_NAMES = [
    *("llama, tied, biases everywhere", "llama, odd sizes", "mistral, window of 6", "phi3"),
    *("mixtral", "qwen3 with experts, one layer without", "gpt-oss"),
]
_DTYPES = [torch.float32, torch.bfloat16]
_LENGTHS = {"a": 3, "b": 5, "c": 60, "d": 130}


def expected_of(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found, expected)


def alone(forward: Forward, model: PreTrainedModel, prompt: Sequence[int], more: Sequence[int] = ()) -> torch.Tensor:
    """Returns the logits of a prompt's last token and of the tokens in ``more``, each of which takes a step."""
    book = PageBook(model, pages=32 + (len(prompt) + len(more)) // 16)
    steps = [prompt, *([token] for token in more)]
    return torch.cat([book.step(forward, {"row": ids})["row"] for ids in steps])


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("name", _NAMES)
def test_in_mixed_steps_each_sequence_gets_the_bits_that_it_gets_alone(
    name: str, dtype: torch.dtype, folder: Path
) -> None:
    """One step has decode rows, chunks of prompts with different lengths, drafts, and prompts that begin."""
    assert name in KNOWN
    model = known_model(name).to(dtype)
    with torch.inference_mode():
        forward, book = NativeForward(model, KernelOptions(2, folder)), PageBook(model)
        long, late = prompt_of(300, 9), prompt_of(40, 8)
        book.step(forward, {who: prompt_of(length, length) for who, length in _LENGTHS.items()})
        book.step(forward, {"long": long[:100], "a": [11], "d": [12]}, {"long": 0})
        found = book.step(
            forward, {"b": [13], "long": long[100:170], "c": [14, 15, 16], "late": late, "a": [17]}, {"long": 0, "c": 3}
        )
        last = book.step(forward, {"late": [18], "long": long[170:], "d": [19], "b": [20]})
        same(found["a"], alone(forward, model, prompt_of(3, 3), (11, 17))[-1:])
        same(found["b"], alone(forward, model, prompt_of(5, 5), (13,))[-1:])
        same(found["c"], alone(forward, model, prompt_of(60, 60), (14, 15, 16))[1:])
        same(found["late"], alone(forward, model, late))
        same(last["late"], alone(forward, model, late, (18,))[-1:])
        same(last["d"], alone(forward, model, prompt_of(130, 130), (12, 19))[-1:])
        same(last["long"], alone(forward, model, long))
        if dtype == torch.float32:
            close(last["long"], expected_of(model, long)[-1:])


@pytest.mark.long
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("window", [None, 6, 16, 33, 300])
def test_pages_of_any_size_and_prompts_cut_anyhow_give_the_same_bits(
    window: int | None, dtype: torch.dtype, folder: Path
) -> None:
    """Pages behind the window hold NaN. 350 tokens exceed a block of 256 keys and several blocks of 64 queries."""
    changes = {"sliding_window": window} if window else {}
    model = tiny_model("mistral" if window else "llama", max_position_embeddings=1024, **changes).to(dtype)
    ids, seen = prompt_of(350, 1), set[bytes]()
    with torch.inference_mode():
        forward = NativeForward(model, KernelOptions(2, folder))
        for page_size, chunk in ((16, 350), (1, 90), (256, 1), (16, 349), (33, 60), (7, 7), (32, 257), (64, 64)):
            logits, book = prefilled(forward, model, ids, chunk, page_size)
            after = book.step(forward, {"row": [5]})["row"]
            seen.add(logits.numpy().tobytes() + after.numpy().tobytes())
        if dtype == torch.float32:
            close(torch.cat([logits[None], after]), expected_of(model, [*ids, 5])[-2:])
    assert len(seen) == 1


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("window", [1, 4, 5, 16, 17])
def test_a_window_may_begin_anywhere_in_a_page(window: int, page_size: int, folder: Path) -> None:
    model, ids = tiny_model("mistral", sliding_window=window), prompt_of(60, 1)
    with torch.inference_mode():
        forward, book = NativeForward(model, KernelOptions(2, folder)), PageBook(model, page_size)
        found = [book.step(forward, {"row": ids[:15]}, 0), *(book.step(forward, {"row": [t]}) for t in ids[15:])]
        close(torch.cat([each["row"] for each in found]), expected_of(model, ids)[15:])


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("wanted", [0, 1])
@pytest.mark.parametrize("computed", [0, 7, 15])
def test_a_page_may_be_read_by_others_in_the_step_that_fills_it(
    computed: int, wanted: int, dtype: torch.dtype, folder: Path
) -> None:
    """With 15 of 16 tokens computed, a single token fills the page; otherwise it writes its key while it attends."""
    model, prompt = known_model("qwen2").to(dtype), prompt_of(16, 3)

    def expected(token: int) -> torch.Tensor:
        book = PageBook(model)
        book.step(forward, {"row": prompt[:15]}, 0)
        book.step(forward, {"row": prompt[15:]}, wanted)
        return book.step(forward, {"row": [token]})["row"]

    with torch.inference_mode():
        forward, book = NativeForward(model, KernelOptions(4, folder)), PageBook(model)
        if computed:
            book.step(forward, {"first": prompt[:computed]}, 0)
        own = book.batch({"first": prompt[computed:]}, wanted).sequences[0]
        for token in range(20):
            book.share(str(token), "first", 16)
        others = book.batch({str(token): [token] for token in range(20)}).sequences
        for _ in range(3):  # the same step again is what a retry does
            found = forward(Batch((*others, own)), book.cache).tensor[:20].clone()
            same(found, torch.cat([expected(token) for token in range(20)]))


@pytest.mark.parametrize("dtype", _DTYPES)
def test_drafts_get_the_bits_of_steps_of_one_token(dtype: torch.dtype, folder: Path) -> None:
    """So a verified draft changes no answer. The last two drafts are rejected, and their slots are written again."""
    model, prompt = known_model("qwen3").to(dtype), prompt_of(30, 3)
    with torch.inference_mode():
        forward, book = NativeForward(model, KernelOptions(2, folder)), PageBook(model)
        book.step(forward, {"row": prompt})
        found = book.step(forward, {"row": [4, 5, 6, 7, 8]}, 5)["row"]
        same(found, alone(forward, model, prompt, (4, 5, 6, 7, 8))[1:])
        book.held["row"].computed -= 2
        same(book.step(forward, {"row": [9, 1]}, 2)["row"], alone(forward, model, prompt, (4, 5, 6, 9, 1))[-2:])


def test_128_sequences_and_a_step_of_several_calls(folder: Path) -> None:
    """A step has more tokens than one call computes; prompts are split between calls, and the bits stay the same."""
    model = tiny_model("llama", max_position_embeddings=2048)
    with torch.inference_mode():
        forward, book = NativeForward(model, KernelOptions(2, folder)), PageBook(model, pages=400)
        prompts = {str(n): prompt_of(1 + n % 23, n) for n in range(128)}
        first = book.step(forward, prompts)
        long = {"long": prompt_of(700, 2), "longer": prompt_of(900, 3)}
        second = book.step(forward, {**{name: [int(name)] for name in prompts}, **long}, {"0": 0})
        assert not len(second["0"])
        for name in ("0", "1", "22", "77", "127"):
            both = alone(forward, model, prompts[name], [int(name)])
            same(torch.cat([first[name], second[name]]), both[: 1 + len(second[name])])
        for name, prompt in long.items():
            same(second[name], alone(forward, model, prompt))


def test_a_prompt_of_one_token(folder: Path) -> None:
    model = known_model("phi3")
    with torch.inference_mode():
        forward = NativeForward(model, KernelOptions(2, folder))
        close(alone(forward, model, [7], [3, 9]), expected_of(model, [7, 3, 9]))


def test_pages_are_copied_before_they_are_written_to(folder: Path) -> None:
    """Two sequences diverge in the middle of a page, so that one of them continues with a copy."""
    model, prompt = known_model("mistral, window of 6"), prompt_of(20, 2)
    with torch.inference_mode():
        forward, book = NativeForward(model, KernelOptions(2, folder)), PageBook(model)
        book.step(forward, {"one": prompt})
        book.share("two", "one", 0)
        twin = book.batch({"two": prompt}).sequences[0]
        copies = tuple(
            (group, book.held["one"].tables[group][entry], twin.tables[group][entry])
            for group in range(len(twin.tables))
            for entry in range(len(twin.tables[group]))
            if book.held["one"].tables[group][entry] >= 0
        )
        book.held["two"].computed = len(prompt)
        parts = book.batch({"one": [5], "two": [6]}).sequences
        found = forward(Batch(parts, copies), book.cache).tensor
        expected = [expected_of(model, [*prompt, token])[-1] for token in (5, 6)]
        close(found, torch.stack(expected))


def test_block_tables_are_read_where_they_are(folder: Path) -> None:
    """Tables that are arrays of int32 are not copied; lists and other arrays give the same logits."""
    table = array("i", [3, 0, 2])
    parts = PackedBatch(Batch((BatchSequence([1, 2], 0, (table,)),)), 1)
    assert parts._tables[0] == table.buffer_info()[0]
    model, prompt = known_model("llama"), prompt_of(40, 1)
    found = []
    with torch.inference_mode():
        forward = NativeForward(model, KernelOptions(2, folder))
        for given in (table, list(table), tuple(table), array("q", table)):
            book = PageBook(model)
            found.append(forward(Batch((BatchSequence(prompt, 0, (given,)),)), book.cache).tensor.clone())
    assert all(torch.equal(logits, found[0]) for logits in found)


def test_a_forward_takes_one_cache_after_another(folder: Path) -> None:
    model, prompt = known_model("llama"), prompt_of(20, 1)
    with torch.inference_mode():
        forward = NativeForward(model, KernelOptions(2, folder))
        expected = alone(forward, model, prompt, [4])[-1:]
        books = [PageBook(model, page_size) for page_size in (16, 4)]
        for book in books:
            book.step(forward, {"row": prompt})
        for book in books:
            same(book.step(forward, {"row": [4]})["row"], expected)
