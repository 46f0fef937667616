"""Runs in which something goes wrong on purpose: how soon they end, what they say, and that they go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch.distributed.flight_recorder.fr_trace import main as compare_records

from tests.distributed.runs import train_here
from tests.distributed.world import Worlds
from tests.test_train import ROOT, TORCHRUN, TRAIN, arguments, clean_environment, free_port, metrics
from titan.config.loader import load_and_check
from titan.observability.signals import REQUEUE_STATUS, StopSignals
from train import train

FAULTY = ["--experimental.custom_import=tests.faulty_module", "--training.dataloader.prefetch_factor=0"]


@contextmanager
def started(command: list[str], folder: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A process whose output goes to `log` in the folder, and which doesn't outlive the test."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=clean_environment(**variables), stdout=log, stderr=log, text=True
        )
    children = []
    try:
        yield process
    finally:
        children = worker_ids(process.pid)
        process.kill()
        process.wait()
        for child in children:
            kill(child)


def worker_ids(launcher: int) -> list[int]:
    path = Path(f"/proc/{launcher}/task/{launcher}/children")
    return [int(number) for number in path.read_text().split()] if path.exists() else []


def kill(process: int) -> None:
    """When it is still there."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


class Ended:
    """A run that came to its end.

    Attributes:
        seconds: from the fault to the end of the launcher.
    """

    def __init__(self, command: list[str], folder: Path, fault: str, timeout: float = 120, **variables: str) -> None:
        at = folder / "fault-time"
        with started([*command, *FAULTY], folder, FAULT=fault, FAULT_TIME=str(at), **variables) as process:
            self.status = process.wait(timeout)
            self.seconds = time.time() - float(at.read_text())
            self.workers_left = worker_ids(process.pid)
        self.log = (folder / "log").read_text()
        print(f"fault {fault}: ended {self.seconds:.1f} s later")


def same_numbers(rows: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> None:
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for key in ("loss", "grad_norm", "lr", "tokens_seen"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=tolerance), key


@pytest.fixture(scope="module")
def straight(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Eight steps on two ranks without a stop."""
    rows: list[dict[str, Any]] = worlds(2).run(train_here, arguments(tmp_path_factory.mktemp("straight"), 4, 8))[0]
    return rows


def launcher(*options: str) -> list[str]:
    return [*TORCHRUN, "--standalone", *options, "train.py"]


def saved_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").glob("*"))


# --- signals and restarts


def test_a_signal_to_one_worker_saves_on_all_and_a_restart_goes_on(
    tmp_path: Path, straight: list[dict[str, Any]]
) -> None:
    """Rank 1 gets SIGUSR1 in step 3. torchrun, which has a restart left, starts the workers again by itself."""
    run = Ended([*launcher("--max_restarts=1"), *arguments(tmp_path, 4, 8)], tmp_path, "1 3 signal")
    assert run.status == 0, run.log
    assert "asked to end after step 3" in run.log and "Saved step 3" in run.log
    assert f"exitcode: {REQUEUE_STATUS}" in run.log
    assert "Loaded step 3" in run.log
    same_numbers(metrics(tmp_path), straight, 0)
    assert not (tmp_path / "requeue").exists()  # the run came to its end


def test_a_signal_to_a_single_process(tmp_path: Path) -> None:
    run = Ended([*TRAIN, *arguments(tmp_path, 4, 8)], tmp_path, "0 3 signal")
    assert run.status == REQUEUE_STATUS, run.log
    assert saved_steps(tmp_path) == ["step-3"]
    assert (tmp_path / "requeue").read_text() == "asked to end after step 3\n"
    assert "Traceback" not in run.log


class Asked:
    """Signals that came during set-up."""

    received = True


def train_when_asked_to_end(command: list[str]) -> Any:
    try:
        train(load_and_check(command, dist.get_world_size()), cast(StopSignals, Asked()))
    except SystemExit as end:
        return end.code


def test_a_signal_before_the_first_step(tmp_path: Path, worlds: Worlds) -> None:
    """Nothing new is there to save, of a first start or of a resume; the next start takes the mark away."""
    for steps, saved in ((2, []), (4, ["step-2"])):
        ends = worlds(2).run(train_when_asked_to_end, arguments(tmp_path, 4, steps))
        assert ends == [REQUEUE_STATUS] * 2
        assert (tmp_path / "requeue").read_text() == f"asked to end after step {2 * len(saved)}\n"
        assert saved_steps(tmp_path) == saved
        worlds(2).run(train_here, arguments(tmp_path, 4, steps))
        assert not (tmp_path / "requeue").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher(tmp_path: Path, worlds: Worlds, number: signal.Signals) -> None:
    """It passes the signal on, also when a restart is left; the run goes on where it ended."""
    options = ["--max_restarts=3", "--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    command = [*launcher(*options), *arguments(tmp_path, 4, 100), *FAULTY]
    with started(command, tmp_path, FAULT="none 0 none", SLOW="0.2") as process:
        while len(metrics(tmp_path)) < 3 and process.poll() is None:
            time.sleep(0.05)
        at = time.monotonic()
        process.send_signal(number)
        status = process.wait(60)
        print(f"{number.name} to the launcher: ended {time.monotonic() - at:.1f} s later")
        assert time.monotonic() - at < 30
    assert status == 1
    last = metrics(tmp_path)[-1]["step"]
    assert saved_steps(tmp_path)[-1] == f"step-{last}" and (tmp_path / "requeue").exists()
    rows = worlds(2).run(train_here, arguments(tmp_path, 4, last + 2))[0]
    assert [row["step"] for row in rows] == list(range(1, last + 3))


@pytest.mark.slow
def test_a_signal_without_checkpoints_ends_the_run(tmp_path: Path) -> None:
    run = Ended([*TRAIN, *arguments(tmp_path, 4, 8), "--checkpoint.enable=false"], tmp_path, "0 3 signal")
    assert run.status == REQUEUE_STATUS, run.log
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.slow
def test_a_restart_after_a_kill(tmp_path: Path, straight: list[dict[str, Any]]) -> None:
    run = Ended([*launcher("--max_restarts=1"), *arguments(tmp_path, 4, 8)], tmp_path, "1 6 kill")
    assert run.status == 0, run.log
    assert "Loaded step 4" in run.log
    same_numbers(metrics(tmp_path), straight, 0)


@pytest.mark.slow
def test_an_elastic_run_goes_on_without_a_lost_node(tmp_path: Path, straight: list[dict[str, Any]]) -> None:
    """Two agents; one is killed with its worker. The other goes on with half the ranks, over the same text."""
    conf = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2"
    options = ["--nnodes=1:2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=elastic", "--max_restarts=3"]
    options += [f"--rdzv_endpoint=localhost:{free_port()}", f"--rdzv_conf={conf}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "train.py", *arguments(tmp_path, 4, 8), *FAULTY]
    settings = {"FAULT": "none 0 none", "SLOW": "0.5"}
    with started(command, tmp_path, **settings) as stays:
        time.sleep(1)
        with started(command, tmp_path / "other", **settings) as goes:
            deadline = time.monotonic() + 90
            while len(metrics(tmp_path)) < 5 and time.monotonic() < deadline:
                time.sleep(0.1)
            assert "2 process(es)" in (tmp_path / "log").read_text() + (tmp_path / "other" / "log").read_text()
            workers = worker_ids(goes.pid)
            goes.kill()
            for worker in workers:
                kill(worker)
        assert stays.wait(150) == 0, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert "1 process(es)" in log and "Loaded step 4" in log
    same_numbers(metrics(tmp_path), straight, 1e-5)


@pytest.mark.slow
def test_la_multinode_a_wrong_endpoint(tmp_path: Path) -> None:
    """Nobody listens there: torchrun says so, in the time it is given, and trains nothing."""
    options = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d"]
    options += [f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--rdzv_conf=read_timeout=5,is_host=0"]
    at = time.monotonic()
    command = [sys.executable, "-m", "torch.distributed.run", *options, "train.py", *arguments(tmp_path, 4)]
    with started(command, tmp_path) as process:
        assert process.wait(60) == 1
    assert time.monotonic() - at < 60
    assert "The connection to the C10d store has failed" in (tmp_path / "log").read_text()
    assert not metrics(tmp_path)


# --- the watchdog


def test_la_timeouts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Six seconds are fine in the first step, and too long later; the rank that others wait for is named."""
    limits = ["--comm.init_timeout_seconds=60", "--comm.train_timeout_seconds=3"]
    run = Ended([*launcher(), *arguments(tmp_path, 4, 8), *limits], tmp_path, "1 3 sleep")
    assert run.status == 1
    assert run.seconds < 3 + 60
    assert "rank 1 did not get past step 3 within 3 s (comm.train_timeout_seconds); rank 0 waits in step 3" in run.log
    assert run.log.count("did not get past step 3") <= 3  # once by a rank, twice in torchrun's own words
    assert "in go_wrong" in run.log and "time.sleep(6)" in run.log  # its stacks
    assert re.search(r"rank +: 1 ", run.log.split("Root Cause")[1])
    assert "Connection closed by peer" not in run.log
    assert {path.name for path in (tmp_path / "comm_traces").iterdir()} >= {"stacks_0.txt", "stacks_1.txt", "rank_0"}
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2]
    caplog.set_level("INFO")
    compare_records(["--prefix", "rank_", str(tmp_path / "comm_traces")])
    assert "all_gather" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("raise", "ValueError: a fault on purpose"),
        ("thread", "ValueError: a fault on purpose"),
        ("kill", "rank 1 did not answer"),
        ("freeze", "rank 1 did not answer"),
        ("hold", "rank 1 did not answer"),
    ],
)
def test_a_fault_ends_the_job_with_its_cause(tmp_path: Path, kind: str, cause: str) -> None:
    limits = ["--comm.init_timeout_seconds=60", "--comm.train_timeout_seconds=5"]
    run = Ended([*launcher(), *arguments(tmp_path, 4, 8), *limits], tmp_path, f"1 3 {kind}")
    assert run.status == 1
    assert run.seconds < 5 + 60
    assert cause in run.log
    if kind not in ("freeze", "hold"):  # those end only when torchrun kills them
        assert re.search(r"rank +: 1 ", run.log.split("Root Cause")[1])
    assert "Connection closed by peer" not in run.log
    assert not run.workers_left


@pytest.mark.slow
def test_a_thread_that_never_lets_go_of_the_interpreter(tmp_path: Path) -> None:
    """No thread of Python can watch it. What ends it needs none, and shows the stacks too."""
    limits = ["--comm.init_timeout_seconds=60", "--comm.train_timeout_seconds=5"]
    run = Ended([*TRAIN, *arguments(tmp_path, 4, 8), *limits], tmp_path, "0 3 hold")
    assert run.status == 1
    assert run.seconds < 5 + 60
    assert "in go_wrong" in run.log


@pytest.mark.slow
def test_a_process_alone_that_hangs(tmp_path: Path) -> None:
    limits = ["--comm.init_timeout_seconds=60", "--comm.train_timeout_seconds=3"]
    run = Ended([*TRAIN, *arguments(tmp_path, 4, 8), *limits], tmp_path, "0 3 sleep")
    assert run.status == 1
    assert "rank 0 did not get past step 3 within 3 s" in run.log and "in go_wrong" in run.log
