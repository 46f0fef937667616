"""A shuffle without state: the i-th element of an order of n, computed from (n, key) alone.

An order of a billion documents takes no memory, costs nothing to resume, and is the same on every machine. It is a
Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", 1988) over
the smallest power of two that holds n, with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains",
2002): a value that falls outside 0..n-1 is permuted again until it falls inside, twice on average at worst.
"""

import hashlib
import operator
from collections.abc import Iterator
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

_MASK64 = (1 << 64) - 1
_LARGEST = 1 << 62  # every value and index fits int64
_ROUNDS = 8  # an even number; small domains need more than the four that large ones do
_ODD_A = 0x9E3779B97F4A7C15  # 2**64 / golden ratio
_ODD_B = 0xD1342543DE82EF95  # a multiplier with good lattice structure (Steele and Vigna, 2021)


def derive_key(seed: int, *parts: SupportsIndex | str) -> int:
    """A 64-bit key for one purpose, such as `derive_key(seed, "documents", epoch)`.

    The same on every platform and Python version; any change of a part, of its type or of the order gives another key.

    Raises:
        TypeError: a part is neither a whole number nor a string.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *parts):
        text = f"s{part}" if isinstance(part, str) else f"i{operator.index(part)}"
        encoded = text.encode("utf-8")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return int.from_bytes(digest.digest(), "little")


class Permutation:
    """A pseudo-random order of the numbers 0..n-1, chosen by a key.

    Args:
        n: how many numbers, 1 to 2**62.
        key: 64 bits, as `derive_key` gives them.

    Raises:
        ValueError: n or key is out of range.
    """

    def __init__(self, n: int, key: int) -> None:
        if not 1 <= n <= _LARGEST:
            raise ValueError(f"a permutation needs 1 to 2**62 elements, not {n}")
        if not 0 <= key <= _MASK64:
            raise ValueError(f"a permutation's key has 64 bits, not {key}")
        bits = max(2, (n - 1).bit_length())  # each half has at least one bit
        self._n = n
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits
        digest = hashlib.blake2b(key.to_bytes(8, "little"), digest_size=8 * _ROUNDS).digest()
        self._round_keys = [int.from_bytes(digest[8 * r : 8 * r + 8], "little") for r in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(self._n))

    def __getitem__(self, i: int) -> int:
        """The i-th element of the order. Raises IndexError outside 0..n-1."""
        if not 0 <= i < self._n:
            raise IndexError(f"index {i} of a permutation of {self._n}")
        value = self._scramble(i)
        while value >= self._n:
            value = self._scramble(value)
        return value

    def take(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The elements at many indices: the same numbers as `[self[i] for i in indices]`, tens of times faster.

        Raises:
            IndexError: an index is outside 0..n-1.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < self._n):
            raise IndexError(f"indices {wanted.min()} to {wanted.max()} of a permutation of {self._n}")
        values = self._scramble_many(wanted.astype(np.uint64).ravel())
        outside = np.flatnonzero(values >= self._n)
        while outside.size:
            values[outside] = self._scramble_many(values[outside])
            outside = outside[values[outside] >= self._n]
        return values.astype(np.int64).reshape(wanted.shape)

    def _scramble(self, value: int) -> int:
        """One pass of the network: a bijection of 0..2**bits-1. Each round changes one half by a hash of the other."""
        low_bits, high_bits = self._low_bits, self._high_bits
        high, low = value >> low_bits, value & ((1 << low_bits) - 1)
        drop_high, drop_low = 64 - high_bits, 64 - low_bits
        keys = iter(self._round_keys)
        for key in keys:
            mixed = (low ^ key) * _ODD_A & _MASK64
            high ^= ((mixed ^ (mixed >> 32)) * _ODD_B & _MASK64) >> drop_high
            mixed = (high ^ next(keys)) * _ODD_A & _MASK64
            low ^= ((mixed ^ (mixed >> 32)) * _ODD_B & _MASK64) >> drop_low
        return high << low_bits | low

    def _scramble_many(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """`_scramble` of an array; uint64 arithmetic wraps as the masks above do."""
        low_bits, high_bits = np.uint64(self._low_bits), np.uint64(self._high_bits)
        high, low = values >> low_bits, values & np.uint64((1 << self._low_bits) - 1)
        for even, odd in zip(self._round_keys[::2], self._round_keys[1::2], strict=True):
            high ^= _mix(low, even) >> (np.uint64(64) - high_bits)
            low ^= _mix(high, odd) >> (np.uint64(64) - low_bits)
        joined: npt.NDArray[np.uint64] = high << low_bits | low
        return joined


def _mix(values: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each value whose upper bits are the good ones."""
    mixed: npt.NDArray[np.uint64] = (values ^ np.uint64(key)) * np.uint64(_ODD_A)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(_ODD_B)
    return mixed
