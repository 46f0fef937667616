"""Signals that ask a run to save and end: SIGTERM, and SIGUSR1, which schedulers can send some time before."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType

from titan.observability.logging import logger

REQUEUE_STATUS = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, start the command again
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_REQUEUE_MARK = "requeue"

# Signals this soon after the first are the same request: schedulers signal every process of a job, and launchers among
# them pass it on.
_SAME_REQUEST_SECONDS = 5.0


class StopSignals:
    """A context in which the first of these signals is noted, and one that comes seconds later ends the process.

    A thread takes them from a pipe that the interpreter's own handler writes to. So they count at once, also while the
    main thread is deep in a collective, where Python would call no handler of ours.

    Args:
        enabled: False leaves signals to do what they do to any process.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._received = threading.Event()
        self._active = False

    @property
    def received(self) -> bool:
        """Whether this process was asked to end. The job ends when any rank was, so ask all: `agree_on_step`."""
        return self._received.is_set()

    def __enter__(self) -> StopSignals:
        if self._enabled:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._before = {number: signal.signal(number, _noted_elsewhere) for number in STOP_SIGNALS}
            for number in STOP_SIGNALS:
                signal.siginterrupt(number, False)  # no read or write fails for it, in a library of whatever language
            self._pipe_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=self._forget)
            self._thread = threading.Thread(target=self._listen, name="titan-signals", daemon=True)
            self._thread.start()
            self._active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._active:
            return
        self._active = False
        signal.set_wakeup_fd(self._pipe_before)
        # A launcher that sees one rank gone sends a signal to the others. It mustn't change how those end.
        ending = isinstance(error, SystemExit) and error.code == REQUEUE_STATUS
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if ending else handler)
        os.close(self._writer)  # the thread reads the end of the pipe
        self._thread.join()
        os.close(self._reader)

    def _listen(self) -> None:
        first = 0.0
        while byte := os.read(self._reader, 1):
            if byte[0] not in STOP_SIGNALS:
                continue
            name = signal.Signals(byte[0]).name
            if not self.received:
                first = time.monotonic()
                logger.info(f"{name}: the run ends as soon as all ranks know; a second signal ends it at once")
                self._received.set()
            elif time.monotonic() - first > _SAME_REQUEST_SECONDS:
                logger.warning(f"{name} again: ending at once")
                os._exit(128 + byte[0])

    def _forget(self) -> None:
        """In a forked child, which isn't the run: signals end it."""
        if self._active:
            self._active = False
            signal.set_wakeup_fd(-1)
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)


def _noted_elsewhere(number: int, frame: FrameType | None) -> None:
    """Python writes a signal to the pipe only when the signal has a handler."""


def mark_requeue(dump_folder: Path, step: int) -> None:
    """Leave the file that says what REQUEUE_STATUS does, for scripts behind a launcher that has a status of its own."""
    dump_folder.mkdir(parents=True, exist_ok=True)
    (dump_folder / _REQUEUE_MARK).write_text(f"asked to end after step {step}\n", encoding="utf-8")


def clear_requeue(dump_folder: Path) -> None:
    """Take the file of an earlier end away: this run may end otherwise."""
    (dump_folder / _REQUEUE_MARK).unlink(missing_ok=True)
