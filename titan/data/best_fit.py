"""Documents → windows that cut as few of them as can be, the rest of each window padded.

Best-fit packing (arXiv 2404.10830): a document that fits a window is whole in one; a longer one fills windows, and only
what is left of it shares one. Documents are taken in blocks, so that little is held in memory and a position is a block
and a place in it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import numpy as np

from titan.data.packing import Reader, State, Window, take_windows
from titan.data.shuffle import Permutation

_BLOCK_WINDOWS = 128  # what a block's tokens would fill; with fewer there is more padding, with more a resume waits


class BestFitStream:
    """Windows of one stream of documents; see `WindowStream`. At the end of the data the last ones are padded too."""

    def __init__(self, reader: Reader, encode: Callable[[str], np.ndarray], seq_len: int, key: int | None) -> None:
        """
        Args:
            encode: a document's text → its tokens, BOS and EOS included, `[n]`.
            key: of the order of a block's windows; None for that of the documents that they begin with.
        """
        self._reader = reader
        self._encode = encode
        self._seq_len = seq_len
        self._key = key
        self._windows: list[Window] = []  # the block's; empty before it is read
        self._next = 0  # the place of the next window in it
        self._block = reader.state_dict()  # where it begins

    def take(self, count: int, wanted: range) -> list[Window] | None:
        """See `WindowStream`."""
        return take_windows(self._next_window, count, wanted)

    def _next_window(self) -> Window | None:
        if self._next == len(self._windows):  # the block is used up
            self._windows, self._next = [], 0
        if not self._windows:
            self._block = self._reader.state_dict()
            self._windows = self._pack(self._read_pieces())
        if not self._windows:
            return None
        self._next += 1
        return self._windows[self._next - 1]

    def _read_pieces(self) -> list[np.ndarray]:
        """The next block's documents, the long ones cut."""
        pieces: list[np.ndarray] = []
        missing = _BLOCK_WINDOWS * self._seq_len
        while missing > 0:
            try:
                tokens = self._encode(next(self._reader))
            except StopIteration:
                break
            pieces += cut(tokens, self._seq_len)
            missing -= len(tokens)
        return pieces

    def _pack(self, pieces: list[np.ndarray]) -> list[Window]:
        bins = best_fit([len(piece) for piece in pieces], self._seq_len + 1)
        windows = [
            Window(np.concatenate([pieces[piece] for piece in held]), [len(pieces[piece]) for piece in held])
            for held in bins
        ]
        if self._key is None or not windows:
            return windows
        order = Permutation(len(windows), self._key)
        return [windows[order[place]] for place in range(len(windows))]

    def state_dict(self) -> State:
        """The position of the next window: where its block of documents begins, and its place in the block."""
        if self._windows and self._next == len(self._windows):
            return {"block": self._reader.state_dict(), "window": 0}
        return {"block": self._block, "window": self._next}

    def load_state_dict(self, state: State) -> None:
        """Go to a position. The block that it lies in is read, encoded and packed again, with the next window."""
        self._windows = []
        self._reader.load_state_dict(state["block"])
        self._block, self._next = state["block"], state["window"]


def cut(tokens: np.ndarray, seq_len: int) -> list[np.ndarray]:
    """Pieces of a document, up to `seq_len + 1` tokens. They overlap by one, so that each token but the first is a
    target once.
    """
    if len(tokens) <= 1:
        return [tokens] if len(tokens) else []
    return [tokens[start : start + seq_len + 1] for start in range(0, len(tokens) - 1, seq_len)]


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Which pieces share a bin: the longest first, each into the bin that it leaves the least room in.

    Args:
        lengths: of the pieces, 1 to `size`.

    Returns:
        The pieces of each bin, by their numbers, in ascending order; bins by their first piece.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (what is free, bin), ascending; full bins left out
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        tightest = bisect.bisect_left(rooms, (lengths[piece], -1))
        if tightest < len(rooms):
            room, number = rooms.pop(tightest)
        else:
            room, number = size, len(bins)
            bins.append([])
        bins[number].append(piece)
        if room > lengths[piece]:
            bisect.insort(rooms, (room - lengths[piece], number))
    return sorted(sorted(held) for held in bins)
