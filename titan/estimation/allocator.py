"""PyTorch's caching allocator for accelerators (c10/cuda/CUDACachingAllocator.cpp), as far as sizes go.

Memory that is freed stays with the pool it came from: one for each stream, and in it one for blocks of up to 1 MiB and
one for larger ones. So what a process reserves is more than what its tensors take.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

KIB, MIB = 2**10, 2**20

_UNIT = 512  # sizes are multiples of it
_SMALL = MIB  # the largest block of a small pool
_SMALL_PAGE, _LARGE_PAGE = 2 * MIB, 20 * MIB  # what growing segments grow by; also the least that classic ones have
_LARGE_SEGMENT = 10 * MIB  # classic: from here on a segment is made for its first block


def block_size(size: int) -> int:
    """Bytes of the block that so many are given, at least 1."""
    return max(_UNIT, -(-size // _UNIT) * _UNIT)


@dataclass(eq=False)
class _Block:
    """A piece of a segment. The last piece of a growing one has neighbours only to the left."""

    size: int
    pool: _Pool
    free: bool = False
    left: _Block | None = None
    right: _Block | None = None
    order: int = 0  # its address, as far as it decides


@dataclass(eq=False)
class _Pool:
    small: bool
    free: list[tuple[int, int]] = field(default_factory=list)  # (size, order) ascending
    blocks: dict[int, _Block] = field(default_factory=dict)  # free ones by order
    tail: _Block | None = None  # of the growing segment

    def put(self, block: _Block) -> None:
        block.free = True
        insort(self.free, (block.size, block.order))
        self.blocks[block.order] = block

    def take(self, block: _Block) -> None:
        block.free = False
        del self.free[bisect_left(self.free, (block.size, block.order))]
        del self.blocks[block.order]

    def best(self, size: int) -> _Block | None:
        """The smallest free block of at least this size, the lowest of equal ones."""
        place = bisect_left(self.free, (size, 0))
        return self.blocks[self.free[place][1]] if place < len(self.free) else None


class CachingAllocator:
    """Follows allocations and frees, and knows what has been reserved.

    Attributes:
        reserved: bytes taken from the device. Never given back.
        active: bytes of the blocks in use, rounded as the allocator rounds.
    """

    def __init__(self, *, expandable: bool = True) -> None:
        """
        Args:
            expandable: segments grow (PYTORCH_ALLOC_CONF=expandable_segments:True) instead of being made anew.
        """
        self._expandable = expandable
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._orders = 0
        self.reserved = self.active = 0

    def allocate(self, size: int, stream: int = 0) -> _Block:
        """A block of at least `size` bytes; `free` takes it back."""
        size = block_size(size)
        small = size <= _SMALL
        pool = self._pools.setdefault((stream, small), _Pool(small))
        block = pool.best(size)
        if block is not None:
            pool.take(block)
        else:
            block = self._grow(pool, size) if self._expandable else self._new_segment(pool, size)
        rest = block.size - size
        if rest >= _UNIT if small or self._expandable else rest > _SMALL:
            self._split(block, size)
        self.active += block.size
        return block

    def free(self, block: _Block) -> None:
        """Give a block back to its pool, joined with free neighbours."""
        self.active -= block.size
        pool = block.pool
        left, right = block.left, block.right
        if left is not None and left.free:
            pool.take(left)
            block = self._join(left, block)
        if right is not None and right.free:
            pool.take(right)
            block = self._join(block, right)
        pool.put(block)

    def _grow(self, pool: _Pool, size: int) -> _Block:
        """Map pages behind the pool's last block; as much as is missing when that block is free."""
        page = _SMALL_PAGE if pool.small else _LARGE_PAGE
        tail = pool.tail
        if tail is not None and tail.free:
            pool.take(tail)
            missing = -(-(size - tail.size) // page) * page
            tail.size += missing
            self.reserved += missing
            return tail
        mapped = -(-size // page) * page
        self.reserved += mapped
        block = self._block(mapped, pool, left=tail)
        if tail is not None:
            tail.right = block
        pool.tail = block
        return block

    def _new_segment(self, pool: _Pool, size: int) -> _Block:
        if pool.small:
            segment = _SMALL_PAGE
        elif size < _LARGE_SEGMENT:
            segment = _LARGE_PAGE
        else:
            segment = -(-size // _SMALL_PAGE) * _SMALL_PAGE
        self.reserved += segment
        return self._block(segment, pool)

    def _block(self, size: int, pool: _Pool, left: _Block | None = None, right: _Block | None = None) -> _Block:
        self._orders += 1
        return _Block(size, pool, left=left, right=right, order=self._orders)

    def _split(self, block: _Block, size: int) -> None:
        rest = self._block(block.size - size, block.pool, left=block, right=block.right)
        if block.right is not None:
            block.right.left = rest
        if block.pool.tail is block:
            block.pool.tail = rest
        block.size, block.right = size, rest
        block.pool.put(rest)

    def _join(self, left: _Block, right: _Block) -> _Block:
        left.size += right.size
        left.right = right.right
        if right.right is not None:
            right.right.left = left
        if left.pool.tail is right:
            left.pool.tail = left
        return left
