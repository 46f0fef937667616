"""Who reads what: the global batch's rows, drawn from logical streams that no layout changes.

    documents ──keyed permutation per epoch──▶ N logical streams ──encode, pack──▶ windows ──▶ rows of the global batch

N is fixed at the run's first start and divides the global batch G: stream k gives rows k·G/N … (k+1)·G/N − 1 of every
step. A rank computes the rows that are its own, reading the streams those rows come from; data parallel degree and
accumulation decide who computes a row, never which text it is. The saved position is one (document, token) pair for
each stream, so a run goes on exactly on any number of ranks that divides G.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from titan.config.errors import UserError
from titan.config.job_config import Training
from titan.data.documents import Documents, StreamedDocuments
from titan.data.packing import PackedStream, State
from titan.data.readers import BadRowPolicy, open_reader
from titan.data.tokenizer import Tokenizer, document_tokens

_DOCUMENTS_PER_STREAM = 8  # with fewer, the streams' ends of an epoch drift too far apart


class Microbatch(NamedTuple):
    """Rows that one forward pass takes: `labels[b, s]` is the token after `tokens[b, s]`. All `[B, S]`, int64.

    Attributes:
        positions: of the tokens; None where they are 0 … S − 1.
        documents: the number of each token's document; None when a token sees all that came before it.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None = None
    documents: torch.Tensor | None = None


class _Step(NamedTuple):
    microbatches: list[Microbatch]
    positions: dict[int, State]  # of this rank's streams, after the step


def number_of_streams(source: Documents | StreamedDocuments, global_batch: int, *, infinite: bool) -> int:
    """The most streams that the data can feed evenly: a divisor of the global batch.

    Finite data is one stream: it ends at one point, and no window before it is left out.
    """
    if not infinite:
        return 1
    most = len(source) // _DOCUMENTS_PER_STREAM if isinstance(source, Documents) else source.num_shards
    return max(n for n in range(1, global_batch + 1) if global_batch % n == 0 and n <= max(1, most))


class DataLoader:
    """Steps of one rank. Ranks that differ only in tp, cp or pp make the same ones."""

    def __init__(
        self,
        source: Documents | StreamedDocuments,
        tokenizer: Tokenizer,
        settings: Training,
        *,
        seed: int,
        global_batch: int,
        batch_rank: int,
        batch_degree: int,
        group: dist.ProcessGroup,
    ) -> None:
        """
        Args:
            global_batch: rows of a step over all ranks; a multiple of local_batch_size · batch_degree.
            batch_rank, batch_degree: this rank's place among those that read different rows (ParallelDims.batch).
            group: those ranks.
        """
        self._source = source
        self._tokenizer = tokenizer
        self._settings = settings
        self._seed = seed
        self._global_batch = global_batch
        self._group = group
        rows = global_batch // batch_degree
        self._rows = range(batch_rank * rows, (batch_rank + 1) * rows)
        self._bad_rows = BadRowPolicy(settings.bad_rows)
        self._prefetcher: _Prefetcher | None = None
        self._open_streams(number_of_streams(source, global_batch, infinite=settings.infinite))

    def _open_streams(self, count: int) -> None:
        self._num_streams = count
        self._rows_per_stream = self._global_batch // count
        first, last = self._rows[0] // self._rows_per_stream, self._rows[-1] // self._rows_per_stream
        self._streams = {
            stream: PackedStream(
                open_reader(self._source, self._settings, self._bad_rows, stream, count, self._seed),
                lambda text: document_tokens(self._tokenizer, text),
                self._settings.seq_len,
            )
            for stream in range(first, last + 1)
        }
        self._positions = {number: stream.state_dict() for number, stream in self._streams.items()}

    def next_step(self) -> list[Microbatch] | None:
        """This rank's microbatches of the next step; None when its data has ended."""
        if self._prefetcher is None:
            self._prefetcher = _Prefetcher(self._make_steps(), self._settings.dataloader.prefetch_factor)
        step = self._prefetcher.next()
        if step is None:
            return None
        self._positions = step.positions
        return step.microbatches

    def _make_steps(self) -> Iterator[_Step]:
        size = self._settings.local_batch_size
        while True:
            windows = []
            for number, stream in self._streams.items():
                for row in range(number * self._rows_per_stream, (number + 1) * self._rows_per_stream):
                    window = stream.next_window()
                    if window is None:
                        return
                    if row in self._rows:
                        windows.append(window)
            rows = torch.from_numpy(np.stack(windows).astype(np.int64))
            batches = [Microbatch(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in rows.split(size)]
            yield _Step(batches, {number: stream.state_dict() for number, stream in self._streams.items()})

    def state_dict(self) -> State:
        """The position after the last step that was handed out, of all streams. Collective over the batch ranks."""
        parts: list[dict[int, State]] = [{} for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(parts, self._positions, group=self._group)
        positions: dict[int, State] = {}
        for part in parts:
            positions |= part
        return {
            "identity": self._identity(),
            "streams": [positions[stream] for stream in range(self._num_streams)],
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where `state_dict` was taken, whatever the number of ranks was then.

        Raises:
            UserError: the data, its order or the tokenizer isn't the one that the position belongs to.
        """
        if differences := _differences(state["identity"], self._identity()):
            raise UserError(
                "the checkpoint's data position belongs to other data:\n"
                + "\n".join(f"  {line}" for line in differences)
            )
        count = len(state["streams"])
        if self._global_batch % count:
            raise UserError(
                f"the run has {count} data streams since its first start; the global batch must be a multiple of it, "
                f"it is {self._global_batch}, nearest: {max(1, self._global_batch // count) * count}"
            )
        self.close()
        self._open_streams(count)
        for number, stream in self._streams.items():
            stream.load_state_dict(state["streams"][number])
            self._positions[number] = state["streams"][number]

    def _identity(self) -> dict[str, Any]:
        return {
            "dataset": self._source.name,
            "documents": self._source.fingerprint,
            "tokenizer": self._tokenizer.fingerprint,
            "shuffle": self._settings.shuffle,
            "seed": self._seed,
        }

    def close(self) -> None:
        """Stop reading ahead."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None


def _differences(saved: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    changed = [key for key in sorted(saved.keys() | ours.keys()) if saved.get(key) != ours.get(key)]
    return [f"{key}: {saved.get(key)!r} then, {ours.get(key)!r} now" for key in changed]


class _Prefetcher:
    """Runs an iterator of steps in a thread, a few steps ahead. Errors come out where the step would have."""

    def __init__(self, steps: Iterator[_Step], depth: int) -> None:
        self._steps = steps
        self._queue: queue.Queue[_Step | BaseException | None] = queue.Queue(maxsize=max(1, depth))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="titan-data", daemon=True) if depth else None
        self._ended = False
        if self._thread:
            self._thread.start()

    def next(self) -> _Step | None:
        """The next step, or None after the last."""
        if self._ended:
            return None
        item = self._queue.get() if self._thread else next(self._steps, None)
        if isinstance(item, BaseException):
            self._ended = True
            raise item
        self._ended = item is None
        return item

    def _fill(self) -> None:
        try:
            for step in self._steps:
                if not self._put(step):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: _Step | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def close(self) -> None:
        """Stop the thread; it may be in the middle of a document, which is left unread."""
        self._stopped.set()
        if self._thread:
            self._thread.join()
