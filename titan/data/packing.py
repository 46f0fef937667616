"""Documents → windows of tokens, concatenated and cut, with a position that is exact to the token.

A stream of documents is one long row of tokens, each document with its BOS and EOS. Windows are `seq_len + 1` tokens
and overlap by one, so that every token is a target exactly once (the very first excepted).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

State = dict[str, Any]


class Window(NamedTuple):
    """Tokens that follow each other in a row.

    Attributes:
        tokens: int32 `[n]`, n up to `seq_len + 1`.
        lengths: how many of them each document has, in their order; n in sum. A document that began before the window,
            or goes on behind it, has its part here.
    """

    tokens: np.ndarray
    lengths: list[int]


class WindowStream(Protocol):
    """Windows in one order, and the position of the next one."""

    def take(self, count: int, wanted: range) -> list[Window] | None:
        """Pass the next `count` windows; those with a place among them (from 0) in `wanted` are returned.

        None when the data ends before.
        """

    def state_dict(self) -> State:
        """What `load_state_dict` needs to come back to the next window. JSON types only."""

    def load_state_dict(self, state: State) -> None:
        """Go to a position. Reads nothing yet."""


class Reader(Protocol):
    """Documents of one stream in order, and the position of the next one."""

    def __next__(self) -> str:
        """The next document; raises StopIteration when the data ends."""

    def state_dict(self) -> State:
        """What `load_state_dict` needs to come back to the next document. JSON types only."""

    def load_state_dict(self, state: State) -> None: ...


class _Piece(NamedTuple):
    """Tokens of one document that aren't used up yet."""

    document: State  # the reader's state that gives this document again
    offset: int  # of the first of `tokens` within the document
    tokens: np.ndarray


def take_windows(next_window: Callable[[], Window | None], count: int, wanted: range) -> list[Window] | None:
    """What `WindowStream.take` returns, of a stream that makes every window in order."""
    windows = []
    for place in range(count):
        if (window := next_window()) is None:
            return None
        if place in wanted:
            windows.append(window)
    return windows


class PackedStream:
    """Windows of one stream of documents; see `WindowStream`."""

    def __init__(self, reader: Reader, encode: Callable[[str], np.ndarray], seq_len: int) -> None:
        """
        Args:
            encode: a document's text → its tokens, BOS and EOS included, `[n]`.
        """
        self._reader = reader
        self._encode = encode
        self._seq_len = seq_len
        self._pieces: deque[_Piece] = deque()
        self._buffered = 0
        self._skip = 0  # tokens of the next document that were used before the position that was loaded

    def take(self, count: int, wanted: range) -> list[Window] | None:
        """See `WindowStream`."""
        return take_windows(self.next_window, count, wanted)

    def next_window(self) -> Window | None:
        """The next `seq_len + 1` tokens; None when the data ends before."""
        while self._buffered <= self._seq_len:
            if not self._read():
                return None
        window = self._peek(self._seq_len + 1)
        self._drop(self._seq_len)
        return window

    def rest(self) -> Window:
        """What is left when there is no next window: up to `seq_len` tokens."""
        return self._peek(self._buffered)

    def _peek(self, count: int) -> Window:
        """The next tokens, which stay. No others are copied: a document may be as long as a library."""
        parts: list[np.ndarray] = [np.empty(0, np.int32)]
        for piece in self._pieces:
            parts.append(piece.tokens[:count])
            count -= len(parts[-1])
            if count == 0:
                break
        return Window(np.concatenate(parts), [len(part) for part in parts[1:]])

    def _read(self) -> bool:
        document, skip = self._reader.state_dict(), self._skip
        try:
            tokens = self._encode(next(self._reader))[skip:]
        except StopIteration:
            return False
        self._skip = 0
        if len(tokens):
            self._pieces.append(_Piece(document, skip, tokens))
            self._buffered += len(tokens)
        return True

    def _drop(self, count: int) -> None:
        self._buffered -= count
        while count:
            piece = self._pieces.popleft()
            if len(piece.tokens) > count:
                self._pieces.appendleft(_Piece(piece.document, piece.offset + count, piece.tokens[count:]))
                return
            count -= len(piece.tokens)

    def state_dict(self) -> State:
        """The position of the next window's first token: a document and an offset in it."""
        if not self._pieces:
            return {"document": self._reader.state_dict(), "offset": self._skip}
        return {"document": self._pieces[0].document, "offset": self._pieces[0].offset}

    def load_state_dict(self, state: State) -> None:
        """Go to a position. The document that it lies in is read and encoded again, with the next window."""
        self._pieces.clear()
        self._buffered = 0
        self._reader.load_state_dict(state["document"])
        self._skip = state["offset"]
