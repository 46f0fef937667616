"""titan/observability/goodput.py and run_record.py, under a clock that the test turns."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.observability.test_metrics import Run, read_lines
from titan.observability.device import Device
from titan.observability.goodput import KINDS, account, describe_goodput
from titan.observability.run_record import describe_start, git_commit


def accounted(folder: Path) -> dict[str, float]:
    """Kinds that took time. All kinds together are the wall time."""
    starts, rows = read_lines(folder / "starts.jsonl"), read_lines(folder / "metrics.jsonl")
    seconds = account(starts, rows)
    assert list(seconds) == list(KINDS)
    ends = [start["end"]["time"] for start in starts if start["end"]]
    last = max([row["time"] for row in rows] + ends + [start["loop_time"] for start in starts])
    assert sum(seconds.values()) == pytest.approx(last - starts[0]["time"])
    return {kind: pytest.approx(spent) for kind, spent in seconds.items() if spent > 1e-9}


def pause(run: Run, name: Any, seconds: float) -> None:
    with run.metrics.pause(name):
        run.now += seconds


def test_every_second_of_a_run_has_a_kind(tmp_path: Path, cpu: Device) -> None:
    run = Run(tmp_path, cpu)  # 10 s after its process's start
    run.step(1, seconds=21.0, data_seconds=0.0)
    for number in range(2, 11):
        run.step(number, seconds=2.0, data_seconds=1.0)
        if number == 5:
            pause(run, "validation", 7.0)
            pause(run, "profiling", 0.5)
    pause(run, "checkpoint", 3.0)  # after the last line
    run.metrics.finish()
    run.metrics.close()
    expected = {"training": 10.0, "startup": 10.0, "compile": 20.0, "data": 9.0, "checkpoint": 3.0}
    expected |= {"validation": 7.0, "profiling": 0.5}
    assert accounted(tmp_path) == expected
    # The end, which no line of metrics.jsonl tells, is in the last line's share of the time already but for 3 s.
    assert run.lines()[-1]["goodput"] == pytest.approx(10 / 56.5)


def test_opening_what_is_written_to_is_start_up(tmp_path: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B may take a while."""

    class SlowRun(Run):
        def __init__(self) -> None:
            def open_slowly(*_: Any) -> list[Any]:
                self.now += 5.0
                return []

            monkeypatch.setattr("titan.observability.metrics.open_writers", open_slowly)
            super().__init__(tmp_path, cpu)

    SlowRun().metrics.close()
    (tmp_path / "metrics.jsonl").touch()
    assert accounted(tmp_path) == {"startup": 15.0}


def test_steps_that_are_done_again_are_lost_and_the_time_between_starts_is_down(tmp_path: Path, cpu: Device) -> None:
    Run(tmp_path, cpu, total_steps=12).steps(1, 8, data_seconds=0.0)  # killed after step 8
    resumed = Run(tmp_path, cpu, total_steps=12, start_step=6, now=100.0)  # its process began at 90, step 8 was at 8
    resumed.steps(7, 12, data_seconds=0.0)
    resumed.metrics.close()
    assert accounted(tmp_path) == {"training": 12.0, "startup": 20.0, "lost": 2.0, "down": 82.0}
    assert resumed.lines()[-1]["goodput"] == pytest.approx(12 / 116)
    # The line of step 8 is gone; of its four steps two count.
    assert [row["step"] for row in resumed.lines()] == [1, 4, 7, 8, 12]


def test_a_later_resume_from_further_back_loses_what_counted_before(tmp_path: Path, cpu: Device) -> None:
    Run(tmp_path, cpu, total_steps=20).steps(1, 12, data_seconds=0.0)
    Run(tmp_path, cpu, total_steps=20, start_step=10, now=100.0).steps(11, 16, data_seconds=0.0)
    again = Run(tmp_path, cpu, total_steps=20, start_step=3, now=200.0)
    again.steps(4, 20, data_seconds=0.0)
    again.metrics.close()
    assert accounted(tmp_path) == {
        "training": 3.0 + 17.0,
        "startup": 30.0,
        "lost": 9.0 + 6.0,
        "down": (90.0 - 12.0) + (190.0 - 106.0),
    }


def test_a_failure_leaves_its_unfinished_window_in_the_account(tmp_path: Path, cpu: Device) -> None:
    run = Run(tmp_path, cpu)
    run.steps(1, 6, data_seconds=0.0)  # 5 and 6 are in no line
    pause(run, "checkpoint", 2.0)
    run.metrics.close()
    assert accounted(tmp_path) == {"training": 6.0, "startup": 10.0, "checkpoint": 2.0}
    Run(tmp_path, cpu, start_step=6, now=20.0)  # its process began at 10, when the failed one was 2 s gone
    assert accounted(tmp_path) == {"training": 6.0, "startup": 20.0, "checkpoint": 2.0, "down": 2.0}


def test_a_start_that_is_killed_while_it_drops_lines_counts_nothing_twice(tmp_path: Path, cpu: Device) -> None:
    Run(tmp_path, cpu).steps(1, 8, data_seconds=0.0)
    whole = (tmp_path / "metrics.jsonl").read_text()
    Run(tmp_path, cpu, start_step=2, now=50.0)
    (tmp_path / "metrics.jsonl").write_text(whole)
    Run(tmp_path, cpu, start_step=2, now=80.0)
    seconds = account(read_lines(tmp_path / "starts.jsonl"), read_lines(tmp_path / "metrics.jsonl"))
    assert seconds["training"] == pytest.approx(2.0)
    assert seconds["lost"] == pytest.approx(6.0)


def test_a_new_run_in_the_folder_has_an_account_of_its_own(tmp_path: Path, cpu: Device) -> None:
    Run(tmp_path, cpu).metrics.close()  # never came to a step
    for now in (100.0, 200.0):
        run = Run(tmp_path, cpu, now=now)
        run.steps(1, 2)
        run.metrics.close()
    assert [start["start"] for start in read_lines(tmp_path / "starts.1.jsonl")] == [0, 1]
    assert [start["start"] for start in read_lines(tmp_path / "starts.jsonl")] == [0]
    assert accounted(tmp_path)["startup"] == 10.0


def test_starts_that_know_only_the_beginning_can_be_accounted() -> None:
    rows = [{"step": 1, "time": 8.0, "loss": 1.0}]  # of a run before there was an account
    assert account([{"time": 5.0, "step": 0}], rows) == dict.fromkeys(KINDS, 0.0)


def test_the_lines_text() -> None:
    seconds = dict.fromkeys(KINDS, 0.0) | {"training": 1350.0, "startup": 60.0, "lost": 90.0, "data": 0.01}
    assert describe_goodput(seconds) == (
        "Goodput 90.0%: 1,350.0 s of 1,500.0 s trained; lost and done again 90.0 s (6.0%), start-up 60.0 s (4.0%)"
    )


def test_a_start_says_what_ran_where(cpu: Device) -> None:
    layout = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    start = describe_start(12.5, 3, layout, cpu)
    assert (start["time"], start["step"], start["world_size"], start["layout"]) == (12.5, 3, 4, layout)
    assert set(start["versions"]) == {"titan", "torch", "python", "device"}
    assert start["command"] == shlex.join(sys.orig_argv) and start["host"]
    json.dumps(start)


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "first"]):
        (tmp_path / "file").write_text("text")
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True)
    yield tmp_path


def test_the_commit_is_that_of_the_checkout_itself(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, dirty = git_commit(checkout)
    assert commit is not None and len(commit) == 40 and dirty is False
    (checkout / "new").write_text("not tracked")
    assert git_commit(checkout) == (commit, False)
    (checkout / "file").write_text("changed")
    assert git_commit(checkout) == (commit, True)
    (checkout / "site-packages").mkdir()
    assert git_commit(checkout / "site-packages") == (None, None)
    monkeypatch.setenv("PATH", "")
    assert git_commit(checkout) == (None, None)
