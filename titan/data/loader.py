"""Who reads what: the global batch's rows, drawn from logical streams that no layout changes.

    documents ──keyed permutation per epoch──▶ N logical streams ──encode, pack──▶ windows ──▶ rows of the global batch
    token files ──keyed permutation of the windows' numbers per epoch──▶ one logical stream ──▶ rows of the global batch
    mixtures: both ways for each source, which gives the rows that mixture.py says

N is fixed at the run's first start and divides the global batch G: stream k gives rows k·G/N … (k+1)·G/N − 1 of every
step. A rank computes the rows that are its own, reading the streams those rows come from; data parallel degree,
accumulation and worker processes decide who computes a row, never which text it is. The saved position is one
(document, token) pair for each stream, (document, window) with best-fit packing, of token files one window number, so a
run goes on exactly on any number of ranks that divides G.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titan.config.errors import UserError
from titan.config.job_config import Training
from titan.data.background import Prefetcher, Worker
from titan.data.best_fit import BestFitStream
from titan.data.documents import Documents
from titan.data.microbatch import Microbatch, lay_out
from titan.data.mixed_windows import MixedStream
from titan.data.mixture import Mixture, Schedule
from titan.data.packing import PackedStream, State, Window, WindowStream
from titan.data.readers import BadRowPolicy, open_reader
from titan.data.shuffle import derive_key
from titan.data.sources import PlainSource, Source
from titan.data.token_files import TokenFiles
from titan.data.token_windows import TokenWindows
from titan.data.tokenizer import Tokenizer, document_tokens

_DOCUMENTS_PER_STREAM = 8  # with fewer, the streams' ends of an epoch drift too far apart


class _Step(NamedTuple):
    microbatches: list[Microbatch]
    positions: dict[int, State]  # of this rank's streams, after the step


class _Made(NamedTuple):
    """What a part has made of a step: windows of its rows, and the positions after it of their streams."""

    windows: list[Window]
    positions: dict[int, State]


class _Part:
    """Some of a rank's rows, step after step; what one process makes.

    Args:
        rows: of the global batch.
        streams: those that the rows come from.
        rows_per_stream: what each stream gives to a step.
    """

    def __init__(self, rows: range, streams: dict[int, WindowStream], rows_per_stream: int) -> None:
        self.rows = rows
        self.streams = streams
        self._rows_per_stream = rows_per_stream

    def __iter__(self) -> Iterator[_Made]:
        while True:
            windows: list[Window] = []
            for number, stream in self.streams.items():
                first, count = number * self._rows_per_stream, self._rows_per_stream
                wanted = range(max(self.rows.start - first, 0), min(self.rows.stop - first, count))
                taken = stream.take(count, wanted)
                if taken is None:
                    return
                windows += taken
            positions = {number: stream.state_dict() for number, stream in self.streams.items()}
            yield _Made(windows, positions)


def number_of_streams(source: Source, global_batch: int, *, infinite: bool) -> int:
    """The most streams that the data can feed evenly: a divisor of the global batch.

    Finite data is one stream: it ends at one point, and no window before it is left out. So are token files, of which
    every rank reads the windows that it needs. In a mixture the source that can feed the fewest decides.
    """
    if isinstance(source, Mixture):
        text = [each for each in source.sources if not each.by_number]
        return min(
            (number_of_streams(each.source, global_batch, infinite=each.text.infinite) for each in text), default=1
        )
    if isinstance(source, TokenFiles) or not infinite:
        return 1
    most = len(source) // _DOCUMENTS_PER_STREAM if isinstance(source, Documents) else source.num_shards
    return max(n for n in range(1, global_batch + 1) if global_batch % n == 0 and n <= max(1, most))


class DataLoader:
    """Steps of one rank. Ranks that differ only in tp, cp or pp make the same ones."""

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        settings: Training,
        *,
        seed: int,
        global_batch: int,
        batch_rank: int,
        batch_degree: int,
        group: dist.ProcessGroup,
        document_mask: bool = False,
        pin_for: torch.device | None = None,
    ) -> None:
        """
        Args:
            global_batch: rows of a step over all ranks; a multiple of local_batch_size · batch_degree.
            batch_rank, batch_degree: this rank's place among those that read different rows (ParallelDims.batch).
            group: those ranks.
            document_mask: keep documents apart (see `lay_out`).
            pin_for: the device for copies to which the batches are pinned; None to leave them as they are.
        """
        self._source = source
        self._tokenizer = tokenizer
        self._settings = settings
        self._seed = seed
        self._global_batch = global_batch
        self._group = group
        self._document_mask = document_mask
        self._pin_for = pin_for
        rows = global_batch // batch_degree
        self._rows = range(batch_rank * rows, (batch_rank + 1) * rows)
        self._bad_rows = BadRowPolicy(settings.bad_rows)
        self._prefetcher: Prefetcher[_Step] | None = None
        self._workers: list[Worker[_Made]] = []
        self._open_streams(number_of_streams(source, global_batch, infinite=settings.infinite))

    def _open_streams(self, count: int) -> None:
        """Make the parts, one for each worker process, or for this one."""
        self._num_streams = count
        per_stream = self._global_batch // count
        self._parts = []
        for rows in self._split_rows(per_stream):
            numbers = range(rows.start // per_stream, (rows.stop - 1) // per_stream + 1)
            streams = dict(zip(numbers, self._open_some(numbers, count), strict=True))
            self._parts.append(_Part(rows, streams, per_stream))
        self._positions = {
            number: stream.state_dict() for part in self._parts for number, stream in part.streams.items()
        }
        self._before_step = self._positions

    def _open_some(self, numbers: range, count: int) -> Iterator[WindowStream]:
        """These of `count` streams, for one process."""
        source, settings = self._source, self._settings
        if not isinstance(source, Mixture):
            yield from (self._open_stream(source, settings, number, count, self._seed) for number in numbers)
            return
        schedule = Schedule(source, self._global_batch, settings.seq_len)
        for number in numbers:
            streams = []
            for name, text, of_text, _ in source.sources:
                seed = derive_key(self._seed, "source", name)
                streams.append(self._open_stream(of_text, text, number, count, seed, name))
            yield MixedStream(schedule, streams, number * self._global_batch // count)

    def _open_stream(
        self, source: PlainSource, settings: Training, number: int, count: int, seed: int, name: str | None = None
    ) -> WindowStream:
        """Stream `number` of `count` of one source. Of a mixture it has a name."""
        if isinstance(source, TokenFiles):
            return TokenWindows(
                source,
                settings.seq_len,
                shuffle=settings.shuffle,
                infinite=settings.infinite,
                seed=seed,
                name=name or source.name,
                find_documents=self._document_mask,
            )
        reader = open_reader(source, settings, self._bad_rows, number, count, seed, name)
        encode = partial(document_tokens, self._tokenizer)
        if settings.packing == "best_fit":
            key = derive_key(seed, "windows of a block") if settings.shuffle else None
            return BestFitStream(reader, encode, settings.seq_len, key)
        return PackedStream(reader, encode, settings.seq_len)

    def _split_rows(self, rows_per_stream: int) -> list[range]:
        """This rank's rows in as many runs as there are workers. Runs share no stream that has to read all its rows."""
        rows = self._rows
        cuts = [row for row in rows[1:] if self._by_number or row % rows_per_stream == 0]
        pieces = list(pairwise([rows.start, *cuts, rows.stop]))
        count = min(max(1, self._settings.dataloader.num_workers), len(pieces))
        ends = [pieces[(i + 1) * len(pieces) // count - 1][1] for i in range(count)]
        return [range(start, stop) for start, stop in pairwise([rows.start, *ends])]

    def next_step(self) -> list[Microbatch] | None:
        """This rank's microbatches of the next step; None when its data has ended."""
        if self._prefetcher is None:
            if self._settings.dataloader.num_workers:
                self._workers = [Worker(part, f"data worker {i}") for i, part in enumerate(self._parts)]
            made = [iter(part) for part in self._workers or self._parts]
            self._prefetcher = Prefetcher(self._make_steps(made), self._settings.dataloader.prefetch_factor)
        self._before_step = self._positions
        step = self._prefetcher.next()
        if step is None:
            return None
        self._positions = step.positions
        return step.microbatches

    def put_back(self) -> None:
        """Count the step that was handed out last as unread in `state_dict`: nobody trained on it, nor will now."""
        self._positions = self._before_step

    def _make_steps(self, parts: list[Iterator[_Made]]) -> Iterator[_Step]:
        if self._pin_for is not None:  # torch pins for the thread's current device, in a new thread the first one
            torch.accelerator.set_device_index(self._pin_for.index)
        while True:
            made: list[_Made] = []
            for part in parts:
                if (rows_of_part := next(part, None)) is None:
                    return
                made.append(rows_of_part)
            windows = [window for part in made for window in part.windows]
            rows = lay_out(windows, self._settings.seq_len, document_mask=self._document_mask)
            batches = rows.split(self._settings.local_batch_size)
            if self._pin_for is not None:
                batches = [batch.pinned() for batch in batches]
            yield _Step(batches, {number: state for part in made for number, state in part.positions.items()})

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
        for part in self._parts:
            for number, stream in part.streams.items():
                stream.load_state_dict(state["streams"][number])
                self._positions[number] = state["streams"][number]

    @property
    def _by_number(self) -> bool:
        """Each row can be read by itself."""
        return self._source.by_number if isinstance(self._source, Mixture) else isinstance(self._source, TokenFiles)

    def _identity(self) -> dict[str, Any]:
        identity: dict[str, Any] = {
            "tokenizer": self._tokenizer.fingerprint,
            "shuffle": self._settings.shuffle,
            "seed": self._seed,
        }
        if isinstance(self._source, Mixture):
            identity |= self._source.identity()
            sources = [each.source for each in self._source.sources]
        else:
            identity |= {"dataset": self._source.name, "documents": self._source.fingerprint}
            sources = [self._source]
        packed = self._settings.packing == "best_fit"
        if packed:
            identity["packing"] = "best_fit"
        if packed or any(isinstance(source, TokenFiles) for source in sources):  # the position counts windows
            identity["seq_len"] = self._settings.seq_len
        return identity

    def close(self) -> None:
        """Stop reading ahead, and end the worker processes."""
        if self._prefetcher is not None:
            self._prefetcher.stop()
        for worker in self._workers:
            worker.close()
        if self._prefetcher is not None:
            self._prefetcher.join()  # it may be in the middle of a document, which is left unread
        self._prefetcher, self._workers = None, []


def _differences(saved: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    changed = [key for key in sorted(saved.keys() | ours.keys()) if saved.get(key) != ours.get(key)]
    return [f"{key}: {saved.get(key)!r} then, {ours.get(key)!r} now" for key in changed]
