"""What people see of a run: on a terminal, in a file, and in the files of each rank."""

from __future__ import annotations

import os
import pty
import re
import struct
import subprocess
import termios
from fcntl import ioctl
from pathlib import Path

import pytest

from tests.distributed.runs import TINY
from tests.test_train import ROOT, TORCHRUN, TRAIN, clean_environment

RUN = [argument for argument in TINY if not argument.startswith("--metrics.progress")] + ["--training.steps=4"]
COLUMNS = 160


def screen(shown: str) -> list[str]:
    """The lines that a terminal shows after it got this text."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\033\[[\d;?]*[A-Za-z]|[\r\n]|[^\033\r\n]+", shown):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part.startswith("\033["):
            assert part[-1] in "mA", f"{part!r} is more than this terminal knows"
            row -= part[-1] == "A"
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


def run_on_a_terminal(command: list[str]) -> str:
    """All that a command writes to stderr, which is a terminal to it."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environment = {name: value for name, value in clean_environment().items() if name != "NO_COLOR"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # how Linux tells that nobody has the other end open
        pass
    assert process.wait() == 0
    return shown.decode()


@pytest.mark.slow
def test_a_terminal_shows_a_bar_with_the_time_left_under_coloured_lines(tmp_path: Path) -> None:
    shown = run_on_a_terminal([*TRAIN, *RUN, f"--job.dump_folder={tmp_path}"])
    lines = screen(shown)
    steps = [line for line in lines if re.search(r"^\d\d:\d\d:\d\d +\d+%  step \d/4", line)]
    assert len(steps) == 4
    bars = [line for line in lines if re.search(r"100%\|█+\| 4/4 \[\d\d:\d\d<00:00, .*(step/s|s/step)\]", line)]
    assert len(bars) == 1, "one bar, redrawn in place, which stays at the end"
    assert "\033[36mstep 4/4\033[0m" in shown
    assert "Goodput" in lines[-3] and lines[-2:] == [*bars, ""]


@pytest.mark.slow
def test_a_file_gets_plain_lines(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        subprocess.run([*TRAIN, *RUN, f"--job.dump_folder={tmp_path}"], cwd=ROOT, env=clean_environment(), stderr=log)
    text = (tmp_path / "log").read_text()
    assert text.count("step ") >= 4 and "Goodput" in text
    assert not set("\r\033█") & set(text)
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in text.splitlines())


_WARNS = """
import logging
import warnings

from titan.training.step import TrainStep

run = TrainStep.run


def warning_run(self, step, *arguments, **keywords):
    warnings.warn("an old option", stacklevel=2)
    logging.getLogger("library").warning("a library's word")
    if step == 3:
        raise RuntimeError("broken on purpose")
    return run(self, step, *arguments, **keywords)


TrainStep.run = warning_run
import tests.distributed.tiny_models
"""


@pytest.mark.slow
def test_each_rank_keeps_its_whole_log_and_a_warning_of_all_is_shown_once(tmp_path: Path) -> None:
    (tmp_path / "warns.py").write_text(_WARNS)
    arguments = [*RUN, "--experimental.custom_import=warns", f"--job.dump_folder={tmp_path}"]
    arguments += ["--metrics.rank_log_folder=logs", "--training.local_batch_size=4"]
    environment = clean_environment(PYTHONPATH=f"{ROOT}:{tmp_path}")
    done = subprocess.run(
        [*TORCHRUN, "train.py", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert done.stderr.count("UserWarning: an old option") == 1, done.stderr
    for rank in (0, 1):
        text = (tmp_path / "logs" / f"rank_{rank}.log").read_text()
        first = text.splitlines()[0]
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d .*titan run: torch", first.replace("[rank 1] ", "")), first
        for once in ("UserWarning: an old option", "a library's word", "\nRuntimeError: broken on purpose"):
            assert text.count(once) == 1, (once, text)
    assert "step 2/4" in (tmp_path / "logs" / "rank_0.log").read_text()
