"""Documents of one logical stream, in order, over epochs, with an exact position."""

from __future__ import annotations

from abc import ABC, abstractmethod

from titan.config.errors import UserError
from titan.config.job_config import Training
from titan.data.documents import BadRow, Documents, DocumentStream, StreamedDocuments
from titan.data.packing import Reader, State
from titan.data.shuffle import Permutation, derive_key
from titan.observability.logging import logger

_NAMED_BAD_ROWS = 20


class BadRowPolicy:
    """What happens to a row that can't be read: named and left out, or the end of the run."""

    def __init__(self, policy: str) -> None:
        self._stop = policy == "stop"
        self._count = 0

    def __call__(self, row: BadRow) -> None:
        """
        Raises:
            UserError: the policy is to stop.
        """
        if self._stop:
            raise UserError(f"{row.where}: {row.reason}. training.bad_rows = 'skip' would leave out such rows") from row
        self._count += 1
        if self._count <= _NAMED_BAD_ROWS:
            logger.warning(f"left out {row.where}: {row.reason}")
        if self._count == _NAMED_BAD_ROWS:
            logger.warning(f"{_NAMED_BAD_ROWS} unreadable rows were left out; further ones aren't named")


class EpochReader(ABC):
    """Usable documents of one stream, epoch after epoch; subclasses say what one epoch is.

    Args:
        name: of the dataset, for messages.
        stream, streams: which logical stream of how many.
    """

    def __init__(self, name: str, settings: Training, bad_rows: BadRowPolicy, stream: int, streams: int, seed: int):
        self._name = name
        self._settings = settings
        self._bad_rows = bad_rows
        self._stream = stream
        self._streams = streams
        self._seed = seed
        self._usable = False
        self._begin_epoch(0)

    def __next__(self) -> str:
        while True:
            try:
                text = self._next_of_epoch()
            except BadRow as row:
                self._bad_rows(row)
                continue
            if text is None:
                self._end_epoch()
            elif text:
                self._usable = True
                return text

    def _end_epoch(self) -> None:
        if not self._settings.infinite:
            raise StopIteration
        which = f"data stream {self._stream} of {self._streams}"
        if not self._usable:
            raise UserError(f"dataset {self._name!r} has no usable document for {which}: all are empty or unreadable")
        self._usable = False
        self._begin_epoch(self._epoch + 1)
        logger.info(f"dataset {self._name}, {which}, begins epoch {self._epoch}")

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    @abstractmethod
    def _next_of_epoch(self) -> str | None:
        """The next document of the epoch, None behind its last one. Raises BadRow."""

    @abstractmethod
    def state_dict(self) -> State: ...

    @abstractmethod
    def load_state_dict(self, state: State) -> None: ...


class IndexedReader(EpochReader):
    """Every N-th document of each epoch's order: stream k of N takes places k, k + N, k + 2N …

    The order is a keyed permutation drawn from (seed, epoch), so two numbers are all that must be remembered.
    """

    def __init__(
        self,
        documents: Documents,
        settings: Training,
        bad_rows: BadRowPolicy,
        stream: int,
        streams: int,
        seed: int,
        name: str | None = None,
    ) -> None:
        self._documents = documents
        super().__init__(name or documents.name, settings, bad_rows, stream, streams, seed)

    def _begin_epoch(self, epoch: int) -> None:
        super()._begin_epoch(epoch)
        self._index = 0
        self._order: Permutation | range = range(len(self._documents))
        if self._settings.shuffle:
            self._order = Permutation(len(self._documents), derive_key(self._seed, "documents", epoch))

    def _next_of_epoch(self) -> str | None:
        place = self._stream + self._index * self._streams
        if place >= len(self._documents):
            return None
        self._index += 1
        return self._documents[self._order[place]]

    def state_dict(self) -> State:
        return {"epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: State) -> None:
        self._begin_epoch(state["epoch"])
        self._index = state["index"]
        self._usable = self._index > 0


class StreamedReader(EpochReader):
    """One part of a dataset that can only be read in sequence; its position is the source's own."""

    def __init__(
        self,
        source: StreamedDocuments,
        settings: Training,
        bad_rows: BadRowPolicy,
        stream: int,
        streams: int,
        seed: int,
        name: str | None = None,
    ) -> None:
        self._source = source
        super().__init__(name or source.name, settings, bad_rows, stream, streams, seed)

    def _begin_epoch(self, epoch: int) -> None:
        super()._begin_epoch(epoch)
        self._documents: DocumentStream = self._source.open(
            self._stream, self._streams, epoch, seed=self._seed, shuffle=self._settings.shuffle
        )

    def _next_of_epoch(self) -> str | None:
        return next(self._documents, None)

    def state_dict(self) -> State:
        return {"epoch": self._epoch, "source": self._documents.state_dict(), "usable": self._usable}

    def load_state_dict(self, state: State) -> None:
        self._begin_epoch(state["epoch"])
        self._documents.load_state_dict(state["source"])
        self._usable = state["usable"]


def open_reader(
    source: Documents | StreamedDocuments,
    settings: Training,
    bad_rows: BadRowPolicy,
    stream: int,
    streams: int,
    seed: int,
    name: str | None = None,
) -> Reader:
    """The reader that fits the source, which its messages call `name`."""
    if isinstance(source, StreamedDocuments):
        return StreamedReader(source, settings, bad_rows, stream, streams, seed, name)
    return IndexedReader(source, settings, bad_rows, stream, streams, seed, name)
