"""titan/observability/metrics.py and metric_writers.py, under a clock that the test turns."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.world import Worlds
from tests.observability.conftest import use_terminal
from titan.config.errors import UserError
from titan.config.job_config import Metrics
from titan.models.spec import FlopsPerToken
from titan.observability.device import Device, MemoryUse
from titan.observability.logging import init_logging
from titan.observability.metrics import MetricsLogger, StepResult

FLOPS = FlopsPerToken(full=2e9, causal=1.5e9)
KEYS = [
    "step",
    "loss",
    "loss_max",
    "grad_norm",
    "lr",
    "tokens_seen",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "tflops_per_device",
    "mfu",
    "step_seconds",
    "data_seconds",
    "checkpoint_seconds",
    "validation_seconds",
    "profiling_seconds",
    "memory_peak_bytes",
    "time",
    "goodput",
]


class Run:
    """A MetricsLogger and a loop whose steps take exactly as long as the test says."""

    def __init__(
        self,
        folder: Path | None,
        device: Device,
        settings: Metrics | None = None,
        now: float = 0.0,
        **options: Any,
    ) -> None:
        self.now = now  # seconds since unix time 1000
        defaults: dict[str, Any] = {
            "rank": 0,
            "world_size": 1,
            "total_steps": 10,
            "start_step": 0,
            "tokens_seen": 0,
            "started": 990.0 + now,
            "layout": {"pp": 1},
            "config": {},
            "flops": FLOPS,
            "peak_flops": None,
        }
        self.folder = folder
        self.metrics = MetricsLogger(
            settings or Metrics(log_freq=4, progress="none"),
            folder,
            device=device,
            clock=lambda: self.now,
            wall_clock=lambda: 1000.0 + self.now,
            **(defaults | options),
        )

    def step(self, number: int, *, seconds: float = 1.0, loss: float = 1.0, data_seconds: float = 0.25) -> None:
        self.now += seconds
        self.metrics.step(StepResult(number, loss, 10.0 * number, 1e-3 * number, 1000, data_seconds, synced=self.now))

    def steps(self, first: int, last: int, **options: float) -> None:
        for number in range(first, last + 1):
            self.step(number, **options)

    def lines(self) -> list[dict[str, Any]]:
        assert self.folder is not None
        return read_lines(self.folder / "metrics.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def logged_steps(path: Path) -> list[int]:
    return [line["step"] for line in read_lines(path)]


def test_first_every_log_freq_th_and_last_step_are_logged(tmp_path: Path, cpu: Device) -> None:
    run = Run(tmp_path / "made" / "by rank 0", cpu)
    run.steps(1, 10)
    assert [line["step"] for line in run.lines()] == [1, 4, 8, 10]  # readable before close
    run.metrics.flush()  # nothing is open
    run.metrics.close()
    run.metrics.close()
    assert [line["step"] for line in run.lines()] == [1, 4, 8, 10]
    assert all(list(line) == KEYS for line in run.lines())


def test_a_window_logs_means_and_last_values(tmp_path: Path, cpu: Device) -> None:
    run = Run(tmp_path, cpu, world_size=2, tokens_seen=500, peak_flops=4e12)
    run.step(1)
    run.step(2, loss=1.0, seconds=1.0, data_seconds=0.5)
    run.step(3, loss=5.0, seconds=2.0, data_seconds=0.25)
    run.step(4, loss=3.0, seconds=3.0, data_seconds=0.0)
    line = run.lines()[1]
    assert line.pop("memory_peak_bytes") > 2**24
    assert line == {
        "step": 4,
        "loss": 3.0,
        "loss_max": 5.0,
        "grad_norm": 40.0,
        "lr": 1e-3 * 4,
        "tokens_seen": 4500,
        "tokens_per_second": 500.0,  # 3,000 tokens in 6 s
        "tokens_per_second_per_device": 250.0,
        "tflops_per_device": 0.5,  # 250 × 2 GFLOPs
        "mfu": 0.125,  # of 4 TFLOP/s
        "step_seconds": 2.0,
        "data_seconds": 0.25,
        "checkpoint_seconds": 0.0,
        "validation_seconds": 0.0,
        "profiling_seconds": 0.0,
        "time": 1007.0,
        "goodput": pytest.approx(6 / 17),  # of 17 s, 10 went before the loop and 1 in waits for data
    }


def test_what_is_left_can_be_flushed_when_a_run_ends_early(tmp_path: Path, cpu: Device) -> None:
    run = Run(tmp_path, cpu)
    run.steps(1, 6)
    run.metrics.flush()
    assert [line["step"] for line in run.lines()] == [1, 4, 6]


def test_mx_time_the_first_step_does_not_spoil_later_throughput(tmp_path: Path, cpu: Device) -> None:
    run = Run(tmp_path, cpu, start_step=5, tokens_seen=5000)
    run.step(6, seconds=100.0)  # start-up, compilation
    run.steps(7, 8)
    first, second = run.lines()
    assert (first["step"], first["tokens_per_second"], first["tokens_seen"]) == (6, 10.0, 6000)
    assert (second["step"], second["tokens_per_second"]) == (8, 1000.0)


def test_mx_time_pauses_are_not_training_time(tmp_path: Path, cpu: Device) -> None:
    run = Run(tmp_path, cpu)
    run.step(1)
    for number in (2, 3, 4):
        run.step(number)
        with run.metrics.pause("checkpoint"):
            run.now += 10.0
        with run.metrics.pause("validation"):
            run.now += 100.0
    run.steps(5, 8)
    _, second, third = run.lines()
    assert second["checkpoint_seconds"] == 20.0  # that of step 4 came after its log
    assert third["checkpoint_seconds"] == 10.0
    for line in (second, third):
        assert (line["tokens_per_second"], line["step_seconds"], line["data_seconds"]) == (1000.0, 1.0, 0.25)


def test_mx_time_a_pause_that_fails_is_counted_too(tmp_path: Path, cpu: Device) -> None:
    run = Run(tmp_path, cpu)
    with pytest.raises(OSError), run.metrics.pause("checkpoint"):
        run.now += 3.0
        raise OSError("disk full")
    run.step(1)
    assert run.lines()[0]["checkpoint_seconds"] == 3.0
    assert run.lines()[0]["step_seconds"] == 1.0


def test_mx_mfu_is_null_without_a_peak(tmp_path: Path, cpu: Device) -> None:
    run = Run(tmp_path, cpu, peak_flops=cpu.peak_flops("bfloat16"))
    run.step(1)
    assert '"mfu": null' in (tmp_path / "metrics.jsonl").read_text()


def test_a_loss_that_is_not_finite_stays_visible(tmp_path: Path, cpu: Device) -> None:
    run = Run(tmp_path, cpu)
    run.step(1, loss=math.inf)
    for number, loss in ((2, 7.0), (3, math.nan), (4, 9.0)):
        run.step(number, loss=loss)
    first, second = run.lines()
    assert (first["loss"], second["loss"], second["loss_max"]) == ("inf", "nan", "nan")
    assert math.isnan(float(second["loss"]))


def test_a_resume_drops_later_lines_and_a_half_one(tmp_path: Path, cpu: Device) -> None:
    run = Run(tmp_path, cpu, total_steps=20)
    run.steps(1, 9)
    run.metrics.close()
    path = tmp_path / "metrics.jsonl"
    kept = path.read_text().splitlines()[:2]
    with path.open("a") as file:
        file.write('{"step": 3, "loss"')  # killed while writing
    assert logged_steps_text(path) == [1, 4, 8, 3]

    resumed = Run(tmp_path, cpu, total_steps=20, start_step=6, tokens_seen=6000)
    resumed.steps(7, 12)
    assert logged_steps(path) == [1, 4, 7, 8, 12]
    assert path.read_text().splitlines()[:2] == kept
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl", "starts.jsonl"}


def logged_steps_text(path: Path) -> list[int]:
    return [int(match) for match in re.findall(r'"step": (\d+)', path.read_text())]


def test_a_resume_drops_damaged_lines(tmp_path: Path, cpu: Device) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\0\0\0\0\n[1]\n{"loss": 2}\n\xff\n{"step": "x"}\n{"step": 2}\n')
    Run(tmp_path, cpu, start_step=2).metrics.close()
    assert logged_steps(path) == [1, 2]


def test_an_earlier_runs_file_is_kept_under_another_name(tmp_path: Path, cpu: Device) -> None:
    for steps in (1, 2, 3):
        run = Run(tmp_path, cpu, Metrics(log_freq=1, progress="none"))
        run.steps(1, steps)
        run.metrics.close()
    assert logged_steps(tmp_path / "metrics.1.jsonl") == [1]
    assert logged_steps(tmp_path / "metrics.2.jsonl") == [1, 2]
    assert logged_steps(tmp_path / "metrics.jsonl") == [1, 2, 3]


def test_an_empty_file_is_not_set_aside(tmp_path: Path, cpu: Device) -> None:
    Run(tmp_path, cpu).metrics.close()
    Run(tmp_path, cpu).metrics.close()
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl", "starts.jsonl"}


def test_without_a_folder_there_is_the_console_alone(
    tmp_path: Path, cpu: Device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    init_logging(0, color=False)
    settings = Metrics(log_freq=1, progress="lines", enable_tensorboard=True, save_for_all_ranks=True)
    run = Run(None, cpu, settings)
    run.step(1)
    run.metrics.close()
    assert "step  1/10" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_write_no_file_and_say_nothing(
    tmp_path: Path, cpu: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    init_logging(0, color=False)
    settings = Metrics(log_freq=1, progress="bar", enable_tensorboard=True)
    run = Run(tmp_path / "absent", cpu, settings, rank=1, world_size=2)
    run.steps(1, 3)
    run.metrics.close()
    assert not (tmp_path / "absent").exists()
    assert capsys.readouterr() == ("", "")


class FixedMemory(Device):
    """A CPU that says to have used rank + 1 TiB at most."""

    def memory(self) -> MemoryUse:
        return MemoryUse((dist.get_rank() + 1) * 2**40, None)


def _log_three_steps(folder: Path) -> None:
    run = Run(folder, FixedMemory("cpu", torch.device("cpu"), "gloo", ""), rank=dist.get_rank(), world_size=2)
    run.steps(1, 3)
    run.metrics.flush()
    run.metrics.close()


def test_memory_is_the_largest_of_all_ranks(tmp_path: Path, worlds: Worlds) -> None:
    worlds(2).run(_log_three_steps, tmp_path)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["memory_peak_bytes"]) for line in lines] == [(1, 2 * 2**40), (3, 2 * 2**40)]


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_same_numbers_and_no_doubled_points(tmp_path: Path, cpu: Device) -> None:
    settings = Metrics(log_freq=2, progress="none", enable_tensorboard=True)
    run = Run(tmp_path, cpu, settings)
    run.step(1, loss=math.nan)
    run.steps(2, 6, loss=2.0)
    run.metrics.close()
    resumed = Run(tmp_path, cpu, settings, start_step=3, tokens_seen=3000)
    resumed.steps(4, 6, loss=3.0)
    resumed.metrics.close()

    scalars = read_scalars(tmp_path / "tb")
    assert set(scalars) == set(KEYS) - {"step", "mfu", "time"}
    assert math.isnan(scalars["loss"][0][1])
    assert scalars["loss"][1:] == [(2, 2.0), (4, 3.0), (6, 3.0)]
    assert scalars["tokens_seen"] == [(1, 1000.0), (2, 2000.0), (4, 4000.0), (6, 6000.0)]


def test_tensorboard_of_all_ranks_goes_to_folders_of_their_own(tmp_path: Path, cpu: Device) -> None:
    settings = Metrics(progress="none", enable_tensorboard=True, save_for_all_ranks=True, save_tb_folder="events")
    for rank in (0, 1):
        run = Run(tmp_path, cpu, settings, rank=rank, world_size=2)
        run.step(1, loss=1.0 + rank)
        run.metrics.close()
    assert read_scalars(tmp_path / "events" / "rank_0")["loss"] == [(1, 1.0)]
    assert read_scalars(tmp_path / "events" / "rank_1")["loss"] == [(1, 2.0)]
    assert not list((tmp_path / "events").glob("events*"))


def test_a_folder_of_events_that_cant_be_is_named(tmp_path: Path, cpu: Device) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r'metrics\.save_tb_folder = "file/tb": Not a directory'):
        Run(tmp_path, cpu, Metrics(progress="none", enable_tensorboard=True, save_tb_folder="file/tb"))


def console_of(tmp_path: Path, cpu: Device, progress: Any, **options: Any) -> None:
    init_logging(0, color=True)
    run = Run(tmp_path, cpu, Metrics(log_freq=4, progress=progress), **options)
    run.step(1, seconds=50.0)
    run.steps(2, 10, loss=2.5)
    run.metrics.close()


def test_mx_mfu_lines_on_cpu_say_that_it_is_not_known(
    tmp_path: Path, cpu: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    console_of(tmp_path, cpu, "lines")
    out, err = capsys.readouterr()
    assert out == "" and "\033" not in err and "\r" not in err
    first, second, _, last = err.splitlines()
    assert "mfu   n/a" in second
    assert " 40%  step  4/10  loss  2.5000 (max  2.5000)  norm     40  lr 4.00e-03" in second
    assert "    1,000 tok/s/device  mfu" in second
    assert "   1.000 s/step (data 25%)" in second
    assert first.endswith("    1k tokens  eta -")
    assert second.endswith("    4k tokens  eta 0:00:06")
    assert last.endswith("   10k tokens  eta 0:00:00")
    assert len({line.index("eta") for line in err.splitlines()}) == 1, "the columns are aligned"


def test_mx_mfu_lines_show_it_when_a_peak_is_known(
    tmp_path: Path, cpu: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    console_of(tmp_path, cpu, "lines", peak_flops=4e12)
    assert "mfu 50.0%" in capsys.readouterr().err.splitlines()[1]


def test_no_progress_prints_nothing_and_keeps_the_file(
    tmp_path: Path, cpu: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    console_of(tmp_path, cpu, "none")
    assert capsys.readouterr() == ("", "")
    assert logged_steps(tmp_path / "metrics.jsonl") == [1, 4, 8, 10]


def test_auto_is_lines_when_stderr_is_no_terminal(
    tmp_path: Path, cpu: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    console_of(tmp_path, cpu, "auto")
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 4 and "\r" not in err


def test_auto_is_a_bar_under_coloured_lines_on_a_terminal(
    tmp_path: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = use_terminal(monkeypatch)
    console_of(tmp_path, cpu, "auto")
    shown = terminal.getvalue()
    assert "\033[36mstep  4/10\033[0m" in shown
    assert re.search(r"10/10 \[", shown)
    plain = re.sub(r"\033\[\d+m", "", shown)
    assert len(re.findall(r"\r *\r?\d\d:\d\d:\d\d +\d+%  step", plain)) == 4, "each line starts at the left edge"


def test_a_bar_can_be_asked_for_without_a_terminal_and_starts_where_the_run_does(
    tmp_path: Path, cpu: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    init_logging(0, color=False)
    run = Run(tmp_path, cpu, Metrics(log_freq=4, progress="bar"), start_step=7)
    run.steps(8, 10)
    run.metrics.close()
    err = capsys.readouterr().err
    assert " 7/10 [" in err and " 10/10 [" in err
