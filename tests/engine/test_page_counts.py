"""How many pages a budget gives: all of it to any group where untouched pages are free, else a split that fits."""

from __future__ import annotations

from mlserver_torch_stream.engine.kv_cache.cache_spec import CacheSpec, LayerGroup
from mlserver_torch_stream.engine.kv_cache.page_counts import page_counts, page_size

FULL = LayerGroup((0, 2), token_bytes=100)
WINDOWED = LayerGroup((1, 3), window=512, token_bytes=100)


def test_pages_that_take_no_memory_before_they_are_written_may_be_all_of_one_group() -> None:
    spec = CacheSpec(16, (FULL, WINDOWED))
    assert page_counts(spec, 16_000, sequences=4, context=4096) == (10, 10)


def test_reserved_pages_and_states_take_no_more_than_the_budget() -> None:
    spec = CacheSpec(256, (FULL, WINDOWED), state_bytes=1000)
    budget = 10 * 2**20
    pages = page_counts(spec, budget, sequences=8, context=8192, reserved=True)
    held = sum(count * spec.page_bytes(group) for group, count in enumerate(pages)) + 8 * 1000
    assert 0.95 * budget < held <= budget
    assert 2 < pages[0] / pages[1] < 4  # 2,048 tokens of one group beside 512 and a page of the other


def test_a_short_context_has_no_use_for_more_full_than_windowed_pages() -> None:
    spec = CacheSpec(256, (FULL, WINDOWED))
    full, windowed = page_counts(spec, 2**22, sequences=1, context=512, reserved=True)
    assert full == windowed


def test_a_model_of_states_alone_has_no_pages() -> None:
    assert page_counts(CacheSpec(16, (), 100), 2**20, sequences=4, context=100) == ()


def test_pages_on_gpus_are_what_torchs_attention_takes() -> None:
    assert page_size("cuda") % 256 == 0
    assert 16 <= page_size("cpu") <= 64
