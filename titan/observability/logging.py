"""What titan tells people, all of it on stderr. stdout is for what was asked for: `--help`, a config, a report."""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import Literal

logger = logging.getLogger("titan")

_ANSI = {"dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}
ColorName = Literal["dim", "red", "green", "yellow", "blue", "magenta", "cyan"]


def init_logging(rank: int, color: bool) -> None:
    """Send titan's log to stderr, rank 0 from INFO up, other ranks from WARNING up with their number.

    May be called again: the newest call counts.

    Args:
        rank: this process's rank in the world.
        color: allow colours; they are still used only where `color_allowed` agrees.
    """
    handler = _BarFriendlyHandler(sys.stderr)
    handler.setFormatter(_Formatter(rank, color_allowed(color)))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    # A library that configures the root logger would print every line a second time.
    logger.propagate = False


@functools.cache
def warn_once(message: str) -> None:
    """Warn, but only the first time that this process gives this very message."""
    logger.warning(message)


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
