"""Text to token files: tokenized by several processes, written in order, so that any number of them writes the same.

    dataset ── blocks of 128 documents ──▶ processes that encode ──▶ in the blocks' order ──▶ shards

A shard gets its name once it is whole and on the disk. It holds the dataset's position behind it: a run that was killed
goes on from its last shard.
"""

from __future__ import annotations

import multiprocessing as mp
import signal
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from titan.config.errors import UserError
from titan.data.background import end_with_parent
from titan.data.documents import BadRow, Documents, StreamedDocuments
from titan.data.readers import BadRowPolicy
from titan.data.token_shards import (
    DTYPES,
    INDEX_FILE,
    DamagedShard,
    ShardHeader,
    ShardWriter,
    read_shard_header,
    run_differences,
    shard_name,
    write_index,
)
from titan.data.tokenizer import Tokenizer, document_tokens
from titan.observability.logging import logger

_FORMAT = 1
_BLOCK = 128  # documents that a process encodes at a time; shards end between blocks


class _Block(NamedTuple):
    """Documents to encode, by their numbers or as texts, and the dataset's position behind them.

    Of rows between them that can't be read: the place and the reason.
    """

    documents: range | list[str]
    bad_rows: list[tuple[str, str]]
    position: dict[str, Any]


class _Encoded(NamedTuple):
    """A block's tokens `[T]`, its documents' lengths `[D]`, and of rows that can't be read the place and the reason."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    bad_rows: list[tuple[str, str]]


def prepare(
    source: Documents | StreamedDocuments,
    tokenizer: Tokenizer,
    output: Path,
    *,
    processes: int,
    shard_tokens: int,
    bad_rows: BadRowPolicy,
) -> list[ShardHeader]:
    """Write the tokens of a dataset, in its own order, as token files. What an earlier run finished is kept.

    In a folder that is finished already, every checksum is verified; from the first damaged shard on all is written
    anew.

    Args:
        output: the folder; made when missing.
        processes: that encode. With one, this process does.
        shard_tokens: a shard ends behind the first block with which it has as many.
        bad_rows: told of the rows that can't be read.

    Returns:
        The headers of all shards.

    Raises:
        UserError: the folder can't be made, or holds tokens of another dataset, tokenizer or size of shards; there are
            no documents; a process died; or a row can't be read and the policy is to stop.
    """
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    run = {
        "format": _FORMAT,
        "dataset": source.name,
        "documents": source.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "dtype": dtype,
        "shard_tokens": shard_tokens,
    }
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{output} can't be made a folder for token files: {error.strerror}") from error
    done = _finished_shards(output, run)
    blocks = _blocks(source, done[-1].position if done else None)
    encoded = _encode_all(_Encoder(source, tokenizer, DTYPES[dtype]), blocks, processes)
    progress = _Progress(source, done)
    shard = ShardWriter(output, run, len(done))
    try:
        for part, block in encoded:
            unreadable = block.bad_rows + part.bad_rows
            for where, reason in unreadable:
                bad_rows(BadRow(where, reason))
            shard.add(part.tokens, part.lengths, len(unreadable))
            progress.add(len(block.documents), len(part.tokens))
            if shard.tokens >= shard_tokens:
                done.append(shard.finish(block.position))
                shard = ShardWriter(output, run, len(done))
        if shard.tokens:
            done.append(shard.finish(block.position))
    finally:
        encoded.close()
        progress.close()
        shard.discard()
    if not done:
        raise UserError(f"dataset {source.name!r} has no usable document: all are empty or unreadable")
    write_index(output, run, done)
    return done


def _finished_shards(output: Path, run: dict[str, Any]) -> list[ShardHeader]:
    """The shards of earlier runs, up to the first that isn't whole; it and all behind it are removed."""
    index = output / INDEX_FILE
    found: list[ShardHeader] = []
    while (file := output / shard_name(len(found))).exists():
        try:
            header = read_shard_header(file, verify_checksum=index.exists())
        except DamagedShard as damage:
            logger.warning(f"{damage}: it and all behind it are written anew")
            break
        if difference := run_differences(header.run, run):
            raise UserError(
                f"{output} holds token files of another run: {file.name} has {difference}. Choose another --output, or "
                "remove it"
            )
        found.append(header)
    index.unlink(missing_ok=True)  # until all is whole again
    for file in output.glob("shard-*.tokens"):
        if file.name >= shard_name(len(found)):
            file.unlink()
    if found:
        logger.info(f"{output}: {len(found)} finished shard(s) are kept")
    return found


def _blocks(source: Documents | StreamedDocuments, position: dict[str, Any] | None) -> Iterator[_Block]:
    """The dataset in its own order, from a position on. Documents that have numbers are read where they are encoded."""
    if isinstance(source, Documents):
        for start in range(position["document"] if position else 0, len(source), _BLOCK):
            stop = min(start + _BLOCK, len(source))
            yield _Block(range(start, stop), [], {"document": stop})
        return
    stream = source.open(0, 1, 0, seed=0, shuffle=False)
    if position is not None:
        stream.load_state_dict(position)
    while True:
        texts: list[str] = []
        bad_rows: list[tuple[str, str]] = []
        ended = False
        while len(texts) + len(bad_rows) < _BLOCK and not ended:
            try:
                text = next(stream, None)
            except BadRow as row:
                bad_rows.append((row.where, row.reason))
                continue
            if text is None:
                ended = True
            else:
                texts.append(text)
        yield _Block(texts, bad_rows, stream.state_dict())
        if ended:
            return


class _Encoder:
    """Blocks to tokens."""

    def __init__(self, source: Documents | StreamedDocuments, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._dtype = dtype

    def __call__(self, documents: range | list[str]) -> _Encoded:
        bad_rows: list[tuple[str, str]] = []
        texts = documents if isinstance(documents, list) else self._read(documents, bad_rows)
        pieces = [document_tokens(self._tokenizer, text) for text in texts if text]
        lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
        tokens = np.concatenate([np.empty(0, np.int32), *pieces]).astype(self._dtype)
        return _Encoded(tokens, lengths[lengths > 0], bad_rows)

    def _read(self, numbers: range, bad_rows: list[tuple[str, str]]) -> Iterator[str]:
        assert isinstance(self._source, Documents)
        for number in numbers:
            try:
                yield self._source[number]
            except BadRow as row:
                bad_rows.append((row.where, row.reason))


_encoder: _Encoder  # of a process that encodes


def _start_process(encoder: _Encoder) -> None:
    global _encoder
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # how the pool ends the others when one has died
    _encoder = encoder


def _encode_here(documents: range | list[str]) -> _Encoded:
    return _encoder(documents)


def _encode_all(
    encoder: _Encoder, blocks: Iterator[_Block], processes: int
) -> Generator[tuple[_Encoded, _Block], None, None]:
    """The blocks and what they were encoded to, in their order, a few of them ahead."""
    if processes == 1:
        for block in blocks:
            yield encoder(block.documents), block
        return
    # Forked, so that they share what the dataset holds in memory; see background.Worker.
    pool = ProcessPoolExecutor(processes, mp.get_context("fork"), _start_process, (encoder,))
    waiting: deque[tuple[Future[_Encoded], _Block]] = deque()
    try:
        for block in blocks:
            waiting.append((pool.submit(_encode_here, block.documents), block))
            if len(waiting) > 4 * processes:
                future, first = waiting.popleft()
                yield future.result(), first
        for future, block in waiting:
            yield future.result(), block
    except BrokenProcessPool as error:
        raise UserError(
            "a process that encodes died, mostly for lack of memory. Run the same command again to go on, with fewer "
            "--processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class _Progress:
    """A bar on a terminal: documents, and tokens per second."""

    def __init__(self, source: Documents | StreamedDocuments, done: list[ShardHeader]) -> None:
        from tqdm import tqdm

        total = len(source) if isinstance(source, Documents) else None
        first = sum(shard.documents for shard in done)
        self._bar = tqdm(total=total, initial=first, unit=" documents", disable=None, dynamic_ncols=True)
        self._start = time.monotonic()
        self._tokens = 0

    def add(self, documents: int, tokens: int) -> None:
        self._tokens += tokens
        self._bar.update(documents)
        self._bar.set_postfix_str(f"{self._tokens / (time.monotonic() - self._start):,.0f} tokens/s", refresh=False)

    def close(self) -> None:
        self._bar.close()
