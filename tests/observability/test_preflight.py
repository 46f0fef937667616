"""The preflight in gloo worlds in which one rank is made different, and its findings on reports made by hand."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.world import Worlds
from tests.test_train import TORCHRUN, arguments, run
from titan.config.errors import UserError
from titan.config.job_config import Comm
from titan.config.loader import load_and_check
from titan.observability import preflight as module
from titan.observability.device import find_device
from titan.observability.logging import init_logging
from titan.observability.preflight import preflight
from titan.observability.preflight_findings import Report, find


def preflight_here(folder: Path, odd: str, mode: str = "on") -> str:
    """The log of this rank's preflight, or how it ended; the last rank differs in what `odd` says."""
    arguments = [f"--job.dump_folder={folder}", f"--comm.preflight={mode}", "--checkpoint.enable"]
    config = load_and_check(arguments, dist.get_world_size()).config
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as log:
        init_logging(dist.get_rank(), color=False)
        if dist.get_rank() == dist.get_world_size() - 1:
            match odd:
                case "slow":
                    measure = module.matmul_seconds
                    patch.setattr(module, "matmul_seconds", lambda *arguments: 1000 * measure(*arguments))
                case "variable":
                    patch.setenv("NCCL_DEBUG", "INFO")
                case "torch":
                    patch.setattr(module.torch, "__version__", "2.13.0+other")
                case "folder":
                    config.job.dump_folder = "/proc/nothing/can/be/made/here"
                case "elsewhere":
                    config.job.dump_folder = f"{folder}-elsewhere"
        try:
            preflight(config, find_device())
        except UserError as error:
            return f"UserError: {error}"
    return log.getvalue()


@pytest.mark.parametrize("size", [2, 8])
def test_three_lines_where_all_is_well(worlds: Worlds, tmp_path: Path, size: int) -> None:
    said, *silent = worlds(size).run(preflight_here, tmp_path / "new", "nothing")
    assert not any(silent)
    what = [line.partition("preflight: ")[2] for line in said.splitlines() if "WARNING" not in line]
    assert what[0].startswith(f"{size} ranks on 1 host(s), alike: titan ")
    assert what[1].startswith("a matrix product ") and "; 1 MiB to the next rank " in what[1]
    assert what[2].startswith(f"{tmp_path}/new can be written to, ") and "time limits 300 s and 100 s" in what[2]
    assert what[3].startswith("took ") and len(what) == 4
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("odd", "warning"),
    [
        ("slow", "a matrix product took "),
        ("variable", "NCCL_DEBUG isn't equal on all ranks: unset on 1 rank(s), INFO on rank 1 on "),
        ("elsewhere", "rank 1 on {host} doesn't see what rank 0 wrote there"),
    ],
)
def test_what_is_suspicious_is_a_warning_from_rank_0(worlds: Worlds, tmp_path: Path, odd: str, warning: str) -> None:
    said, silent = worlds(2).run(preflight_here, tmp_path, odd)
    host = module.socket.gethostname()
    assert f"WARNING: preflight: {'' if odd != 'elsewhere' else f'job.dump_folder = {tmp_path}: '}" in said
    assert warning.format(host=host) in said and not silent
    if odd == "slow":
        assert f"× the median on rank 1 on {host}" in said


@pytest.mark.parametrize(
    ("odd", "cause"),
    [
        ("folder", "rank 1 on {host} can't write there: [Errno 2] No such file or directory: '/proc/nothing"),
        ("torch", "torch isn't equal on all ranks: 2.13.0"),
    ],
)
def test_what_is_fatal_ends_all_ranks_with_the_cause(worlds: Worlds, tmp_path: Path, odd: str, cause: str) -> None:
    ends = worlds(2).run(preflight_here, tmp_path, odd)
    assert all(end.startswith("UserError: ") and cause.format(host=module.socket.gethostname()) in end for end in ends)


@pytest.mark.slow
def test_the_cause_is_on_the_screen_once(tmp_path: Path) -> None:
    """Under torchrun: the job ends with it, and trains nothing."""
    done = run([*TORCHRUN, "train.py", *arguments(Path("/proc/nothing"), 4), "--comm.preflight=on"])
    assert done.returncode == 1
    assert done.stderr.count("ERROR: job.dump_folder = /proc/nothing: ranks 0, 1 on ") == 1, done.stderr
    assert "step 1/" not in done.stderr


def test_it_is_on_by_itself_beyond_eight_ranks(worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worlds(2).run(preflight_here, tmp_path, "folder", "auto") == ["", ""]
    assert worlds(2).run(preflight_here, tmp_path, "folder", "off") == ["", ""]
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 9)
    monkeypatch.setattr(module, "_examine", lambda *arguments: pytest.fail("examined"))
    with pytest.raises(BaseException, match="examined"):
        preflight(load_and_check([], 1).config, find_device())


# --- the findings


ALIKE = Report(
    host="a",
    device="D",
    versions={"titan": "1", "torch": "2"},
    variables={"NCCL_DEBUG": "WARN"},
    matmul_seconds=0.001,
    send_seconds=0.002,
    clock=1e9,
    folder_error="",
    shares_folder=True,
    write_speed=None,
    free_bytes=10**12,
)


def found(limits: Comm | None = None, checkpoint_bytes: int = 0, **of_ranks: dict[int, object]) -> list[list[str]]:
    """Lines, warnings, errors for eight ranks on two hosts, of which some differ."""
    reports = [replace(ALIKE, host="ab"[rank // 4]) for rank in range(8)]
    for name, values in of_ranks.items():
        for rank, value in values.items():
            reports[rank] = replace(reports[rank], **{name: value})
    return list(find(reports, Path("out"), limits or Comm(), checkpoint_bytes).__dict__.values())


def test_ranks_that_are_alike() -> None:
    assert found() == [
        [
            "8 ranks on 2 host(s), alike: titan 1, torch 2; clocks within 0.00 ms",
            "a matrix product 1.00 ms, at most 1.0 × that (rank 0 on a); "
            "1 MiB to the next rank 2.00 ms, at most 1.0 × that (rank 0 on a)",
            "out can be written to, 1,000 GB free; time limits 300 s and 100 s",
        ],
        [],
        [],
    ]


def test_what_is_different_is_named_with_its_ranks_and_hosts() -> None:
    old = {"titan": "0", "torch": "2"}
    lines, warnings, errors = found(
        versions={2: old, 5: old}, variables={7: {}}, clock={6: 1e9 - 5}, send_seconds={4: 0.1}
    )
    assert errors == ["titan isn't equal on all ranks: 1 on 6 rank(s), 0 on ranks 2, 5 on a, b"]
    assert warnings == [
        "NCCL_DEBUG isn't equal on all ranks: WARN on 7 rank(s), unset on rank 7 on b",
        "clocks differ by 5.0 s: rank 6 on b is -5.0 s off",
        "1 MiB to the next rank took 0.1 s, 50 × the median on rank 4 on b",
    ]
    assert "that differ in NCCL_DEBUG, titan" in lines[0]


def test_a_full_disk_and_limits_that_make_no_sense() -> None:
    _, warnings, _ = found(Comm(init_timeout_seconds=50), 20 * 10**9, free_bytes={3: 10**10})
    assert warnings == [
        "out has 10 GB free, and a checkpoint takes about 20 GB",
        "comm.init_timeout_seconds = 50 is less than comm.train_timeout_seconds = 100, though the first step takes "
        "longer than the others",
    ]
