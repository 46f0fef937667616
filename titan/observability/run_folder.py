"""What a run has left in its dump folder, for those who look at it: whole, running, killed, or of an older titan."""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.config.errors import UserError, refused_by_system
from titan.observability.goodput import account
from titan.observability.json_lines import read_rows

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Setting:
    """A line of config.toml: the value as TOML, and where it came from; None for a default."""

    value: str
    origin: str | None

    @property
    def text(self) -> str:
        """The value itself, for people: of a string without its quotes."""
        return str(tomllib.loads(f"value = {self.value}")["value"])


@dataclass(frozen=True)
class Run:
    """A run's files, read.

    Attributes:
        name: the path as it was given.
        windows, validations: lines of metrics.jsonl, of training and of validation rounds.
        starts: lines of starts.jsonl; none of an older titan.
        settings: of config.toml by key, such as "optimizer.lr"; none where there is no such file.
        earlier: names of files that belong to earlier runs in the folder.
        cut: the last line isn't whole: it was being written, or a kill cut it off.
        unreadable: other lines that are no metrics.
    """

    name: str
    windows: Sequence[Mapping[str, Any]]
    validations: Sequence[Mapping[str, Any]]
    starts: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Setting]
    earlier: Sequence[str]
    cut: bool
    unreadable: int

    def series(self, key: str) -> tuple[list[float], list[float | None]]:
        """Steps and values of a key, of the lines that have it; None where it is unknown."""
        rows = self.validations if key.startswith("validation_") and key != "validation_seconds" else self.windows
        known = [row for row in rows if key in row]
        return [row["step"] for row in known], [number(row[key]) for row in known]

    def last(self, key: str) -> float | None:
        """The newest known value."""
        return next((value for value in reversed(self.series(key)[1]) if value is not None), None)

    def usual(self, key: str) -> float | None:
        """The median, without lines of a single step at a start, which set-up spoils."""
        spoiled = {0, *(start["step"] for start in self.starts)}
        steps, values = self.series(key)
        known = [
            value
            for step, value in zip(steps, values, strict=True)
            if value is not None and math.isfinite(value) and step - 1 not in spoiled
        ]
        return statistics.median(known) if known else None

    @property
    def step(self) -> int:
        """The last that was logged."""
        return max((row["step"] for row in (*self.windows, *self.validations)), default=0)

    @property
    def total_steps(self) -> int | None:
        """That the run is to have, where its config says so in steps."""
        found = self.settings.get("training.steps")
        return int(found.value) if found and found.value.isdecimal() and not self.has("training.total_tokens") else None

    def has(self, key: str) -> bool:
        """The config sets this key."""
        return key in self.settings

    @property
    def restarts(self) -> list[tuple[float, str]]:
        """After which step the run was started again, and in words."""
        return [
            (start["step"], f"start {number}: went on after step {start['step']}")
            for number, start in enumerate(self.starts)
            if number > 0
        ]

    @property
    def seconds(self) -> dict[str, float] | None:
        """Where wall time went, by kind; None where the folder doesn't say."""
        return account(self.starts, self.windows) if self.starts else None

    @property
    def not_finite(self) -> list[int]:
        """Steps of lines with a loss or a norm that isn't finite."""
        return [
            row["step"]
            for row in self.windows
            if any((value := number(row.get(key))) is not None and not math.isfinite(value) for key in _JUDGED)
        ]


_JUDGED = ("loss", "loss_max", "grad_norm")


def number(value: Any) -> float | None:
    """A value of metrics.jsonl, where "nan", "inf" and "-inf" are strings; None when it is none."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def read_run(path: Path) -> Run:
    """A run by its dump folder, or by a file of metrics, such as that of an earlier run in the same folder.

    Raises:
        UserError: there are no metrics.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path}: {_missing(path)}")
    newest = file.name == "metrics.jsonl"
    # A file that was renamed has no account of its starts.
    account_file = file.with_name(file.name.replace("metrics", "starts")) if file.name.startswith("metrics") else None
    with refused_by_system(str(file)):
        content = file.read_bytes()
        rows = list(read_rows(file))
        starts = [start for start in read_rows(account_file) if "time" in start] if account_file else []
        settings = _settings(file.with_name("config.toml")) if newest else {}
    if not any("loss" in row for row in rows):
        raise UserError(f"{file}: no step is logged in it yet")
    return Run(
        name=str(path),
        windows=[row for row in rows if "validation_loss" not in row],
        validations=[row for row in rows if "validation_loss" in row],
        starts=starts,
        settings=settings,
        earlier=sorted(other.name for other in file.parent.glob("metrics.*.jsonl")) if newest else [],
        cut=not content.endswith(b"\n"),
        unreadable=content.count(b"\n") - len(rows),
    )


def _missing(path: Path) -> str:
    if not path.exists():
        return "no such folder or file"
    near = sorted(str(found.parent) for found in path.glob("*/metrics.jsonl"))[:3] if path.is_dir() else []
    return f"no metrics.jsonl in it{'; there is one in ' + ', '.join(near) if near else ''}"


def _settings(path: Path) -> dict[str, Setting]:
    """The lines of a config.toml that a run has written: each is whole, its origin a comment behind it."""
    settings: dict[str, Setting] = {}
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        if head := re.fullmatch(r"\[(.+)\]", line):
            section = head[1]
        elif match := re.match(r"(\w+) = ", line):
            text, _, origin = line[match.end() :].rpartition("  # ")
            if not text or not _is_toml(text):  # there is no comment, or the sign is within a string
                text, origin = line[match.end() :], ""
            settings[f"{section}.{match[1]}"] = Setting(text, origin or None)
    return settings


def _is_toml(value: str) -> bool:
    try:
        tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return False
    return True
