"""Windows of token files: each has a number, so that a position is one number and an order no more than arithmetic."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from titan.data.packing import State, Window
from titan.data.shuffle import Permutation, derive_key
from titan.data.token_files import TokenFiles
from titan.observability.logging import logger


class TokenWindows:
    """See `WindowStream`: window k of an epoch is tokens k·S … k·S + S, S = seq_len, and so overlaps the next by one.

    What is left at the end is too short for a window and is left out of every epoch. The windows of all epochs are
    numbered in the order in which they are read: number n is place n mod W of epoch ⌊n / W⌋, of W windows. A keyed
    permutation drawn from (seed, epoch) says which window is at that place.
    """

    def __init__(
        self,
        files: TokenFiles,
        seq_len: int,
        *,
        shuffle: bool,
        infinite: bool,
        seed: int,
        name: str = "tokens",
        find_documents: bool = False,
    ) -> None:
        """
        Args:
            name: what the log calls the files.
            find_documents: look up where documents end.
        """
        self._files = files
        self._seq_len = seq_len
        self._windows = windows_of(files, seq_len)
        self._shuffle = shuffle
        self._infinite = infinite
        self._seed = seed
        self._name = name
        self._find_documents = find_documents
        self._next = 0

    def take(self, count: int, wanted: range) -> list[Window] | None:
        """See `WindowStream`. Those that aren't wanted aren't read."""
        if not self.has(count):
            return None
        numbers = self._next + np.arange(wanted.start, wanted.stop, dtype=np.int64)
        before = max(0, self._next - 1) // self._windows
        self._next += count
        if (epoch := (self._next - 1) // self._windows) > before and wanted.start == 0:  # several read the files
            logger.info(f"dataset {self._name} begins epoch {epoch}")
        starts = (int(window) * self._seq_len for window in self._order(numbers))
        return [
            read_window(self._files, start, self._seq_len + 1, find_documents=self._find_documents) for start in starts
        ]

    def has(self, count: int) -> bool:
        """Whether so many windows are left."""
        return self._infinite or self._next + count <= self._windows

    def _order(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Which windows, by their place in the files, have these numbers."""
        epochs, places = np.divmod(numbers, self._windows)
        if self._shuffle:
            for epoch in np.unique(epochs):
                order = Permutation(self._windows, derive_key(self._seed, "windows", int(epoch)))
                places[epochs == epoch] = order.take(places[epochs == epoch])
        return places

    def state_dict(self) -> State:
        """The number of the next window."""
        return {"window": self._next}

    def load_state_dict(self, state: State) -> None:
        """Go to a window."""
        self._next = state["window"]


def read_window(files: TokenFiles, start: int, count: int, *, find_documents: bool) -> Window:
    """Tokens start … start + count − 1; as one document, unless they are to be found."""
    tokens = files.read(start, count)
    if not find_documents:
        return Window(tokens, [count])
    ends = [int(end) for end in files.document_ends(start, count) if end < count]
    return Window(tokens, [end - begin for begin, end in pairwise([0, *ends, count])])


def windows_of(files: TokenFiles, seq_len: int) -> int:
    """The windows of an epoch."""
    return (len(files) - 1) // seq_len
