"""Items made ahead of their use: in a thread, or in processes of their own, whose speed is all that they change."""

from __future__ import annotations

import atexit
import gc
import logging
import multiprocessing as mp
import os
import queue
import signal
import threading
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Generic, NamedTuple, TypeVar

from titan.config.errors import UserError
from titan.observability.logging import logger

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Runs an iterator in a thread, a few items ahead. Errors come out where the item would have.

    Args:
        depth: how many items; with 0 there is no thread.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self._queue: queue.Queue[T | BaseException | None] = queue.Queue(maxsize=max(1, depth))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="titan-data", daemon=True) if depth else None
        self._ended = False
        if self._thread:
            self._thread.start()

    def next(self) -> T | None:
        """The next item, or None after the last."""
        if self._ended:
            return None
        item = self._queue.get() if self._thread else next(self._items, None)
        if isinstance(item, BaseException):
            self._ended = True
            raise item
        self._ended = item is None
        return item

    def _fill(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: T | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def stop(self) -> None:
        """Ask the thread to end after its item."""
        self._stopped.set()

    def join(self) -> None:
        """Wait for its end."""
        if self._thread:
            self._thread.join()


class _Message(NamedTuple):
    """What a worker sends: an item, its error, or neither at the end; and what it had to say meanwhile."""

    item: object
    error: str | None
    by_user: bool  # the error is a UserError, whose text is all there is to say
    records: list[tuple[int, str]]  # levels and texts for the log


class Worker(Generic[T]):
    """Runs an iterable in a forked process, as far ahead as a pipe holds.

    The process is forked because it then shares what its datasets hold in memory, such as where a billion lines begin.
    It uses neither torch nor the device, ignores Ctrl-C and SIGTERM, which are its parent's business, and ends with it.
    Fork several before any thread that this process starts by itself.
    """

    def __init__(self, items: Iterable[T], name: str) -> None:
        self._name = name
        context = mp.get_context("fork")
        self._connection, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(items, theirs), name=name, daemon=True)
        self._process.start()
        theirs.close()  # with this one open, the process's death would go unnoticed
        atexit.register(self.close)  # Python's own exit would send SIGTERM and wait

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """The next item.

        Raises:
            UserError: as the iterable raised it; or the process died.
            RuntimeError: the iterable raised another error; the text is the process's traceback.
        """
        try:
            message: _Message = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(timeout=5)
            raise UserError(
                f"{self._name} died (exit status {self._process.exitcode}). A status of -9 mostly means that the "
                "system was out of memory: lower training.dataloader.num_workers"
            ) from None
        for level, text in message.records:
            logger.log(level, text)
        if message.error is not None:
            raise (UserError if message.by_user else RuntimeError)(message.error)
        if message.item is None:
            raise StopIteration
        return message.item  # type: ignore[return-value]

    def close(self) -> None:
        """End the process, whatever it does; may be called twice."""
        atexit.unregister(self.close)
        self._process.kill()
        self._process.join()


def end_with_parent() -> None:
    """Let this process leave signals to its parent, and end as soon as that ends, however it does.

    Forked siblings hold the parent's end of each other's pipes, but for the youngest's: they end one by one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = mp.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(items: Iterable[object], connection: Connection) -> None:
    end_with_parent()
    gc.freeze()  # the parent's garbage isn't this process's to free, least of all what lies on a device
    log = _Records()
    logger.handlers[:] = [log]
    try:
        try:
            for item in items:
                connection.send(_Message(item, None, False, log.take()))
            last = _Message(None, None, False, log.take())
        except BrokenPipeError:
            raise
        except UserError as error:
            last = _Message(None, str(error), True, log.take())
        except BaseException:
            last = _Message(None, traceback.format_exc(), False, log.take())
        connection.send(last)
    except BrokenPipeError:  # the parent reads no more
        return


class _Records(logging.Handler):
    """Keeps what is logged until it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append((record.levelno, record.getMessage()))

    def take(self) -> list[tuple[int, str]]:
        """What was logged since the last call."""
        kept, self._kept = self._kept, []
        return kept
