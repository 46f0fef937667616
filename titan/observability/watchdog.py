"""The watchdog: ends the job on all ranks when one of them hangs, dies or fails, and says which and why.

A thread of each process knows what the main thread is at and how long that may take. It acts when the time is over,
when a collective fails because a peer is gone, or when another rank calls. The ranks then exchange reports, one verdict
comes out, and each process ends by `os._exit`: the main thread may be deep in a collective that nobody will complete.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from titan.config.errors import UserError
from titan.observability.exchange import Exchange
from titan.observability.failures import record_for_launcher
from titan.observability.flight_recorder import open_collective, write_record
from titan.observability.logging import logger
from titan.observability.verdict import Report, Verdict, judge

_EXCHANGE_SECONDS = 20.0  # the store's host may be what is gone
_CULPRIT_FIRST_SECONDS = 4.0  # launchers blame the process that ends first; failures.py may make it wait
_STUCK_SECONDS = 30.0  # beyond the limit: then even this thread can't run, since another one holds the interpreter
_GUARDS = ("titan-watchdog", "titan-listener", "titan-exchange", "titan-signals")
_WORDS_OF_GLOO = ("gloo/transport", "caused pair closure")  # its errors have no type of their own


@dataclass(frozen=True)
class _Fault:
    """Why this rank's watchdog acts: its time is over, a collective broke, a thread raised; or none, when called."""

    late: str = ""
    broken: str = ""
    raised: BaseException | None = None


class Watchdog:
    """A context around all that ranks do together. Errors that leave it are made known to all ranks.

    Args:
        rank: this process's.
        exchange: with the other ranks; None for a rank alone, which ends by itself.
        traces: folder for stacks and records of collectives; None writes none.
    """

    def __init__(self, rank: int, exchange: Exchange | None, traces: Path | None) -> None:
        self._rank = rank
        self._exchange = exchange
        self._traces = traces
        self._main = threading.get_ident()
        self._changed = threading.Condition()
        self._where, self._limit, self._seconds = "set-up", "", 0.0
        self._deadline: float | None = None
        self._fault: _Fault | None = None
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._watch, name="titan-watchdog", daemon=True)]
        if exchange is not None:
            self._threads.append(threading.Thread(target=self._listen, name="titan-listener", daemon=True))

    def expect(self, where: str, seconds: float, key: str) -> None:
        """From here on the main thread is at `where`, which may take so long.

        Args:
            where: for people, such as "step 3".
            key: the setting that gives the limit.
        """
        self._where, self._seconds, self._limit = where, seconds, f"{seconds:g} s ({key})"
        self._set_deadline(time.monotonic() + seconds)
        faulthandler.dump_traceback_later(seconds + _STUCK_SECONDS, exit=True)

    @contextmanager
    def pause(self, where: str) -> Iterator[None]:
        """Let something take as long as it takes. Afterwards the clock starts anew."""
        before, self._where = self._where, where
        self._set_deadline(None)
        faulthandler.cancel_dump_traceback_later()
        yield
        self._where = before
        self._set_deadline(time.monotonic() + self._seconds)
        faulthandler.dump_traceback_later(self._seconds + _STUCK_SECONDS, exit=True)

    def __enter__(self) -> Watchdog:
        self._excepthook_before = threading.excepthook
        threading.excepthook = self._thread_raised
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback_: TracebackType | None
    ) -> None:
        faulthandler.cancel_dump_traceback_later()
        if isinstance(error, Exception) and self._exchange is not None:
            if not isinstance(error, UserError) and (broken := _broken_collective(error)):
                self._act(_Fault(late=self._limit if "timed out" in broken.lower() else "", broken=broken))
                self._threads[0].join()  # the process ends there
            self._within(_EXCHANGE_SECONDS, lambda: self._announce(error))
        threading.excepthook = self._excepthook_before
        self._closed.set()
        self._set_deadline(None)
        for thread in self._threads:
            thread.join(timeout=1)  # the listener may hang on a link that is cut

    # --- the two threads

    def _watch(self) -> None:
        with self._changed:
            while self._fault is None and not self._closed.is_set():
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is not None and left <= 0:
                    self._fault = _Fault(late=self._limit)
                else:
                    self._changed.wait(left)
        if self._fault is not None:
            self._end(self._fault)

    def _listen(self) -> None:
        assert self._exchange is not None
        try:
            while not self._closed.wait(self._exchange.listen_seconds):
                if self._exchange.called():
                    self._act(_Fault())
                    return
        except RuntimeError:  # The store is gone. When that is a fault, this rank's collectives or its clock will tell.
            return

    def _act(self, fault: _Fault) -> None:
        with self._changed:
            self._fault = self._fault or fault
            self._changed.notify()

    def _set_deadline(self, deadline: float | None) -> None:
        with self._changed:
            self._deadline = deadline
            self._changed.notify()

    def _thread_raised(self, args: threading.ExceptHookArgs) -> None:
        self._excepthook_before(args)
        if isinstance(args.exc_value, Exception):
            self._act(_Fault(raised=args.exc_value))

    # --- the end

    def _end(self, fault: _Fault) -> None:
        """Find out whose fault it is, show it, and end the process."""
        settled: list[tuple[Verdict, bool]] = []
        report = self._report(fault)
        self._within(_EXCHANGE_SECONDS, lambda: settled.append(self._settle(fault, report)))
        verdict, shows = settled[0] if settled else (self._alone(report), True)
        guilty = self._rank in verdict.culprits
        if shows and fault.raised is None:
            logger.error(verdict.text)
        if verdict.slow:
            self._write_traces()
        if not guilty:
            time.sleep(_CULPRIT_FIRST_SECONDS)
        record_for_launcher(verdict.text)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)

    def _settle(self, fault: _Fault, report: Report) -> tuple[Verdict, bool]:
        if fault.raised is not None:
            return self._announce(fault.raised), True
        if self._exchange is None:
            return judge({self._rank: report}, 1), True
        return self._exchange.settle(report)

    def _announce(self, error: BaseException) -> Verdict:
        cause = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        verdict = Verdict(f"rank {self._rank} failed in {self._where}: {cause}", (self._rank,), slow=False)
        if self._exchange is not None:
            self._exchange.announce(verdict)
        return verdict

    def _alone(self, report: Report) -> Verdict:
        """When no exchange is possible."""
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        text = (
            f"rank {self._rank} in {report.where} can't reach rank 0's host ({address}), which keeps the job's store: "
            f"rank 0 is dead, its host is down, or the link is cut{report.broken and f' ({report.broken})'}"
        )
        return Verdict(text, (0,))

    def _report(self, fault: _Fault) -> Report:
        waits_in = open_collective() or ("a collective" if fault.broken or self._waits_by_its_stack() else "")
        return Report(self._where, waits_in, fault.late, fault.broken, "" if waits_in else _stacks())

    def _waits_by_its_stack(self) -> bool:
        frame = sys._current_frames().get(self._main)
        return frame is not None and f"torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename

    def _write_traces(self) -> None:
        if self._traces is None:
            return
        try:
            self._traces.mkdir(parents=True, exist_ok=True)
            (self._traces / f"stacks_{self._rank}.txt").write_text(_stacks(), encoding="utf-8")
            write_record(self._traces / f"rank_{self._rank}")
        except OSError as error:
            logger.warning(f"comm.save_traces_folder: {error}")

    @staticmethod
    def _within(seconds: float, work: Callable[[], object]) -> None:
        """Do something that may hang; an error of it only means that it wasn't done."""

        def attempt() -> None:
            with suppress(Exception):
                work()

        thread = threading.Thread(target=attempt, name="titan-exchange", daemon=True)
        thread.start()
        thread.join(seconds)


def _broken_collective(error: BaseException | None) -> str:
    """The message of a collective that failed since a peer is gone, as this error or a cause of it; empty without."""
    from torch.distributed import DistError

    while error is not None:
        text = str(error)
        by_gloo = isinstance(error, RuntimeError) and any(words in text for words in _WORDS_OF_GLOO)
        if by_gloo or isinstance(error, DistError):
            return text.splitlines()[0]
        error = error.__cause__ or error.__context__
    return ""


def _stacks() -> str:
    """Python's stacks of all threads but those that stand guard, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: names.get(item[0]) != "MainThread")
    return "".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
        if names.get(ident) not in _GUARDS
    )
