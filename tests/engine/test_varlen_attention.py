"""torch's varlen attention, which runs only on CUDA: the arguments of its call, and the layers that it refuses."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mlserver_torch_stream.engine.attention.gathered import GatheredAttention
from mlserver_torch_stream.engine.attention.paged_attention import AttentionOptions, batch_tensors
from mlserver_torch_stream.engine.attention.varlen import VarlenAttention, find_varlen
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


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


class Recorded:
    """Records its calls; has the signature of ``torch.nn.attention.varlen.varlen_attn_out``."""

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
    assert call["key"].shape == call["value"].shape == (30, 256, 2, 64) and call["key"].is_contiguous()
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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"softcap": 5.0}, "not support softcaps, sinks or chunks"),
        ({"chunk": 6}, "not support softcaps, sinks or chunks"),
        ({"page_size": 16}, "pages of a multiple of 256"),
        ({"dtype": torch.float32}, "does not support torch.float32"),
        ({"value_dim": 128}, "of the same size"),
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


def test_torch_attends_in_the_layers_that_varlen_refuses_and_the_summary_says_why() -> None:
    attention, layer, options = VarlenAttention(Recorded()), layer_of(256, 2, 8, 8), AttentionOptions(0.3, softcap=2.0)
    batch = batch_tensors(Batch((BatchSequence((0,), 0, ((3,),)),)), 256, 1, torch.device("cpu"))
    assert layer.keys is not None and layer.values is not None
    layer.keys.normal_(), layer.values.normal_()
    query = torch.randn(1, 4, 8)
    assert attention.describe() == "varlen attention"
    assert torch.equal(attention(query, layer, batch, options), GatheredAttention()(query, layer, batch, options))
    assert attention.describe() == (
        "varlen attention (torch's in some layers: varlen attention does not support softcaps, sinks or chunks)"
    )
