"""scripts/benchmark.py: the rows it runs, what it measures of them, and the bound that it compares titan with."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from scripts import benchmark
from scripts.benchmark import Failure, NotRun, Row, markdown, medians_of, plan
from scripts.benchmarks import sizes  # noqa: F401  (registers the family)
from tests import reference_loop
from tests.distributed.runs import TINY, train_here
from tests.distributed.world import Worlds
from titan.config.errors import ConfigError
from titan.config.loader import load_and_check
from titan.models.spec import model_families
from titan.training.step import StepOutcome, TrainStep

TABLES = sorted(Path(benchmark.__file__).parent.glob("benchmarks/*.toml"))


def table(folder: Path, rows: list[str]) -> list[str]:
    """Arguments for a table of one group, whose titan is a tiny one."""
    head = [f"arguments = {json.dumps(TINY)}", "[[groups]]", 'name = "tiny"', "warmup = 1", "steps = 2"]
    (folder / "table.toml").write_text("\n".join([*head, *(f"[[rows]]\n{row}" for row in rows)]))
    return ["--table", str(folder / "table.toml"), "--json", str(folder / "figures.json")]


def test_rows_of_all_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "another.py").write_text("import json\nprint(1)\nprint(json.dumps({'loss': 2.5}))")
    rows = [
        'name = "titan"',
        f'name = "another"\ncommand = "python {tmp_path}/another.py {{warmup}} {{steps}}"',
        'name = "refused"\narguments = ["--training.seq_len=100000"]',
        'name = "mute"\ncommand = "python -c pass"',
    ]
    with pytest.raises(SystemExit) as ended:
        benchmark.main(table(tmp_path, rows))
    assert ended.value.code == 1  # the mute one
    found = {row["name"]: row for row in json.loads((tmp_path / "figures.json").read_text())["rows"]}
    figures = found["titan"]["median"]
    assert figures.keys() >= {"tokens_per_second", "peak_bytes", "seconds_to_first_step", "loss"}
    assert all(value > 0 for name, value in figures.items() if name != "page_faults_per_step")
    if "tokens_per_cpu_second" in figures:
        assert figures["cpu_seconds_per_token"] * figures["tokens_per_cpu_second"] == pytest.approx(1)
    assert found["another"]["median"] == {"loss": 2.5}
    assert found["refused"]["problem"].startswith("refused: 1 mistake in the config: - training.seq_len = 100000")
    assert "no JSON object" in found["mute"]["problem"]
    output = capsys.readouterr().out
    for name in found:
        assert f"\n| {name} | " in output
    assert "\n- tiny, refused: refused: 1 mistake" in output


def test_a_run_that_fails_or_takes_too_long(tmp_path: Path) -> None:
    def row(code: str) -> Row:
        return Row("group", "row", (sys.executable, "-c", code), False, 1, 1)

    def outcome(code: str, seconds: float) -> Any:
        (found,) = benchmark.measure([row(code)], 1, time.monotonic() + seconds).values()
        return found

    failed = outcome("raise ValueError('why')", 60)
    assert isinstance(failed, Failure) and str(failed) == "failed with status 1: ValueError: why"
    start = time.monotonic()
    stopped = outcome("import time; time.sleep(60)", 0.5)
    assert isinstance(stopped, NotRun) and str(stopped).startswith("stopped")
    assert time.monotonic() - start < 30
    left_out = outcome("pass", -1)
    assert isinstance(left_out, NotRun) and str(left_out).startswith("left out")


def test_rows_in_turns(tmp_path: Path) -> None:
    """Both run at once, never at the same time: what one does in its turns, the other does in its own."""
    code = "import json, time\nwhile time.process_time() < 0.6: print(time.monotonic())\n"
    code += "print(json.dumps({'loss': 1, 'tokens_per_second': 2}))"
    rows = [Row("group", name, (sys.executable, "-c", code), False, 1, 1) for name in "ab"]
    times: dict[str, list[float]] = {}

    def keep(text: str) -> dict[str, float]:
        times[str(len(times))] = [float(line) for line in text.splitlines()[:-1]]
        return {"loss": 1.0, "tokens_per_second": 2.0}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "_printed", keep)
        outcomes = benchmark.measure(rows, 1, time.monotonic() + 60, turn=0.1)
    assert list(outcomes.values()) == [{"loss": 1.0}] * 2  # a clock that ran on while a row stood still says nothing
    first, second = times.values()
    owners = [owner for _, owner in sorted([(moment, "a") for moment in first] + [(moment, "b") for moment in second])]
    turns = sum(owner != other for owner, other in pairwise(owners))
    assert 4 <= turns < 40  # side by side, they would alternate at every print


def test_figures_are_those_after_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up of 2 steps, 3 measured ones in windows of 2 and 1; the CPU's clock stands at 10 s per step."""
    lines = [
        {"step": step, "tokens_seen": 100 * step, "step_seconds": seconds, "tokens_per_second": 50.0}
        | {"memory_peak_bytes": 7, "mfu": 0.1, "loss": "nan" if step == 5 else 1.0}
        for step, seconds in ((1, 9.0), (2, 9.0), (4, 2.0), (5, 5.0))
    ]
    usage = benchmark._Usage(0.0, 0)
    monkeypatch.setattr(benchmark, "_usage", lambda pid, processes: usage)
    watch = benchmark._Watch(1, 1, tmp_path / "metrics.jsonl")
    for number, line in enumerate(lines):
        usage = benchmark._Usage(10.0 * line["step"], 4 * line["step"])
        text = "".join(json.dumps(written) + "\n" for written in lines[: number + 1])
        (tmp_path / "metrics.jsonl").write_text(text + '{"step": 99')  # a line that is being written
        watch.look()
    figures = watch.figures(Row("group", "row", (), True, 2, 3))
    assert figures["tokens_per_second"] == 300 / (2 * 2.0 + 5.0)
    assert figures["mfu"] == pytest.approx(0.1 / 50 * 300 / 9)
    assert figures["tokens_per_cpu_second"] == 300 / 30
    assert figures["page_faults_per_step"] == 4
    assert figures["peak_bytes"] == 7
    assert figures["loss"] != figures["loss"]
    with pytest.raises(Failure, match="ended before step 6"):
        watch.figures(Row("group", "row", (), True, 2, 4))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="not Linux")
def test_cpu_time_is_that_of_the_process() -> None:
    before = benchmark._usage(os.getpid(), 1)
    cpu = time.process_time()
    while time.process_time() < cpu + 0.2:
        pass
    after = benchmark._usage(os.getpid(), 1)
    assert before is not None and after is not None
    assert after.cpu_seconds - before.cpu_seconds == pytest.approx(0.2, abs=0.05)
    assert benchmark._usage(2**22 + 1, 1) is None  # no process has this number


def test_medians_and_ratios() -> None:
    rounds = [{"tokens_per_second": speed, "loss": 1.0} for speed in (3.0, 100.0, 4.0)]
    first, second = (Row("S", name, (), True, 1, 1) for name in ("a", "b"))
    medians = {first: medians_of(rounds), second: medians_of([{"tokens_per_second": 8.0}])}
    assert medians[first] == {"tokens_per_second": 4.0, "loss": 1.0}
    lines = markdown(medians, {}, "tokens_per_second").splitlines()
    assert lines[2:] == [
        "| S | ratio | tokens/s | last loss |",
        "|---|---:|---:|---:|",
        "| a | 1.000 | 4 | 1.0000 |",
        "| b | 2.000 | 8 | – |",
    ]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_tables_hold_configs_that_are_accepted(path: Path) -> None:
    """Or refused because this machine has no GPU, and for no other reason."""
    rows = [row for row in plan(["--table", str(path)]).rows if row.of_titan]
    assert len({(row.group, row.name) for row in rows}) == len(rows) > 0
    for row in rows:
        try:
            load_and_check(list(row.command[row.command.index("train.py") + 1 :]), 1)
        except ConfigError as error:
            assert all("needs a GPU" in mistake for mistake in error.mistakes), row.name


@pytest.mark.parametrize("size", list(reference_loop.SIZES))
def test_the_bound_is_the_same_model(size: str) -> None:
    family = model_families()["benchmark"]
    with torch.device("meta"):
        ours = family.build(family.flavors[size])
    theirs = reference_loop.Llama("S") if size == "S" else None
    shapes = sorted(tuple(parameter.shape) for parameter in ours.parameters())
    dim, layers, heads, kv_heads, ffn, vocabulary, *_ = reference_loop.SIZES[size]
    kv = dim // heads * kv_heads
    expected = layers * [
        (dim, dim),
        (dim, dim),
        (kv, dim),
        (kv, dim),
        (ffn, dim),
        (ffn, dim),
        (dim, ffn),
        (dim,),
        (dim,),
    ]
    assert shapes == sorted([*expected, (vocabulary, dim), (vocabulary, dim), (dim,)])
    if theirs is not None:
        assert shapes == sorted(tuple(parameter.shape) for parameter in theirs.parameters())


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_bounds_chunked_loss_is_the_loss(chunks: int) -> None:
    torch.manual_seed(0)
    h, weight = (torch.randn(rows, 16, requires_grad=True) for rows in (24, 101))
    labels = torch.randint(101, (24,))
    loss = F.cross_entropy(h @ weight.T, labels)
    expected = (loss, *torch.autograd.grad(loss, (h, weight)))
    found = reference_loop.chunked_loss(h, weight, labels, chunks, reference_loop.chunk_of_loss)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_overhead_of_a_step(worlds: Worlds, tmp_path: Path) -> None:
    """What isn't model, loss and optimizer, such as data, metrics and agreement: under 2 % of a step of size S."""
    assert worlds(1).run(_share_outside_the_step, str(tmp_path))[0] < 0.02


def _share_outside_the_step(folder: str) -> float:
    inside: list[float] = []
    run = TrainStep.run

    def timed(*args: Any, **keywords: Any) -> StepOutcome:
        start = time.perf_counter()
        outcome = run(*args, **keywords)
        inside.append(time.perf_counter() - start)
        return outcome

    arguments = ["--experimental.custom_import=scripts.benchmarks.sizes", "--model.name=benchmark", "--model.flavor=S"]
    arguments += ["--training.mixed_precision_param=float32", "--training.seq_len=256", "--training.steps=16"]
    arguments += ["--metrics.log_freq=1", "--metrics.progress=none", f"--job.dump_folder={folder}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "run", timed)
        rows = train_here(arguments)
    shares = [1 - spent / row["step_seconds"] for spent, row in zip(inside, rows, strict=True)]
    return statistics.median(shares[4:])
