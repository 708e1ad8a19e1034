"""The model of PyTorch's caching allocator, against what its source says."""

import pytest

from preflight.memory.allocator import CachingAllocator, OutOfMemory

MIB = 1 << 20


def test_small_requests_share_a_segment_of_two_mib():
    allocator = CachingAllocator()
    for key in range(4):
        allocator.allocate(key, 100)
    assert (allocator.allocated, allocator.reserved) == (4 * 512, 2 * MIB)


def test_requests_below_ten_mib_come_from_segments_of_twenty():
    allocator = CachingAllocator()
    allocator.allocate(1, 3 * MIB)
    allocator.allocate(2, 9 * MIB)
    assert allocator.reserved == 20 * MIB


def test_larger_requests_are_rounded_to_two_mib_and_counted_whole():
    allocator = CachingAllocator()
    allocator.allocate(1, 11 * MIB)
    # 12 MiB segment; 1 MiB remains, which is not more than 1 MiB, so it is not split off
    assert (allocator.reserved, allocator.allocated) == (12 * MIB, 12 * MIB)


def test_a_reused_block_is_split_only_when_more_than_one_mib_remains():
    allocator = CachingAllocator()
    allocator.allocate(1, 16 * MIB)
    allocator.release(1)
    allocator.allocate(2, 14 * MIB)
    assert allocator.allocated == 14 * MIB
    allocator.allocate(3, 2 * MIB)
    assert allocator.reserved == 16 * MIB


def test_free_neighbours_become_one_block():
    allocator = CachingAllocator()
    for key in range(5):
        allocator.allocate(key, 4 * MIB)
    allocator.release(1)
    allocator.release(3)
    allocator.release(2)
    allocator.allocate(9, 12 * MIB)
    assert allocator.reserved == 20 * MIB


def test_the_best_fit_is_taken():
    allocator = CachingAllocator()
    allocator.allocate("a", 32 * MIB)
    allocator.allocate("b", 12 * MIB)
    allocator.release("a")
    allocator.release("b")
    allocator.allocate("c", 12 * MIB)
    allocator.allocate("d", 32 * MIB)
    assert allocator.reserved == 44 * MIB


def test_emptying_the_cache_returns_only_whole_free_segments():
    allocator = CachingAllocator()
    allocator.allocate(1, 40 * MIB)
    allocator.allocate(2, 5 * MIB)
    allocator.release(1)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    assert allocator.peak_reserved == 60 * MIB
    allocator.reset_peaks()
    assert allocator.peak_reserved == 20 * MIB


def test_before_it_fails_the_cache_is_given_back():
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    allocator.allocate(1, 60 * MIB)
    allocator.release(1)
    allocator.allocate(2, 80 * MIB)
    assert allocator.released_cache
    with pytest.raises(OutOfMemory) as caught:
        allocator.allocate(3, 30 * MIB)
    assert caught.value.allocated == 80 * MIB
