"""What a dataset is to titan: documents by number, or, where only a sequence can be had, streams of them."""

import bisect
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable


class BadRow(Exception):
    """A document that can't be read.

    Attributes:
        where: its file and line, such as "file.jsonl:17" (from 1), or its dataset and row.
        reason: what is wrong with it.
    """

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


@runtime_checkable
class Documents(Protocol):
    """Text by number.

    Attributes:
        name: what the dataset is called, for messages.
        fingerprint: changes when the meaning of a document's number may; doesn't depend on where the data lies.
    """

    name: str
    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> str:
        """Document i of 0..len-1, ready for UTF-8. Raises BadRow when it can't be read, IndexError out of range."""


class DocumentStream(Protocol):
    """One pass over a part of a streamed dataset.

    `next()` returns the next document or raises BadRow for one that can't be read; the one after it follows either way.
    """

    def __iter__(self) -> Iterator[str]: ...

    def __next__(self) -> str: ...

    def state_dict(self) -> dict[str, Any]:
        """The position: plain numbers, strings and dicts. The next document after loading it is the next one now."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position of the same stream. Raises ValueError for another stream's, epoch's or order's."""


@runtime_checkable
class StreamedDocuments(Protocol):
    """Text that can only be read in sequence.

    Attributes:
        name, fingerprint: as for `Documents`.
        num_shards: parts that can be read at the same time without reading anything twice.
    """

    name: str
    fingerprint: str
    num_shards: int

    def open(self, stream: int, num_streams: int, epoch: int, *, seed: int, shuffle: bool) -> DocumentStream:
        """Part `stream` of `num_streams`: all parts together hold each document once, in every epoch."""


# ---- for those that implement them


def locate(i: int, ends: Sequence[int]) -> tuple[int, int]:
    """The part that document i lies in and its place there, given the documents up to the end of each part.

    Raises:
        IndexError: there is no document i.
    """
    require_index(i, ends[-1])
    part = bisect.bisect_right(ends, i)
    return part, i - (ends[part - 1] if part else 0)


def require_index(i: int, length: int) -> None:
    """Raise IndexError for a document outside 0..length-1: a negative number doesn't count from the end."""
    if not 0 <= i < length:
        raise IndexError(f"document {i} of {length}")


def require_text(value: object, field: str, where: str) -> str:
    """The value of a row's field. Raises BadRow unless it's a text that UTF-8 can hold."""
    if not isinstance(value, str):
        raise BadRow(where, f"{field!r} is {'null' if value is None else type(value).__name__}, not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(where, f"{field!r} can't be written as UTF-8: {error}") from None
    return value
