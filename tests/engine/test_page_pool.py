"""The page pool alone: only free pages are handed out, and computed pages are found until they are overwritten."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mlserver_torch_stream.engine.cache.pages import CacheSpec, LayerGroup, PagePool, page_digest

SPEC = CacheSpec(2, (LayerGroup((0,), token_bytes=5), LayerGroup((1,), token_bytes=20)))  # pages of 10 and 40 bytes


def pool_of(pages: tuple[int, int] = (4, 4), cache_bytes: int = 1000, prefix_bytes: int = 1000) -> PagePool:
    return PagePool(SPEC, pages, cache_bytes, prefix_bytes)


def test_the_lowest_free_page_comes_first() -> None:
    pool = pool_of()
    assert [pool.take(0) for _ in range(3)] == [0, 1, 2]
    pool.give_back(0, 2)
    pool.give_back(0, 0)
    assert [pool.take(0) for _ in range(3)] == [0, 2, 3]
    assert not pool.fits([1, 0])
    assert pool.fits([0, 4])


def test_a_digest_stands_for_all_tokens_up_to_its_page() -> None:
    first = page_digest(b"", [1, 2])
    assert first == page_digest(b"", [1, 2])
    assert len({first, page_digest(b"", [2, 1]), page_digest(first, [1, 2]), page_digest(b"", [1, 258])}) == 4


def test_a_page_is_found_while_somebody_holds_it_and_afterwards_until_it_is_needed() -> None:
    pool = pool_of()
    pages = [pool.take(0) for _ in range(4)]
    for page in pages[:2]:
        pool.name(0, page, bytes([page]))
    for page in pages:
        pool.give_back(0, page)
    assert pool.cached_bytes == 20
    assert pool.used_bytes == 0
    pool.share(0, 0)  # the cached page 1 is the least recently used now
    assert [pool.take(0) for _ in range(3)] == [2, 3, 1]
    assert pool.find(0, b"\x00") == 0
    assert pool.find(0, b"\x01") is None


def test_a_page_is_free_when_its_last_holder_gives_it_back() -> None:
    pool = pool_of()
    page = pool.take(1)
    pool.share(1, page)
    pool.give_back(1, page)
    assert (pool.holders(1, page), pool.used_bytes) == (1, 40)
    pool.give_back(1, page)
    assert (pool.holders(1, page), pool.used_bytes) == (0, 0)


def test_the_first_of_two_pages_with_the_same_tokens_is_found() -> None:
    pool = pool_of()
    one, other = pool.take(0), pool.take(0)
    pool.name(0, one, b"same")
    pool.name(0, other, b"same")
    pool.give_back(0, other)
    assert pool.cached_bytes == 0
    assert pool.find(0, b"same") == one
    pool.forget(0, one)
    assert pool.find(0, b"same") is None


def test_cached_pages_of_all_groups_go_in_the_order_of_their_last_use() -> None:
    pool = pool_of(cache_bytes=100, prefix_bytes=60)
    for group in (1, 0, 0):
        pool.name(group, page := pool.take(group), bytes([group, page]))
    for group, page in ((0, 0), (1, 0), (0, 1)):
        pool.give_back(group, page)
    assert pool.cached_bytes == 60
    pool.take(1)  # 40 bytes are free
    assert pool.cached_bytes == 60
    pool.take(0)
    assert pool.find(0, b"\x00\x00") is None
    assert pool.find(1, b"\x01\x00") == 0
    pool.reserve(20)
    assert pool.find(1, b"\x01\x00") is None
    assert pool.used_bytes + pool.cached_bytes == 80


def test_cached_pages_stay_within_their_bytes() -> None:
    pool = pool_of(prefix_bytes=15)
    for group in (0, 0, 1):
        pool.name(group, page := pool.take(group), bytes([group, page]))
    for group, page in ((0, 0), (0, 1), (1, 0)):
        pool.give_back(group, page)
    assert pool.cached_bytes == 10
    assert pool.find(0, b"\x00\x01") == 1


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "share", "give", "name", "forget", "reserve"]), st.integers(0, 99))
)


@settings(deadline=None)
@given(ACTIONS, st.integers(40, 300), st.sampled_from([0, 30, 300]))
def test_whatever_is_asked_pages_and_bytes_add_up(
    actions: list[tuple[str, int]], cache_bytes: int, prefix_bytes: int
) -> None:
    pool, held, reserved = pool_of((5, 5), cache_bytes, prefix_bytes), list[tuple[int, int]](), 0
    for action, value in actions:
        group = value % 2
        if action == "take" and pool.fits([1 - group, group]):
            page = pool.take(group)
            assert (group, page) not in held
            held.append((group, page))
        elif action == "reserve" and pool.fits([0, 0], 7):
            pool.reserve(7)
            reserved += 7
        elif action == "share" and (found := pool.find(group, bytes([value % 7]))) is not None:
            size = 0 if pool.holders(group, found) else (10, 40)[group]
            if pool.used_bytes + size <= cache_bytes:
                pool.share(group, found)
                held.append((group, found))
        elif held and action == "give":
            pool.give_back(*held.pop(value % len(held)))
        elif held and action == "name":
            group, page = held[value % len(held)]
            pool.name(group, page, bytes([value % 7]))
        elif held and action == "forget":
            pool.forget(*held[value % len(held)])
        assert pool.used_bytes == sum((10, 40)[group] for group, _ in set(held)) + reserved
        assert pool.used_bytes + pool.cached_bytes <= cache_bytes
        assert pool.cached_bytes <= prefix_bytes
        assert all(pool.holders(*place) == held.count(place) for place in held)
