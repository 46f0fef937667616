"""Goodput: the share of a run's wall time in which it trained steps that count, and where the rest went.

A run may be killed and started again many times. Its starts are the lines of starts.jsonl, what it logged are the lines
of metrics.jsonl. A start takes the lines after the step that it resumes from out of metrics.jsonl, and keeps of them
what counts here under "dropped".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

KINDS = ("training", "startup", "compile", "data", "checkpoint", "validation", "profiling", "lost", "down")
# What the account needs of a line of metrics.jsonl.
ACCOUNTED = (
    "step",
    "time",
    "step_seconds",
    "data_seconds",
    "checkpoint_seconds",
    "validation_seconds",
    "profiling_seconds",
)


class StartAccount:
    """Seconds by kind of one start of the job, from its first moment to the last line that it logged.

    Args:
        start: its line of starts.jsonl.
        counts_until: steps after this one were done again by a later start.
    """

    def __init__(self, start: Mapping[str, Any], counts_until: float = math.inf) -> None:
        self.until: float = start.get("loop_time", start["time"])
        self._step: int = start["step"]
        self._counts_until = counts_until
        self._seconds = dict.fromkeys(KINDS, 0.0) | {"startup": self.until - start["time"]}
        self._first: tuple[float, str] | None = None  # seconds of the first step without its data, and what they are
        self._later_steps, self._later = 0, 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a line of metrics.jsonl, or the end of the start; lines come in the order of their time."""
        steps = row["step"] - self._step
        if steps > 0:
            computing = steps * (row["step_seconds"] - row["data_seconds"])
            counted = min(max(self._counts_until - self._step, 0), steps) / steps
            self._seconds["training"] += counted * computing
            self._seconds["data"] += counted * steps * row["data_seconds"]
            self._seconds["lost"] += (1 - counted) * steps * row["step_seconds"]
            if self._first is None:
                self._first = computing, "training" if counted else "lost"
            else:
                self._later_steps, self._later = self._later_steps + steps, self._later + computing
        else:
            # At an orderly end the last log was written; otherwise a step was begun, and not done.
            self._seconds["training" if row.get("orderly") else "lost"] += row["step_seconds"]
        for kind in ("checkpoint", "validation", "profiling"):
            self._seconds[kind] += row[f"{kind}_seconds"]
        self._step, self.until = row["step"], row["time"]

    def seconds(self) -> dict[str, float]:
        """By kind. What the first step took longer than a later one is "compile", whatever happens once in it."""
        seconds = dict(self._seconds)
        if self._first and self._later_steps:
            first, kind = self._first
            extra = max(0.0, first - self._later / self._later_steps)
            seconds[kind] -= extra
            seconds["compile"] += extra
        return seconds


class RunAccount:
    """Seconds by kind of a whole run so far, for a start that adds lines as they are logged.

    Args:
        starts: the lines of starts.jsonl; the last one's lines are those to be added.
        rows: the lines of metrics.jsonl.
    """

    def __init__(self, starts: Sequence[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> None:
        in_order = _accounted(starts, rows)
        self._before = dict.fromkeys(KINDS, 0.0)
        for number, start in enumerate(starts):
            later = starts[number + 1 :]
            self._current = StartAccount(start, min((other["step"] for other in later), default=math.inf))
            ends = later[0]["time"] if later else math.inf
            for row in in_order:
                if start["time"] <= row["time"] < ends:
                    self._current.add(row)
            if later:
                self._before["down"] += max(0.0, ends - self._current.until)
                self._before = _sum(self._before, self._current.seconds())

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a line that the last start has logged."""
        self._current.add(row)

    def seconds(self) -> dict[str, float]:
        """By kind; their sum is the time from the first start to the last line."""
        return _sum(self._before, self._current.seconds())

    def goodput(self) -> float:
        """The share of all time that is "training"; 0 before there was any."""
        seconds = self.seconds()
        return seconds["training"] / (sum(seconds.values()) or 1.0)


def account(starts: Sequence[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Where a run's wall time went.

    Args:
        starts: the lines of a run's starts.jsonl, at least one.
        rows: the lines of its metrics.jsonl.

    Returns:
        Seconds by kind, from the first start to the last line:

        - training: steps that count, without the wait for their data;
        - data: that wait, of rank 0;
        - startup: from a process's start to the loop's, such as imports, set-up, loading;
        - compile: what the first step of a start took longer than a mean later one of it;
        - checkpoint, validation, profiling: for which training stood still; the last is the writing of traces;
        - lost: steps that a later start did again, with their data, and those that a failure cut off;
        - down: from the last line of a start to the next one's beginning. A start that was killed leaves no trace of
          what it did after its last line, so that this is in here too.
    """
    return RunAccount(starts, rows).seconds()


def describe_goodput(seconds: Mapping[str, float]) -> str:
    """One line for the log, such as `Goodput 90.0%: 90.0 s of 100.0 s trained; start-up 10.0 s (10.0%)`."""
    total = sum(seconds.values())
    names = {"startup": "start-up", "lost": "lost and done again", "down": "down between starts"}
    rest = sorted(((spent, kind) for kind, spent in seconds.items() if kind != "training"), reverse=True)
    shown = [f"{names.get(kind, kind)} {spent:,.1f} s ({spent / total:.1%})" for spent, kind in rest if spent >= 0.05]
    trained = f"Goodput {seconds['training'] / total:.1%}: {seconds['training']:,.1f} s of {total:,.1f} s trained"
    return "; ".join([trained, ", ".join(shown)]) if shown else trained


def _accounted(starts: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Lines of windows in the order of their time: those of metrics.jsonl, those dropped from it, and starts' ends."""
    dropped = [row for start in starts for row in start.get("dropped", ())]
    # A start that was killed while it dropped lines leaves them in both places.
    windows = {(row["time"], row["step"]): row for row in [*rows, *dropped] if all(key in row for key in ACCOUNTED)}
    ends = [end for start in starts if (end := start.get("end"))]
    return sorted([*windows.values(), *ends], key=lambda row: row["time"])


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {kind: one[kind] + other[kind] for kind in KINDS}
