"""Page states and reference counts; the prefix cache on top of them."""

import pytest

from engine.pages import PageAllocator, PageError
from engine.prefix_cache import PrefixCache, extend_keys, page_key


def test_pages_are_handed_out_once_and_none_if_too_few():
    pages = PageAllocator(4)
    taken = pages.allocate(3)
    assert sorted(taken) == sorted(set(taken))
    assert (pages.num_used, pages.num_available) == (3, 1)
    pages.release(taken)
    assert (pages.num_used, pages.num_available) == (0, 4)
    pages = PageAllocator(4)
    pages.allocate(2)
    with pytest.raises(PageError, match="3 pages wanted, 2 of 4 available"):
        pages.allocate(3)
    assert pages.num_available == 2


def test_a_shared_page_is_free_after_its_last_reference_and_an_idle_one_can_be_shared():
    pages = PageAllocator(1)
    [page] = pages.allocate(1)
    pages.share(page)
    pages.release([page])
    assert pages.num_references(page) == 1
    assert pages.num_available == 0
    pages.release([page])
    assert pages.num_available == 1
    pages = PageAllocator(1)
    [page] = pages.allocate(1)
    pages.keep(page)
    pages.release([page])
    assert pages.num_available == 1
    pages.share(page)
    assert pages.num_available == 0


def test_misuse_raises():
    pages = PageAllocator(1)
    with pytest.raises(PageError, match="nobody holds"):
        pages.release([0])
    with pytest.raises(PageError, match="is free"):
        pages.share(0)
    with pytest.raises(PageError, match="not in use"):
        pages.keep(0)


def test_idle_pages_are_taken_last_and_the_longest_idle_first():
    reused = []
    pages = PageAllocator(3, reused.append)
    first, second, third = pages.allocate(3)
    pages.keep(first)
    pages.keep(second)
    pages.release([second])
    pages.release([first])
    pages.release([third])
    assert pages.allocate(1) == [third]
    assert reused == []
    assert pages.allocate(2) == [second, first]
    assert reused == [second, first]


def test_a_key_depends_on_everything_before_it():
    keys_a, keys_b = [], []
    extend_keys(keys_a, [1, 2, 3, 4, 5, 6], 2, 3)
    extend_keys(keys_b, [9, 2, 3, 4, 5, 6], 2, 3)
    assert len(set(keys_a + keys_b)) == 6
    extended = keys_a[:1]
    extend_keys(extended, [1, 2, 3, 4, 5, 6], 2, 3)
    assert extended == keys_a
    assert page_key(b"", [1, 2]) == keys_a[0]


def test_the_longest_known_run_matches_and_is_referenced():
    pages = PageAllocator(4)
    cache = PrefixCache(pages)
    first, second = pages.allocate(2)
    cache.remember(b"1", first)
    cache.remember(b"2", second)
    assert cache.match([b"1", b"2", b"3"]) == [first, second]
    assert cache.match([b"0", b"1"]) == []
    assert (pages.num_references(first), pages.num_references(second)) == (2, 2)


def test_a_reused_page_is_forgotten():
    pages = PageAllocator(2)
    cache = PrefixCache(pages)
    [page] = pages.allocate(1)
    cache.remember(b"1", page)
    pages.release([page])
    assert len(cache) == 1
    pages.allocate(2)
    assert len(cache) == 0
    assert cache.match([b"1"]) == []


def test_a_second_page_of_one_key_is_ignored_and_becomes_free():
    pages = PageAllocator(2)
    cache = PrefixCache(pages)
    first, second = pages.allocate(2)
    cache.remember(b"1", first)
    cache.remember(b"1", second)
    pages.release([first, second])
    assert cache.match([b"1"]) == [first]
    assert pages.allocate(1) == [second]
