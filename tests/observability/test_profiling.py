"""titan/observability/profiling.py: which steps, what is written, and that a run doesn't notice."""

from __future__ import annotations

import gzip
import json
import os
import signal
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction, schedule

import titan.observability.memory_snapshots as memory_snapshots
import titan.observability.profiling as profiling
from tests.distributed.runs import TINY, SmallRun, train_here
from tests.distributed.world import Worlds
from tests.test_faults import FAULTY
from tests.test_train import TRAIN, run
from titan.config.job_config import Profiling
from titan.observability.device import Device, find_device
from titan.observability.profiling import Phase, Profiler, phase_of
from titan.training.step import TrainStep

EVERY_FOURTH = ["--profiling.enable_profiling", "--profiling.profile_freq=4", "--profiling.profiler_active=2"]
EVERY_FOURTH += ["--profiling.profiler_warmup=1"]


def arguments(folder: Path, *more: str, steps: int = 6) -> list[str]:
    return [
        *TINY,
        f"--job.dump_folder={folder}",
        f"--training.steps={steps}",
        "--training.local_batch_size=4",
        "--training.global_batch_size=8",
        *more,
    ]


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def regions_of(path: Path) -> list[str]:
    """The names in a trace, and that it is one that viewers open."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    assert_nested(events)
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def assert_nested(events: list[dict[str, Any]]) -> None:
    """On one row a viewer shows what lies within another event or beside it, and drops the rest."""
    rows: dict[Any, list[float]] = {}  # ends of what is open
    complete = [event for event in events if event["ph"] == "X"]
    for event in sorted(complete, key=lambda event: (event["ts"], -event["dur"])):
        row, end = rows.setdefault(event["tid"], []), event["ts"] + event["dur"]
        while row and row[-1] <= event["ts"]:
            row.pop()
        assert not row or end <= row[-1] + 0.01, event  # microseconds; they are rounded
        row.append(end)


@pytest.mark.parametrize(("freq", "warmup", "active"), [(10, 3, 1), (4, 1, 2), (4, 0, 4), (1, 0, 1), (5, 3, 2)])
def test_steps_are_those_of_torchs_schedule(freq: int, warmup: int, active: int) -> None:
    settings = Profiling(profile_freq=freq, profiler_warmup=warmup, profiler_active=active)
    with warnings.catch_warnings(action="ignore"):  # of a schedule without a warm-up
        theirs = schedule(wait=freq - warmup - active, warmup=warmup, active=active)
    phases = {ProfilerAction.NONE: Phase.OFF, ProfilerAction.WARMUP: Phase.WARM_UP}
    for step in range(1, 4 * freq):
        action = theirs(step - 1)
        assert phase_of(step, settings) == phases.get(action, Phase.TRACED)
        assert (action == ProfilerAction.RECORD_AND_SAVE) == (step % freq == 0)


# --- whole runs


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (
            ["--parallelism.data_parallel_shard_degree=2", "--activation_checkpoint.mode=full"],
            ["microbatch 1", "forward", "backward", "FSDP::all_gather (layers.0)", "gloo:all_gather"],
        ),
        (
            ["--parallelism.pipeline_parallel_degree=2", "--parallelism.data_parallel_shard_degree=1"],
            ["stage {rank} forward microbatch 3", "stage {rank} backward microbatch 0", "gloo:{sends}"],
        ),
        pytest.param(
            [
                "--parallelism.pipeline_parallel_degree=2",
                "--parallelism.data_parallel_shard_degree=1",
                "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
                "--model.flavor=deep",
            ],
            ["stage {rank} weights microbatch 0", "stage {rank} forward microbatch 3"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fsdp2", "pp2", "zero-bubble"],
)
def test_traces_of_two_ranks_have_names(worlds: Worlds, tmp_path: Path, layout: list[str], names: list[str]) -> None:
    """And the run trains as it would without."""
    expected = worlds(2).run(train_here, arguments(tmp_path / "plain", *layout))[0]
    rows = worlds(2).run(train_here, arguments(tmp_path / "run", *layout, *EVERY_FOURTH))[0]
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected]
    folder = tmp_path / "run" / "profile_traces"
    assert written(folder) == [f"step-4/rank-{rank}.{kind}" for rank in (0, 1) for kind in ("json.gz", "txt")]
    for rank in (0, 1):
        found = regions_of(folder / "step-4" / f"rank-{rank}.json.gz")
        assert [name for name in found if name.startswith("step ")] == ["step 3", "step 4"]
        wanted = [name.format(rank=rank, sends=("send", "recv")[rank]) for name in names]
        layer = f"layers.{rank}"
        assert {"data", "gradient norm", "optimizer", f"{layer} forward", f"{layer} backward", *wanted} <= set(found)
        text = (folder / "step-4" / f"rank-{rank}.txt").read_text()
        assert text.startswith(f"rank {rank}: the main thread in a step, mean of 3 to 4\n")
        shares = {line.split("%")[1].strip(): float(line.split()[2][:-1]) for line in text.splitlines()[1:8]}
        assert shares["total"] == 100 and shares["computing"] > 0 and shares["communicating"] > 0
        busy = shares["computing"] + shares["exposed"] + shares["idle"]
        assert busy == pytest.approx(100, abs=0.2) and "aten::mm" in text and "gloo:all_reduce" in text


def test_a_run_killed_while_it_is_traced_resumes_and_traces_the_same_steps(worlds: Worlds, tmp_path: Path) -> None:
    """Killed in step 8, of the window 6 to 8, and resumed from step 6: a part of that window, and it says so."""
    saved = ["--checkpoint.enable", "--checkpoint.interval=6", "--profiling.enable_profiling"]
    saved += ["--profiling.profile_freq=4", "--profiling.profiler_active=3", "--profiling.profiler_warmup=1"]
    expected = worlds(1).run(train_here, arguments(tmp_path / "straight", steps=12))[0]
    command = arguments(tmp_path / "run", *saved, steps=12)
    killed = run([*TRAIN, *command, *FAULTY], FAULT="0 8 kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert "Trace of step 4" in killed.stderr and "profiler_st" not in killed.stderr  # torch's own lines
    rows = worlds(1).run(train_here, command)[0]
    for key in ("step", "loss", "grad_norm", "lr"):
        assert [row[key] for row in rows] == [row[key] for row in expected]
    folder = tmp_path / "run" / "profile_traces"
    assert written(folder) == [f"step-{step}/rank-0.{kind}" for step in (12, 4, 8) for kind in ("json.gz", "txt")]
    for step, traced in {4: (2, 3, 4), 8: (7, 8), 12: (10, 11, 12)}.items():
        names = regions_of(folder / f"step-{step}" / "rank-0.json.gz")
        assert [name for name in names if name.startswith("step ")] == [f"step {number}" for number in traced]
        text = (folder / f"step-{step}" / "rank-0.txt").read_text()
        assert ("Step 7 is the process's first" in text) == (step == 8)


def profiler_of(folder: Path, device: Device, settings: Profiling) -> Profiler:
    snapshots = memory_snapshots.open_memory_snapshots(settings, folder, device, 3)
    parts = [torch.nn.Linear(2, 2)]
    return Profiler(settings, folder, device=device, rank=3, first_step=1, parts=parts, snapshots=snapshots)


def test_left_over_parts_are_written_over_and_failures_told(
    tmp_path: Path, cpu: Device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a process that was killed while it wrote."""
    settings = Profiling(enable_profiling=True, profile_freq=1, profiler_warmup=0)
    folder = tmp_path / "profile_traces" / "step-1"
    folder.mkdir(parents=True)
    for name in (".rank-3.json", ".rank-3.json.gz", ".rank-3.txt"):
        (folder / name).write_text("{half")
    profiler = profiler_of(tmp_path, cpu, settings)
    monkeypatch.setattr(logger := profiling.logger, "propagate", True)
    for step in (1, 2):
        profiler.begin(step)
        torch.ones(2) + 1
        profiler.end()
        assert profiler.writes_after(step)
        if step == 2:
            (tmp_path / "profile_traces" / "step-2").write_text("in the way")
        with caplog.at_level("WARNING", logger.name):
            profiler.write(step)
    profiler.close()
    assert written(folder) == ["rank-3.json.gz", "rank-3.txt"]
    assert "step 1" in regions_of(folder / "rank-3.json.gz")
    assert "profiling.save_traces_folder: no trace of step 2" in caplog.text


def writing_takes(seconds: float, rank: int, command: list[str]) -> list[dict[str, Any]]:
    """A training in which one rank is slow to write."""
    write = Profiler._write_trace

    def slow(self: Profiler, *args: Any) -> None:
        if dist.get_rank() == rank:
            time.sleep(seconds)
        write(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Profiler, "_write_trace", slow)
        return train_here(command)


@pytest.mark.slow
def test_the_watchdog_waits_for_traces_and_metrics_leave_them_out(worlds: Worlds, tmp_path: Path) -> None:
    command = arguments(tmp_path, *EVERY_FOURTH, "--comm.train_timeout_seconds=4")
    rows = worlds(2).run(writing_takes, 7.0, 1, command)[0]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[4]["step_seconds"] < 4


# --- memory snapshots


def test_pr_snapshot_on_a_cpu(tmp_path: Path) -> None:
    """One line says that there is none, and an error is what it is."""
    command = arguments(tmp_path, "--profiling.enable_memory_snapshot", "--profiling.profile_freq=1")
    failed = run([*TRAIN, *command, *FAULTY], FAULT="0 3 raise")
    assert failed.returncode == 1
    assert "Traceback" in failed.stderr and "ValueError: a fault on purpose" in failed.stderr
    assert failed.stderr.count("profiling.enable_memory_snapshot = true: unavailable on cpu") == 1
    assert not (tmp_path / "memory_snapshot").exists()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A device that keeps a record of its memory."""
    calls: list[str] = []
    play_recording(monkeypatch, calls)
    yield calls


def play_recording(patch: pytest.MonkeyPatch, calls: list[str]) -> None:
    def write(path: Path) -> None:
        calls.append(path.name)
        path.write_bytes(b"memory")

    patch.setattr(memory_snapshots, "records_memory", lambda device: True)
    patch.setattr(memory_snapshots, "record_memory", lambda events: calls.append(f"record {events}"))
    patch.setattr(memory_snapshots, "write_memory_snapshot", write)


def run_out_of_memory(command: list[str]) -> list[str]:
    """A training whose fifth step finds no memory; what the stand-in for the device was asked."""
    run, calls = TrainStep.run, list[str]()

    def full(self: TrainStep, step: int, *args: Any, **keywords: Any) -> Any:
        if step == 5:
            raise torch.OutOfMemoryError("no memory left for step 5")
        return run(self, step, *args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        play_recording(patch, calls)
        patch.setattr(TrainStep, "run", full)
        with pytest.raises(torch.OutOfMemoryError, match="no memory left for step 5"):
            train_here(command)
    return calls


def test_pr_snapshot_every_so_many_steps_and_out_of_memory(worlds: Worlds, tmp_path: Path) -> None:
    command = arguments(tmp_path, "--profiling.enable_memory_snapshot", "--profiling.profile_freq=2")
    calls = worlds(1).run(run_out_of_memory, command)[0]
    assert calls == ["record 100000", *3 * [".rank-0.pickle"]]
    names = ("step-2", "step-4", "step-5-out-of-memory")
    assert written(tmp_path / "memory_snapshot") == [f"{name}/rank-0.pickle" for name in names]


def test_pr_snapshot_a_failure_to_write_hides_nothing(
    tmp_path: Path, recorded: list[str], monkeypatch: pytest.MonkeyPatch, cpu: Device
) -> None:
    def fail(path: Path) -> None:
        raise torch.OutOfMemoryError("again")

    monkeypatch.setattr(memory_snapshots, "write_memory_snapshot", fail)
    profiler = profiler_of(tmp_path, cpu, Profiling(enable_memory_snapshot=True, profile_freq=2))
    assert [step for step in range(1, 7) if profiler.writes_after(step)] == [2, 4, 6]
    profiler.write(2)
    profiler.out_of_memory(3)
    profiler.close()
    assert written(tmp_path) == []


# --- what it costs


def compare_steps(pairs: int) -> tuple[float, float]:
    """Median CPU time of a step beside a profiler that traces others, and of one without, in turns; seconds."""
    run = SmallRun("--training.local_batch_size=8", "--training.seq_len=128")
    tokens = torch.randint(0, 100, (8, 129))
    on = Profiler(
        Profiling(enable_profiling=True, profile_freq=1_000_000, profiler_warmup=0),
        Path("never"),
        device=find_device(),
        rank=0,
        first_step=1,
        parts=run.stages.parts,
        snapshots=None,
    )
    on.begin(1_000_000)  # one that is traced leaves nothing behind that slows others
    run.step(1, tokens[:, :-1], tokens[:, 1:])
    on.close()
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * pairs):
        with_profiler = number % 2 == 0
        start = time.process_time()
        if with_profiler:
            on.begin(number + 1)
        run.step(number + 1, tokens[:, :-1], tokens[:, 1:])
        if with_profiler:
            on.end()
            assert not on.writes_after(number + 1)
        times[with_profiler].append(time.process_time() - start)
    return statistics.median(times[True]), statistics.median(times[False])


@pytest.mark.slow
def test_steps_that_are_not_traced_cost_what_they_cost(worlds: Worlds) -> None:
    beside, without = worlds(1).run(compare_steps, 300)[0]
    print(f"{beside * 1000:.3f} ms beside {without * 1000:.3f} ms")
    assert beside < 1.02 * without, os.getloadavg()
