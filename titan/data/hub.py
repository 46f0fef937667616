"""Datasets of the Hugging Face hub, read as they arrive: shard by shard, with a position that can be saved."""

import hashlib
import itertools
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from titan.config.errors import UserError
from titan.config.job_config import Training
from titan.data.documents import DocumentStream, StreamedDocuments, require_text
from titan.data.shuffle import Permutation, derive_key
from titan.data.tables import require_column, root_cause
from titan.observability.logging import logger

_BLOCK = 1024  # documents that a stream shuffles at a time, and reads anew at most when a run resumes

# Waits before a block is tried again when the network fails, a minute in all: less than the time after which the other
# ranks give up waiting for this one (comm.train_timeout_seconds).
_RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_NETWORK_LIBRARIES = {"aiohttp", "httpcore", "httpx", "huggingface_hub", "requests", "urllib"}  # less versions


def open_c4(training: Training) -> StreamedDocuments:
    """C4 (Raffel et al., 2020), the English subset unless another is named. Raises UserError as `open_hub`."""
    default = "en" if training.dataset_path is None else None
    return open_hub(training, "allenai/c4", training.dataset_subset or default)


def open_hub(training: Training, dataset: str, subset: str | None) -> StreamedDocuments:
    """A dataset of the Hugging Face hub, or a copy of one at dataset_path, read as a stream.

    Raises:
        UserError: it can't be opened, or lacks the text column.
    """
    import datasets

    place = str(Path(training.dataset_path).expanduser()) if training.dataset_path else dataset
    try:
        source = datasets.load_dataset(place, name=subset, split=training.dataset_split, streaming=True)
    except Exception as error:  # the network, the hub, an unknown id, subset or split: many libraries' errors
        raise UserError(
            f"training.dataset = {dataset!r} (from {place}, subset {subset}, split {training.dataset_split!r}) can't "
            f"be opened: {root_cause(error)}. When offline, set training.dataset_path to a local copy, or use "
            "training.dataset = text, json, parquet or python_stdlib."
        ) from error
    if source.column_names is not None:  # unknown for some formats until a row is read
        require_column(dataset, source.column_names, training.text_field)
        source = source.select_columns([training.text_field])
    identity = (dataset, subset, training.dataset_split, training.text_field, source.num_shards)
    return _HubDocuments(source, training.text_field, dataset, identity)


class _HubDocuments:
    def __init__(self, source: Any, field: str, name: str, identity: tuple[object, ...]) -> None:
        self._source = source
        self._field = field
        self.name = name
        self.num_shards: int = source.num_shards
        self.fingerprint = hashlib.sha256(repr(identity).encode()).hexdigest()

    def open(self, stream: int, num_streams: int, epoch: int, *, seed: int, shuffle: bool) -> DocumentStream:
        """See `StreamedDocuments`. With more streams than shards, the streams of a shard take its rows in turn."""
        if not 0 <= stream < num_streams:
            raise ValueError(f"stream {stream} of {num_streams}")
        identity = {"stream": stream, "num_streams": num_streams, "epoch": epoch, "seed": seed, "shuffle": shuffle}
        return _HubStream(self, identity)

    def shard(self, shard: int, part: int, parts: int) -> Any:
        """A fresh `datasets.IterableDataset` of one shard's rows part, part + parts, part + 2 * parts …"""
        from datasets.distributed import split_dataset_by_node

        rows = self._source.shard(self.num_shards, shard)
        return rows if parts == 1 else split_dataset_by_node(rows, rank=part, world_size=parts)

    def text_of(self, row: dict[str, Any], where: str) -> str:
        if self._field not in row:  # the same in every row, so a mistake in the config
            require_column(self.name, row, self._field)
        return require_text(row[self._field], self._field, where)


class _HubStream:
    """One pass over a stream's shards, in blocks whose documents are shuffled.

    The position is that of datasets at the start of the block, and how many of the block's documents are done: to
    resume reads the block again. (datasets' own shuffle buffer doesn't resume exactly, and its epochs reorder shards
    whether or not the run shuffles; its epoch stays 0 here.)
    """

    _block: list[tuple[str, dict[str, Any]]] | None  # names and rows, in the order in which they are given out
    _reading: tuple[Any, Iterator[dict[str, Any]]] | None  # the shard's dataset and its iterator

    def __init__(self, documents: _HubDocuments, identity: dict[str, int]) -> None:
        self._documents = documents
        self._identity = identity
        stream, num_streams, shards = identity["stream"], identity["num_streams"], documents.num_shards
        self._shards: Sequence[int] = range(stream % shards, shards, num_streams)
        self._part, self._parts = stream // shards, len(range(stream % shards, num_streams, shards))
        if identity["shuffle"]:
            self._shards = [self._shards[i] for i in self._order("shards", len(self._shards))]
        self._go(shard=0, row=0, source=None, done=0)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while self._shard < len(self._shards):
            if self._block is None:
                self._block = self._read_block()
            if self._done < len(self._block):
                where, row = self._block[self._done]
                self._done += 1
                return self._documents.text_of(row, where)
            self._pass_block(len(self._block))
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        place = {"shard": self._shard, "row": self._row, "source": self._block_start, "done": self._done}
        return {**self._identity, **place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if {key: state.get(key) for key in self._identity} != self._identity:
            raise ValueError(f"the position {state} isn't one of the stream {self._identity}")
        self._go(state["shard"], state["row"], state["source"], state["done"])

    def _go(self, shard: int, row: int, source: dict[str, Any] | None, done: int) -> None:
        """Go to a place, reading nothing yet.

        Args:
            shard: place of the shard among the stream's.
            row, source: the stream's row of the shard at which the block begins, and datasets' state there.
            done: how many of the block's documents have been given out.
        """
        self._shard, self._row, self._block_start, self._done = shard, row, source, done
        self._block = None
        self._reading = None

    def _pass_block(self, size: int) -> None:
        """Go to the block behind one that is done; a short block is its shard's last."""
        if size < _BLOCK or self._reading is None:
            self._go(self._shard + 1, row=0, source=None, done=0)
        else:
            self._row, self._done, self._block = self._row + size, 0, None
            self._block_start = self._reading[0].state_dict()

    def _read_block(self) -> list[tuple[str, dict[str, Any]]]:
        """The next rows of the shard with their names, in the order in which they are given out."""
        shard = self._shards[self._shard]
        rows = self._read_rows(shard)
        first = self._part + self._row * self._parts
        names = (f"{self._documents.name} shard {shard} row {first + i * self._parts}" for i in range(len(rows)))
        block = list(zip(names, rows, strict=True))
        if self._identity["shuffle"]:
            block = [block[i] for i in self._order("block", len(block), shard, self._row)]
        return block

    def _read_rows(self, shard: int) -> list[dict[str, Any]]:
        """The block's rows. What a failing network left of it is forgotten, and all of it read again."""
        waits = iter(_RETRY_SECONDS)
        while True:
            try:
                if self._reading is None:
                    dataset = self._documents.shard(shard, self._part, self._parts)
                    if self._block_start is not None:
                        dataset.load_state_dict(self._block_start)
                    self._reading = dataset, iter(dataset)
                return list(itertools.islice(self._reading[1], _BLOCK))
            except Exception as error:  # the network, a damaged file: datasets can't go on behind it
                self._reading = None
                where = f"{self._documents.name}: shard {shard} can't be read after row {self._row}"
                wait = next(waits, None) if _is_of_the_network(error) else None
                if wait is None:
                    raise UserError(f"{where}: {root_cause(error)}") from error
                wait *= random.SystemRandom().uniform(0.5, 1.0)  # ranks that fail together shouldn't come back together
                logger.warning(f"{where}: {root_cause(error)}; tried again in {wait:.1f} s")
            time.sleep(wait)

    def _order(self, purpose: str, count: int, *place: int) -> Iterable[int]:
        key = derive_key(
            self._identity["seed"], "hub", purpose, self._identity["epoch"], self._identity["stream"], *place
        )
        return Permutation(count, key) if count else ()


def _is_of_the_network(error: BaseException) -> bool:
    """Whether trying again may help: a connection failed, or a server was busy; not what it refuses for good."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    for cause in causes:
        status = getattr(getattr(cause, "response", None), "status_code", None) or getattr(cause, "status", None)
        if isinstance(status, int) and 400 <= status < 500 and status not in (408, 429):
            return False
    libraries = {type(cause).__module__.partition(".")[0].rstrip("0123456789") for cause in causes}
    timed_out = any(isinstance(cause, ConnectionError | TimeoutError) for cause in causes)
    return timed_out or not libraries.isdisjoint(_NETWORK_LIBRARIES)
