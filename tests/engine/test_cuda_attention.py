"""Attention over pages as CUDA chooses it: against the reference where it runs here, by its arguments elsewhere."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mlserver_torch_stream.engine.attention.cuda_choice import CudaAttention, GatheredAttention, find_problem
from mlserver_torch_stream.engine.attention.cuda_gathered import gathered_attention
from mlserver_torch_stream.engine.attention.cuda_varlen import VarlenAttention, find_varlen
from mlserver_torch_stream.engine.attention.paged_attention import AttentionOptions, BatchTensors, batch_tensors
from mlserver_torch_stream.engine.attention.reference import reference_attention
from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages
from mlserver_torch_stream.engine.checks.verify_concurrency import count_waits

OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"window": 6},
    "window beyond a page": {"window": 37},
    "chunk": {"chunk": 6},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "softcap, sinks, window": {"softcap": 3.0, "sinks": True, "window": 6},
    "softcap, chunk": {"softcap": 3.0, "chunk": 21},
}
HEADS = [(4, 2, 8, 8), (4, 1, 8, 16), (3, 3, 16, 8)]  # heads, kv heads, values of a key and of a value


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def options_of(name: str, heads: int, scale: float = 0.3) -> AttentionOptions:
    given = dict(OPTIONS[name])
    if given.pop("sinks", False):
        given["sinks"] = torch.linspace(-1, 1, heads)
    return AttentionOptions(scale=scale, **given)


def layer_of(
    page_size: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    tokens_first: bool = False,
    dtype: torch.dtype = torch.float32,
) -> LayerPages:
    layer = LayerPages(0, 30, page_size, tokens_first=tokens_first)
    layer.reserve(torch.empty(kv_heads, 1, dim, dtype=dtype), torch.empty(kv_heads, 1, value_dim, dtype=dtype))
    return layer


GRID = [
    (page_size, heads, tokens_first, name)
    for (page_size, tokens_first), heads, name in itertools.product(
        ((1, False), (16, True), (256, True)), HEADS, OPTIONS
    )
]


@pytest.mark.parametrize(("page_size", "heads", "tokens_first", "name"), GRID)
def test_gathered_keys_give_the_references_numbers(
    page_size: int, heads: tuple[int, int, int, int], tokens_first: bool, name: str
) -> None:
    """What the pages hold behind a sequence's end is NaN."""
    layer = layer_of(page_size, *heads[1:], tokens_first)
    query = torch.empty(1, heads[0], heads[2])
    assert find_problem(gathered_attention, query, layer, options_of(name, heads[0])) is None


@pytest.mark.parametrize("name", ["all", "window", "softcap", "chunk"])
def test_a_key_too_many_is_found(name: str) -> None:
    def one_more(
        query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
    ) -> torch.Tensor:
        longer = tuple(
            BatchSequence(each.token_ids, max(0, each.start - 1), each.tables) for each in batch.batch.sequences
        )
        return reference_attention(
            query, layer, batch_tensors(Batch(longer), layer.page_size, 1, query.device), options
        )

    problem = find_problem(one_more, torch.empty(1, 4, 8), layer_of(16, 2, 8, 8), options_of(name, 4))
    assert problem is not None and "differs from the reference" in problem


@pytest.mark.parametrize("name", OPTIONS)
def test_decode_rows_are_gathered_without_a_number_from_the_device(name: str) -> None:
    layer = layer_of(16, 2, 8, 8, tokens_first=True)
    sequences = tuple(
        BatchSequence((0,), start, ((row, row + 5, row + 10, row + 15),)) for row, start in enumerate((3, 40))
    )
    batch = batch_tensors(Batch(sequences), 16, 1, torch.device("cpu"))
    options = options_of(name, 4)
    assert count_waits(lambda: gathered_attention(torch.randn(2, 4, 8), layer, batch, options)) == 0


# --- varlen: its kernel is CUDA's alone ---


class Recorded:
    """Has the signature of ``torch.nn.attention.varlen.varlen_attn_out``, and keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: object = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        self.calls.append(locals())
        return out


def varlen_call(heads: int, **options: Any) -> dict[str, Any]:
    layer = layer_of(256, 2, 64, 64, tokens_first=True, dtype=torch.bfloat16)
    sequences = (BatchSequence((0, 0, 0), 2, ((7,),)), BatchSequence((0,), 300, ((3, 9),)))
    batch = batch_tensors(Batch(sequences), 256, 1, torch.device("cpu"))
    recorded = Recorded()
    attention = VarlenAttention(recorded)
    query = torch.zeros(4, heads, 64, dtype=torch.bfloat16)
    given = AttentionOptions(scale=0.125, **options)
    assert attention.refusal(query, layer, given) is None
    for _ in range(2):  # two layers
        attention(query, layer, batch, given)
    assert recorded.calls[0]["cu_seq_k"] is recorded.calls[1]["cu_seq_k"]  # computed once for all layers
    assert layer.keys is not None
    assert recorded.calls[0]["key"].data_ptr() == layer.keys.data_ptr()
    return recorded.calls[0]


def test_varlen_is_called_with_the_pages_and_the_tables() -> None:
    call = varlen_call(heads=4)
    assert call["key"].shape == call["value"].shape == (31, 256, 2, 64) and call["key"].is_contiguous()
    assert call["cu_seq_q"].tolist() == [0, 3, 4] and call["cu_seq_k"].tolist() == [0, 5, 306]
    assert call["seqused_k"].tolist() == [5, 301]
    assert call["block_table"].tolist() == [[7, 0], [3, 9]]
    assert {call[name].dtype for name in ("cu_seq_q", "cu_seq_k", "seqused_k", "block_table")} == {torch.int32}
    assert (call["max_q"], call["max_k"]) == (3, 301)
    assert (call["scale"], call["enable_gqa"]) == (0.125, True)
    assert call["num_splits"] == 1  # any other leaves rows unwritten
    assert call["window_size"] == (-1, 0)


def test_a_window_of_varlen_does_not_count_the_querys_own_key() -> None:
    call = varlen_call(heads=2, window=6)
    assert call["window_size"] == (5, 0)
    assert call["enable_gqa"] is False


def test_torchs_varlen_attention_is_the_one_that_is_recorded_here() -> None:
    import inspect

    found = find_varlen()
    if found is None:
        pytest.skip("this torch has no varlen attention with block tables")
    theirs = [(each.name, each.kind) for each in inspect.signature(found).parameters.values()]
    ours = [(each.name, each.kind) for each in inspect.signature(Recorded()).parameters.values()]
    assert theirs == ours


# --- the choice ---


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"softcap": 5.0}, "no softcap, sinks or chunks"),
        ({"chunk": 6}, "no softcap, sinks or chunks"),
        ({"page_size": 16}, "pages of a multiple of 256"),
        ({"dtype": torch.float32}, "takes no torch.float32"),
        ({"value_dim": 128}, "of one size"),
        ({"function": None}, "no varlen attention with block tables"),
    ],
)
def test_what_varlen_cannot_take_is_named(changes: dict[str, Any], says: str) -> None:
    page_size, value_dim = changes.pop("page_size", 256), changes.pop("value_dim", 64)
    dtype, function = changes.pop("dtype", torch.bfloat16), changes.pop("function", Recorded())
    layer = layer_of(page_size, 2, 64, value_dim, dtype=dtype)
    refusal = VarlenAttention(function).refusal(
        torch.empty(1, 4, 64, dtype=dtype), layer, AttentionOptions(1.0, **changes)
    )
    assert refusal is not None and says in refusal


class Wrong(GatheredAttention):
    def __call__(self, *args: Any) -> torch.Tensor:
        return super().__call__(*args) * 1.5


class Broken(GatheredAttention):
    def __call__(self, *args: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image is available")


def test_the_first_that_is_right_is_chosen_and_the_reasons_are_told() -> None:
    attention = CudaAttention(
        [
            ("varlen", VarlenAttention(None)),
            ("wrong", Wrong()),
            ("broken", Broken()),
            ("gathered keys", GatheredAttention()),
        ]
    )
    layer, options = layer_of(16, 2, 8, 8), AttentionOptions(0.3)
    batch = batch_tensors(Batch((BatchSequence((0,), 0, ((3,),)),)), 16, 1, torch.device("cpu"))
    assert attention.summary == "not chosen yet" and not attention.copies_keys
    for pool in (layer.keys, layer.values):
        assert pool is not None
        pool.normal_()
    query = torch.randn(1, 4, 8)
    assert torch.allclose(attention(query, layer, batch, options), reference_attention(query, layer, batch, options))
    assert attention.copies_keys
    for part in ("gathered keys (", "no varlen attention", "differs from the reference's", "no kernel image"):
        assert part in attention.summary


def test_each_kind_of_layer_has_its_own_choice_and_is_tried_once() -> None:
    tried: list[str] = []

    class NoWindows(GatheredAttention):
        def refusal(self, query: torch.Tensor, layer: LayerPages, options: AttentionOptions) -> str | None:
            tried.append("first")
            return None if options.window is None else "no windows"

    attention = CudaAttention([("first", NoWindows()), ("second", GatheredAttention())])
    layer = layer_of(16, 2, 8, 8)
    batch = batch_tensors(Batch((BatchSequence((0,), 0, ((3,),)),)), 16, 1, torch.device("cpu"))
    for options in (AttentionOptions(0.3), AttentionOptions(0.3, window=6)) * 3:
        attention(torch.randn(1, 4, 8), layer, batch, options)
    assert attention.summary == "first, second (no windows)"
    assert len(tried) == 2
