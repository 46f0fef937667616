"""What the search picks, beside what people chose."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from titan.config.errors import UserError
from titan.config.job_config import JobConfig
from titan.config.loader import load_and_check, load_and_check_plan
from titan.estimation.closed_form import estimate
from titan.estimation.estimate import RankEstimate
from titan.estimation.from_config import layout_of
from titan.estimation.hardware import PROFILES, find_hardware
from titan.estimation.methods import METHODS, Method
from titan.estimation.search import TIE, Candidate, best_first, fitting_layouts
from titan.estimation.search_report import explain, search


def best(*arguments: str, ranks: int) -> list[Candidate]:
    config = load_and_check(arguments, 1).config
    return best_first(fitting_layouts(config, ranks, PROFILES["h100"]))


def test_8b_on_8_is_fsdp() -> None:
    first = best("--job.config_file=llama3_8b.toml", ranks=8)[0].layout
    assert (first.dp_shard, first.tp, first.cp, first.pp) == (8, 1, 1, 1)


def test_405b_on_16384_is_what_the_paper_chose() -> None:
    """arXiv 2407.21783, table 4: TP 8, PP 16, DP 128 for 2,048 windows of 8,192 tokens."""
    started = time.process_time()
    found = best(
        "--job.config_file=llama3_405b.toml", "--training.global_batch_size=2048", "--compile.enable", ranks=16384
    )
    seconds = time.process_time() - started
    first = found[0].layout
    assert (first.tp, first.cp, first.pp, first.dp_shard * first.dp_replicate) == (8, 1, 16, 128)
    assert seconds < 10


def test_a_long_context_is_cut_as_in_the_paper() -> None:
    """TP 8 and CP 16 for 128 windows of 131,072 tokens."""
    found = best(
        "--job.config_file=llama3_405b.toml",
        "--model.flavor=3.1-405B",
        "--training.seq_len=131072",
        "--training.global_batch_size=128",
        "--compile.enable",
        ranks=16384,
    )
    assert (found[0].layout.tp, found[0].layout.cp) == (8, 16)


def test_what_is_found_fits_and_the_first_isnt_slower() -> None:
    found = best("--job.config_file=llama3_70b.toml", "--compile.enable", ranks=64)
    assert len({str(candidate) for candidate in found}) == len(found) == 5
    for candidate in found:
        assert max(rank.peak_reserved_bytes for rank in estimate(candidate.layout)) == candidate.reserved
        assert candidate.reserved <= PROFILES["h100"].fit_bytes
        assert found[0].time.seconds <= candidate.time.seconds * (1 + TIE)
        assert candidate.layout.world_size == 64
        assert candidate.layout.windows_per_step == 64
    assert any("second: " in line for line in explain(found))


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        (["--job.config_file=llama3_8b.toml"], 8),
        (["--job.config_file=llama3_405b.toml", "--training.global_batch_size=64"], 512),
    ],
)
def test_the_file_that_it_writes_is_the_layout(
    arguments: list[str], ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "found" / "best.toml"
    target.parent.mkdir()
    loaded, _ = load_and_check_plan(
        [*arguments, f"--estimation.gpus={ranks}", "--estimation.search", f"--estimation.search_output={target}"],
        1,
        lambda name: find_hardware(name).machine,
    )
    assert search(loaded, ranks) == 0
    printed = capsys.readouterr().out
    assert "best first" in printed and f"written to {target}" in printed
    found = load_and_check([f"--job.config_file={target}"], ranks)
    layout = best_first(fitting_layouts(loaded.config, ranks, PROFILES["h100"]))[0].layout
    assert loaded.config.training.global_batch_size in (-1, layout.windows_per_step)
    written = layout_of(found.config, ranks)
    assert (written.stages, written.rows, written.microbatches, written.accumulation, written.reshard) == (
        layout.stages,
        layout.rows,
        layout.microbatches,
        layout.accumulation,
        layout.reshard,
    )
    assert written.checkpointing.mode == layout.checkpointing.mode
    assert (written.tp, written.cp, written.pp, written.dp_shard, written.dp_replicate) == (
        layout.tp,
        layout.cp,
        layout.pp,
        layout.dp_shard,
        layout.dp_replicate,
    )
    assert found.config.job.description == loaded.config.job.description  # of the file that it extends


def traced_peaks(monkeypatch: pytest.MonkeyPatch, peaks: dict[int, float]) -> None:
    """Let the trace say that layouts of these tp degrees reserve so many GiB."""

    def ranks(job: JobConfig, world_size: int) -> list[RankEstimate]:
        gib = peaks.get(job.parallelism.tensor_parallel_degree)
        if gib is None:
            raise UserError("x: it isn't traced yet")
        (rank,) = estimate(layout_of(job, world_size))
        return [dataclasses.replace(rank, peak_reserved_bytes=round(gib * 2**30))]

    monkeypatch.setitem(METHODS, "trace", Method("tracing a step", ranks))


def test_what_doesnt_fit_by_its_trace_is_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--job.config_file=llama3_8b.toml", "--estimation.search", "--estimation.method=trace"]
    loaded = load_and_check(arguments, 1)
    traced_peaks(monkeypatch, {1: 99.0})
    assert search(loaded, 8) == 0
    printed = capsys.readouterr().out
    assert "dropped: shard 8, microbatches of 1 window(s), checkpointing none: number 1 by the closed form" in printed
    assert "its trace reserves 99.0 GiB rather than " in printed and "above the limit of 74.4" in printed
    assert "memory by trace: " in printed and "not verified: tp 2 × shard 4" in printed  # and stays
    assert "  1.    6,000 tokens/s per GPU" in printed
    traced_peaks(monkeypatch, dict.fromkeys((1, 2, 4, 8), 99.0))
    assert search(loaded, 8) == 3
    printed = capsys.readouterr().out
    assert "no layout fits" in printed and "memory by trace: 0 of 5 layouts fit" in printed


@pytest.mark.slow
def test_the_best_are_verified_by_trace(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--job.config_file=llama3_8b.toml", "--estimation.search", "--estimation.method=trace"]
    started = time.process_time()
    assert search(load_and_check(arguments, 1), 8) == 0
    assert time.process_time() - started < 60
    printed = capsys.readouterr().out
    assert "memory by trace: 5 of 5 layouts fit" in printed
    assert "  1.    6,100 tokens/s per GPU" in printed and "shard 8, " in printed


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_and_check(["--job.config_file=llama3_405b.toml", "--estimation.search"], 1)
    assert search(loaded, 1) == 3
    assert "no layout fits" in capsys.readouterr().out


def test_a_pipeline_cut_by_hand_is_refused() -> None:
    loaded = load_and_check([], 1)
    loaded.config.parallelism.module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["norm", "output"]]
    with pytest.raises(UserError, match=r"leave it out with estimation\.search"):
        search(loaded, 1)
