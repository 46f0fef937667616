"""What titan tells people, all of it on stderr. stdout is for what was asked for: `--help`, a config, a report."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger("titan")

_STORE_SECONDS = 5
_attached: list[tuple[logging.Logger, logging.Handler]] = []

_ANSI = {"dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}
ColorName = Literal["dim", "red", "green", "yellow", "blue", "magenta", "cyan"]


_WARNINGS = logging.getLogger("py.warnings")


def init_logging(rank: int, color: bool, file: Path | None = None) -> None:
    """Send titan's log and libraries' warnings to stderr, rank 0 from INFO up, other ranks from WARNING up with their
    number. The same warning is shown once. May be called again: the newest call counts.

    Args:
        rank: this process's rank in the world.
        color: allow colours; they are still used only where `color_allowed` agrees.
        file: gets all that this rank has to say from INFO up, and what libraries log, after what it holds already.

    Raises:
        OSError: the file can't be written to.
    """
    _detach()
    for own in (logger, _WARNINGS):  # a library that configures the root logger would print every line a second time
        own.propagate = False
    shown = _BarFriendlyHandler(sys.stderr)
    shown.setFormatter(_Formatter(rank, color_allowed(color)))
    shown.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    _attach(shown, logger, _WARNINGS)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = logging.FileHandler(file, encoding="utf-8")
        kept.setFormatter(_FileFormatter(rank, color=False))
        kept.setLevel(logging.INFO)
        _attach(kept, logging.getLogger(), *_loggers_on_their_own())
        # Python shows warnings of loggers that nobody handles; now that the file does, titan has to.
        beside = _BarFriendlyHandler(sys.stderr)
        beside.setFormatter(_Formatter(rank, color_allowed(color)))
        beside.setLevel(logging.WARNING)
        _attach(beside, logging.getLogger())
    logger.setLevel(logging.INFO)
    warnings.showwarning = _log_warning


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """What libraries give by Python's module: a line like any other, without the code that gave it."""
    _WARNINGS.warning(f"{category.__name__}: {message} ({filename}:{lineno})")


def log_to_file(message: str) -> None:
    """Add an error to this rank's file, if there is one, and show it nowhere: Python or torch will."""
    for handler in logger.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(logger.makeRecord(logger.name, logging.ERROR, "", 0, message, (), None))


def warn_once_per_job(store: Store) -> None:
    """From here on a warning that several ranks give in the same words is shown by the first of them alone.

    Args:
        store: of the job; a connection of its own is made to it, for the caller's may be busy.
    """
    store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
    store.set_timeout(timedelta(seconds=_STORE_SECONDS))
    for handler in logger.handlers:
        for once in handler.filters:
            if isinstance(once, _Once) and isinstance(handler, _BarFriendlyHandler):
                once.store = store


def _loggers_on_their_own() -> list[logging.Logger]:
    """Those that leave nothing to the root logger: titan's, that of warnings, several of torch."""
    known = logging.getLogger().manager.loggerDict.values()
    return [one for one in known if isinstance(one, logging.Logger) and not one.propagate]


def _attach(handler: logging.Handler, *loggers: logging.Logger) -> None:
    handler.addFilter(_Once())
    for one in loggers:
        one.addHandler(handler)
        _attached.append((one, handler))


def _detach() -> None:
    """Undo what an earlier `init_logging` attached."""
    while _attached:
        one, handler = _attached.pop()
        one.removeHandler(handler)
        handler.close()


class _Once(logging.Filter):
    """Lets each warning pass once, by its words."""

    def __init__(self) -> None:
        super().__init__()
        self.store: Store | None = None
        self._given: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        message = record.getMessage()
        if message in self._given:
            return False
        self._given.add(message)
        try:
            digest = hashlib.sha256(message.encode()).hexdigest()
            return self.store is None or self.store.add(f"warning/{digest}", 1) == 1
        except RuntimeError:  # the store is gone; better twice than never
            return True


def color_allowed(wanted: bool) -> bool:
    """Whether to print colours: wanted, stderr is a terminal, and NO_COLOR (https://no-color.org) isn't set."""
    return wanted and sys.stderr.isatty() and not os.environ.get("NO_COLOR")


def paint(text: str, color: ColorName) -> str:
    """The text in a terminal colour."""
    return f"\033[{_ANSI[color]}m{text}\033[0m"


class _BarFriendlyHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Takes a progress bar away while it writes a line, so that neither tears the other."""

    def emit(self, record: logging.LogRecord) -> None:
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if bars is None:  # nobody imported it, so there is no bar
            super().emit(record)
            return
        with bars.external_write_mode(file=self.stream):
            super().emit(record)


class _Formatter(logging.Formatter):
    """`HH:MM:SS [rank N] LEVEL: message`; the rank is left out on rank 0, the level below WARNING."""

    def __init__(self, rank: int, color: bool) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._prefix = f"[rank {rank}] " if rank else ""
        self._color = color

    def formatMessage(self, record: logging.LogRecord) -> str:
        clock = self.formatTime(record, self.datefmt)
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        if self._color:
            clock = paint(clock, "dim")
            level = level and paint(level, "red" if record.levelno >= logging.ERROR else "yellow")
        return f"{clock} {self._prefix}{level}{record.message}"


class _FileFormatter(_Formatter):
    """The same with the date, and without the colours that a message has for a terminal."""

    def __init__(self, rank: int, color: bool) -> None:
        super().__init__(rank, color)
        self.datefmt = "%Y-%m-%d %H:%M:%S"

    def format(self, record: logging.LogRecord) -> str:
        return re.sub(r"\033\[\d+m", "", super().format(record))
