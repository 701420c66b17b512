"""The budget in bytes becomes numbers of pages for each group of layers on each device.

They hold as many sequences, and as long ones, as the budget allows.
"""

from __future__ import annotations

from mlserver_torch_stream.engine.cache.page_counts import CacheSize, pages_on_host, size_cache
from mlserver_torch_stream.engine.cache.pages import CacheSpec, LayerGroup, page_size_of
from mlserver_torch_stream.engine.scheduler.queue import SchedulerLimits, longest_sequence

FULL = CacheSpec(16, (LayerGroup((0, 1), token_bytes=100),))
MIXED = CacheSpec(16, (LayerGroup((0,), token_bytes=100), LayerGroup((1, 2), window=64, token_bytes=200)))
STATES = CacheSpec(16, (LayerGroup((0,), token_bytes=100),), state_bytes=5000)
LIMITS = {"sequences": 8, "tokens": 1024, "step": 32}


def test_all_bytes_become_pages_where_all_layers_see_everything() -> None:
    size = size_cache([(FULL, 1_000_000)], **LIMITS)
    assert size == CacheSize((625,), 0) and size.bytes_of(FULL) == 1_000_000


def test_windowed_layers_get_what_all_sequences_together_can_use() -> None:
    """Equal parts would leave most pages unused: eight long sequences need 8 * 64 full and 8 * 5 windowed pages."""
    full, windowed = size_cache([(MIXED, 900_000)], **LIMITS).pages
    assert 8 * 5 <= windowed <= 8 * 5 + 8
    assert 900_000 - 8 * 16 * 100 <= 16 * (100 * full + 200 * windowed) <= 900_000


def test_a_sequence_of_full_length_comes_before_many_short_ones() -> None:
    room = 16 * (64 * 100 + 7 * 200)
    assert size_cache([(MIXED, room)], **LIMITS).pages == (64, 7), "a chunk of 32 needs 7 pages of 16 beside a window"
    for budget, longest in ((room, 1024), (room - 1, 1008)):
        pages = size_cache([(MIXED, budget)], **LIMITS).pages
        assert longest_sequence(MIXED, SchedulerLimits(8, 32, pages, budget), 1024) == longest


def test_the_device_with_the_least_room_for_its_layers_decides() -> None:
    here = CacheSpec(16, (LayerGroup((0, 1), token_bytes=75),))
    there = CacheSpec(16, (LayerGroup((0, 1), token_bytes=25),))
    assert size_cache([(here, 120_000), (there, 120_000)], **LIMITS).pages == (100,)
    assert size_cache([(here, 120_000), (there, 4_000)], **LIMITS).pages == (10,)
    assert here + there == FULL


def test_a_device_with_states_only_has_room_for_fewer_slots() -> None:
    here = CacheSpec(16, (LayerGroup((0,), token_bytes=100),))
    there = CacheSpec(16, (LayerGroup((0,)),), state_bytes=5000)
    assert size_cache([(here + there, 10**6)], **LIMITS).state_slots == 8
    tight = size_cache([(here, 10**6), (there, 15_000)], sequences=8, tokens=1024, step=32)
    assert tight.state_slots == 3


def test_states_have_a_slot_for_each_sequence_that_may_run() -> None:
    assert size_cache([(STATES, 10**6)], **LIMITS).state_slots == 8
    few = size_cache([(STATES, 3 * 5000 + 64 * 1600)], **LIMITS)
    assert few.state_slots == 3 and few.pages[0] >= 64
    only = CacheSpec(16, (), state_bytes=5000)
    assert size_cache([(only, 26_000)], **LIMITS) == CacheSize((), 5)
    assert size_cache([(only, 4_000)], **LIMITS) == CacheSize((), 0)


def test_without_room_for_a_page_there_is_none() -> None:
    assert size_cache([(FULL, 1599)], **LIMITS) == CacheSize((0,), 0)


def test_a_sequences_bytes_are_its_pages_and_states() -> None:
    assert FULL.sequence_bytes(1) == FULL.sequence_bytes(16) == 1600
    assert FULL.sequence_bytes(17) == 3200
    assert MIXED.sequence_bytes(1000) == 63 * 1600 + 5 * 3200
    assert STATES.sequence_bytes(1) == 6600
    assert MIXED.token_bytes == 300


def test_pages_are_large_where_a_gpu_reads_them() -> None:
    assert page_size_of(["cpu", "cuda"]) == 256 and page_size_of(["cpu"]) == 16


def test_on_a_host_any_group_may_take_all_of_the_budget() -> None:
    spec = CacheSpec(16, (LayerGroup((0,), token_bytes=100), LayerGroup((1,), window=8, token_bytes=300)))
    assert pages_on_host(spec, 48_000) == (30, 10)
