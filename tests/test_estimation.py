"""`estimation.py` as a user runs it. What it prints is in tests/estimation/golden/, where its output may be sent."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.test_train import clean_environment
from titan.config.errors import UserError
from titan.config.job_config import JobConfig
from titan.config.loader import LoadedConfig, load_and_check_plan
from titan.estimation.estimate import RankEstimate
from titan.estimation.hardware import PROFILES, find_hardware
from titan.estimation.methods import METHODS
from titan.estimation.report import Report
from titan.estimation.report_text import _speed, lines
from titan.estimation.run import DOESNT_FIT_STATUS, estimate, make_report

ROOT = Path(__file__).parents[1]
GOLDEN = {
    "8b_on_8.txt": ["--job.config_file=llama3_8b.toml", "--estimation.gpus=8"],
    "405b_on_512.txt": [
        "--job.config_file=llama3_405b.toml",
        "--estimation.gpus=512",
        "--estimation.hardware=h100-500w",
        "--parallelism.tensor_parallel_degree=8",
        "--parallelism.pipeline_parallel_degree=8",
        "--training.local_batch_size=32",
        "--compile.enable",
    ],
}
KEYS = {
    "parameters",
    "peak_active_bytes",
    "peak_reserved_bytes",
    "peak_rank",
    "peak_at",
    "fits",
    "breakdown_bytes",
    "host_bytes",
    "closed_form",
    "model_flops_per_step",
    "hardware_flops_per_step",
    "tokens_per_second_per_gpu",
    "mfu",
    "step_seconds",
    "band",
    "bubble",
    "communication",
    "changes_that_fit",
    "hardware",
    "world_size",
    "method",
    "torch",
    "config_hash",
}


def planned(*arguments: str) -> tuple[LoadedConfig, int]:
    return load_and_check_plan(arguments, 1, lambda name: find_hardware(name).machine)


def report(*arguments: str) -> Report:
    return make_report(*planned(*arguments))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    estimate(*planned(*GOLDEN[name]))
    assert capsys.readouterr().out == (ROOT / "tests" / "estimation" / "golden" / name).read_text()


def test_lines_of_an_older_tool() -> None:
    made = report(*GOLDEN["8b_on_8.txt"])
    parameters = 8_030_261_248 / 8
    assert list(lines(made))[-4:] == [
        f"Estimated model size: {4 * parameters / 1e9:.2f} GB",
        f"Estimated optimizer state size: {8 * parameters / 1e9:.2f} GB",
        f"Total estimated GPU memory: {made.peak.peak_reserved_bytes / 1e9:.2f} GB",
        f"Estimated FLOP per step: {made.flops.full * 65536:.3e}",
    ]


def test_json_and_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "estimate.json"
    assert estimate(*planned(*GOLDEN["8b_on_8.txt"], f"--estimation.json={target}")) == 0
    found = json.loads(target.read_text())
    assert found.keys() == KEYS
    assert (found["parameters"], found["fits"], found["method"]) == (8_030_261_248, True, "analytic")
    assert sum(found["breakdown_bytes"].values()) == found["peak_active_bytes"]
    assert {"collective", "dim", "calls", "bytes"} == found["communication"][0].keys()


def test_what_doesnt_fit_has_three_changes_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    tight = ["--job.config_file=llama3_8b.toml", "--estimation.gpus=8", "--training.local_batch_size=8"]
    tight.append("--activation_checkpoint.mode=none")
    assert estimate(*planned(*tight)) == DOESNT_FIT_STATUS
    assert "DOESN'T FIT" in capsys.readouterr().out
    made = report(*tight)
    assert len(made.changes) == 3
    assert [change.slower for change in made.changes] == sorted(change.slower for change in made.changes)
    for change in made.changes:
        settings = [f"--{key}={str(value).lower()}" for key, value in change.settings.items()]
        changed = report(*tight, *settings)
        assert changed.fits and changed.peak.peak_reserved_bytes == change.reserved_bytes
        assert changed.layout.windows_per_step == made.layout.windows_per_step


def test_more_ranks_where_nothing_else_helps() -> None:
    changes = report("--job.config_file=llama3_70b.toml", "--estimation.gpus=8").changes
    assert {"estimation.gpus": 32} in [change.settings for change in changes]


def test_bands_have_two_digits() -> None:
    text = "\n".join(_speed(report(*GOLDEN["405b_on_512.txt"])))
    for word in text.replace("(", " ").replace(")", " ").split():
        digits = word.replace(",", "").replace(".", "").strip("0%:;")
        if digits.isdecimal() and word not in ("2024;", "3,000"):
            assert len(digits) <= 2, word


def test_every_hardware_has_an_estimate() -> None:
    for name in PROFILES:
        made = report("--job.config_file=llama3_8b.toml", "--estimation.gpus=8", f"--estimation.hardware={name}")
        assert made.mfu is not None and 0.05 < made.mfu < 0.7


def test_compat_is_another_step() -> None:
    own = report(*GOLDEN["8b_on_8.txt"])
    other = report(*GOLDEN["8b_on_8.txt"], "--estimation.compat=torchtitan-2024")
    assert other.peak.peak_reserved_bytes > own.peak.peak_reserved_bytes + 8 * 2**30
    assert any("to compare published figures" in line for line in lines(other))


SCRIPT = """
import runpy, sys
sys.argv = ["estimation.py", *{arguments!r}]
try:
    runpy.run_path("estimation.py", run_name="__main__")
except SystemExit as ended:
    status = ended.code
assert "torch" not in sys.modules, "torch was imported"
raise SystemExit(status)
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--help"], 0),
        (GOLDEN["405b_on_512.txt"], 0),
        (["--job.config_file=llama3_70b.toml", "--estimation.gpus=8"], 3),
        (["--job.config_file=llama3_8b.toml", "--estimation.gpus=8", "--estimation.search"], 0),
        (["--job.print_config"], 0),
        (["--estimation.gpus=0"], 2),
    ],
)
def test_the_script_needs_no_torch(arguments: list[str], status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(arguments=arguments)],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stderr
    assert (done.stdout if status != 2 else done.stderr).strip()


def test_world_size_comes_from_the_launcher_too() -> None:
    done = subprocess.run(
        [sys.executable, "estimation.py", "--job.config_file=llama3_8b.toml"],
        cwd=ROOT,
        env=clean_environment(WORLD_SIZE="16"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "Llama 3 8B: 16 × h100" in done.stdout


PIPELINE = ("--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=8")


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            (*PIPELINE, f"--parallelism.pipeline_parallel_schedule={schedule}")
            for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "DualPipeV")
        ),
        ("--activation_checkpoint.selective_ac_option=2",),
        ("--activation_checkpoint.mode=memory_budget", "--compile.enable"),
        ("--model.norm_type=np_layernorm", "--parallelism.tensor_parallel_degree=2"),
        ("--model.norm_type=layernorm", "--parallelism.context_parallel_degree=2"),
        ("--optimizer.early_step_in_backward", "--training.max_norm=0"),
        ("--training.dtype=bfloat16", "--parallelism.fsdp_reshard_after_forward=always"),
        (
            "--model.flavor=3.2-1B",
            "--parallelism.tensor_parallel_degree=4",
            "--parallelism.no_enable_sequence_parallel",
        ),
        ("--float8.enable_float8_linear", "--compile.enable", "--float8.enable_fsdp_float8_all_gather"),
    ],
    ids=lambda arguments: arguments[-1].rpartition(".")[2],
)
def test_every_feature_has_an_estimate(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    flavor = () if any("model.flavor" in argument for argument in arguments) else ("--model.flavor=3.1-8B",)
    made = report(*flavor, "--estimation.gpus=8", "--estimation.hardware=h200", *arguments)
    assert made.time.seconds > 0
    assert 0 <= made.time.bubble < 1
    for rank in made.ranks:
        assert min(rank.breakdown.values()) >= 0
        assert 0 < rank.peak_active_bytes < rank.peak_reserved_bytes * 1.01
    assert all(0 <= share <= 1 for share in made.time.exposed.values())
    assert list(lines(made))


def test_both_methods_side_by_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The trace counts, and its table says how far the closed form is from it."""
    given = ["--job.config_file=llama3_8b.toml", "--estimation.gpus=8", "--training.seq_len=2048"]
    given += [f"--estimation.json={tmp_path / 'out.json'}", "--training.enable_cpu_offload"]
    assert estimate(*planned(*given, "--estimation.method=both")) == 0
    out, found = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    (closed,) = report(*given).ranks
    assert found["closed_form"]["peak_reserved_bytes"] == closed.peak_reserved_bytes != found["peak_reserved_bytes"]
    difference = closed.peak_reserved_bytes / found["peak_reserved_bytes"] - 1
    assert found["closed_form"]["difference"] == difference
    assert f"{difference:.1%}" in out
    assert "host memory for what is offloaded: 15.0 GiB a rank, 119.7 GiB a node of 8 rank(s)" in out


def test_a_family_whose_sizes_have_other_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A trace needs no closed form; only times do. This family is a Llama by other names."""
    given = ["--experimental.custom_import=tests.estimation.traced_models", "--estimation.gpus=2"]
    given += ["--model.tokenizer_path=tiny", "--training.seq_len=128", "--estimation.method=trace"]
    own, known = (report(*given, f"--model.name={name}", "--model.flavor=eight") for name in ("renamed", "traced"))
    assert own.ranks == known.ranks
    assert (own.parameters, own.flops, own.tokens_per_step) == (known.parameters, known.flops, known.tokens_per_step)
    assert (own.time, own.tokens_per_second, own.mfu) == (None, None, None)
    target = tmp_path / "out.json"
    arguments = [*given, "--model.name=renamed", "--model.flavor=eight", f"--estimation.json={target}"]
    assert estimate(*planned(*arguments)) == 0
    assert "speed: not estimated. model.name = " in capsys.readouterr().out
    found = json.loads(target.read_text())
    assert found.keys() == KEYS
    assert found["step_seconds"] is None
    with pytest.raises(UserError, match="trace needs none"):
        report(*given[:-1], "--model.name=renamed", "--model.flavor=eight")


def test_a_trace_keeps_libraries_silent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """They warn of what the step of a run might do wrong; here is none."""

    def trace(job: JobConfig, world_size: int) -> list[RankEstimate]:
        warnings.warn("of torch's", stacklevel=1)
        logging.getLogger("torch").warning("of torch's")
        return []

    monkeypatch.setattr("titan.estimation.trace.trace_layout", trace)
    with warnings.catch_warnings(record=True) as given:
        assert METHODS["trace"].ranks(JobConfig(), 1) == []
    assert given == []
    logging.getLogger("torch").warning("of a run")
    assert caplog.messages == ["of a run"]


def test_a_trace_agrees_with_the_closed_form() -> None:
    """8B on 8: what both say of memory within a twentieth, FLOPs and traffic alike."""
    given = ["--job.config_file=llama3_8b.toml", "--estimation.gpus=8", "--training.seq_len=2048"]
    reports = [report(*given, f"--estimation.method={method}") for method in ("analytic", "trace")]
    (closed,), (traced,) = (each.ranks for each in reports)
    assert traced.peak_reserved_bytes == pytest.approx(closed.peak_reserved_bytes, rel=0.05)
    assert traced.hardware_flops == pytest.approx(closed.hardware_flops, rel=1e-3)
    sent = [{(t.collective, t.dim): t.bytes for t in rank.traffic if t.bytes > 1000} for rank in (closed, traced)]
    assert sent[0] == sent[1]
