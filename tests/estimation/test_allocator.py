"""The allocator's simulator on sequences worked out by hand from c10/cuda/CUDACachingAllocator.cpp's rules."""

from __future__ import annotations

from titan.estimation.allocator import KIB, MIB, CachingAllocator


def test_small_blocks_share_pages_of_two_mib() -> None:
    for expandable in (True, False):
        allocator = CachingAllocator(expandable=expandable)
        allocator.allocate(1)
        assert (allocator.active, allocator.reserved) == (512, 2 * MIB)
        allocator.allocate(MIB)  # the largest that is small
        assert (allocator.active, allocator.reserved) == (MIB + 512, 2 * MIB)
        allocator.allocate(MIB)  # 1 MiB - 512 B is left of the page
        assert allocator.reserved == 4 * MIB


def test_sizes_are_rounded_to_512_bytes() -> None:
    allocator = CachingAllocator()
    allocator.allocate(513)
    assert allocator.active == 1024


def test_growing_segment_maps_what_its_free_end_lacks() -> None:
    allocator = CachingAllocator()
    allocator.allocate(15 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(30 * MIB)  # 5 MiB are free at the end: 25 more are needed, in pages of 20
    assert allocator.reserved == 60 * MIB
    allocator.allocate(15 * MIB)  # exactly what is left
    assert allocator.reserved == 60 * MIB


def test_freed_neighbours_join_and_the_smallest_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    first, second, third, _, fifth, _ = (allocator.allocate(size * MIB) for size in (8, 8, 8, 4, 12, 20))
    assert allocator.reserved == 60 * MIB
    for block in (first, third, second, fifth):
        allocator.free(block)
    assert allocator.active == 24 * MIB
    inner = allocator.allocate(10 * MIB)  # fits 24 free MiB, and better 12
    joined = allocator.allocate(24 * MIB)  # the first three as one
    assert allocator.reserved == 60 * MIB
    allocator.free(inner)
    allocator.free(joined)
    allocator.allocate(25 * MIB)  # nothing free is as large: grows
    assert allocator.reserved == 100 * MIB


def test_each_stream_has_its_own_pool() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB, stream=0))
    allocator.allocate(20 * MIB, stream=1)
    assert allocator.reserved == 40 * MIB
    allocator.allocate(20 * MIB, stream=0)
    assert allocator.reserved == 40 * MIB


def test_small_and_large_blocks_are_apart() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(4 * KIB)
    assert allocator.reserved == 22 * MIB


def test_classic_segments() -> None:
    allocator = CachingAllocator(expandable=False)
    allocator.allocate(3 * MIB)  # below 10 MiB: a segment of 20
    assert allocator.reserved == 20 * MIB
    allocator.allocate(11 * MIB)  # of the 17 that are left
    assert allocator.reserved == 20 * MIB
    allocator.allocate(11 * MIB)  # a segment of its own, in steps of 2 MiB
    assert allocator.reserved == 32 * MIB
    allocator.allocate(MIB + 512)  # what is left of that one is 1 MiB: too little to be cut off; the first has 6
    assert allocator.reserved == 32 * MIB


def test_classic_keeps_a_remainder_of_up_to_one_mib_with_its_block() -> None:
    allocator = CachingAllocator(expandable=False)
    allocator.free(allocator.allocate(12 * MIB))
    allocator.allocate(11 * MIB)
    assert allocator.active == 12 * MIB


def test_classic_segments_do_not_join() -> None:
    allocator = CachingAllocator(expandable=False)
    blocks = [allocator.allocate(20 * MIB), allocator.allocate(20 * MIB)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 80 * MIB
