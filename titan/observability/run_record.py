"""starts.jsonl: one line for each start of the job, of what ran where, and what goodput.py needs to know of it."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from titan.observability.device import Device
from titan.observability.goodput import ACCOUNTED, RunAccount
from titan.observability.json_lines import read_rows, set_aside

_CHECKOUT = Path(__file__).resolve().parents[2]
_GIT_SECONDS = 5.0


def describe_start(time: float, step: int, layout: Mapping[str, int], device: Device) -> dict[str, Any]:
    """What is known of a start before its loop begins.

    Args:
        time: when the process started, in unix seconds.
        step: steps that the run has done before.
        layout: degrees by name; the world size is their product.
    """
    commit, dirty = git_commit(_CHECKOUT)
    return {
        "time": time,
        "step": step,
        "command": shlex.join(sys.orig_argv),
        "world_size": math.prod(layout.values()),
        "layout": dict(layout),
        "versions": {
            "titan": _titan_version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": device.name,
        },
        "git_commit": commit,
        "git_dirty": dirty,
        "host": socket.gethostname(),
    }


class RunRecord:
    """A run's starts.jsonl, with a new line for this start.

    Must be made before metrics.jsonl is opened, which drops lines that the account needs. A start from step 0
    begins a new run, if steps were logged before: the file is renamed as metrics.jsonl is.

    Args:
        folder: where both files are, made when missing; None keeps no file, and knows this start alone.
        start: of `describe_start`.
    """

    def __init__(self, folder: Path | None, start: Mapping[str, Any]) -> None:
        self._path = None if folder is None else folder / "starts.jsonl"
        self._starts: list[dict[str, Any]] = []
        rows: list[dict[str, Any]] = []
        if folder is not None and self._path is not None:
            folder.mkdir(parents=True, exist_ok=True)
            rows = list(read_rows(folder / "metrics.jsonl"))
            if rows and start["step"] == 0:
                set_aside(self._path)
                rows = []
            self._starts = list(read_rows(self._path))
        dropped = [{key: row[key] for key in ACCOUNTED if key in row} for row in rows if row["step"] > start["step"]]
        self._starts.append({"start": len(self._starts), **start, "dropped": dropped, "end": None})
        self._rows = rows
        self._write()

    def begin(self, loop_time: float) -> RunAccount:
        """Note when the loop begins, in unix seconds; returns the account of the run's time up to then."""
        self._starts[-1]["loop_time"] = loop_time
        self._write()
        return RunAccount(self._starts, self._rows)

    def end(self, row: Mapping[str, Any]) -> None:
        """Note how this start ended.

        Args:
            row: the values of ACCOUNTED since the last line of metrics.jsonl.
        """
        self._starts[-1]["end"] = dict(row)
        self._write()

    def _write(self) -> None:
        """The whole file anew, which is small, in one moment."""
        if self._path is None:
            return
        draft = self._path.with_name(self._path.name + ".tmp")
        draft.write_text("".join(json.dumps(start) + "\n" for start in self._starts), encoding="utf-8")
        draft.replace(self._path)


def git_commit(folder: Path) -> tuple[str | None, bool | None]:
    """The commit that is checked out in a folder, and whether tracked files differ from it.

    (None, None) where git isn't installed, or the folder isn't a checkout's top: titan may be installed within another
    project's.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        # Without locks, and without questions, whatever the user's git is set to.
        environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
        )
        return done.stdout.strip()

    try:
        top, commit = git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        if Path(top).resolve() != folder:
            return None, None
        return commit, git("status", "--porcelain", "--untracked-files=no") != ""
    except (OSError, ValueError, subprocess.SubprocessError):
        return None, None


def _titan_version() -> str | None:
    """None when titan runs from a checkout that isn't installed."""
    try:
        return metadata.version("titan")
    except metadata.PackageNotFoundError:
        return None
