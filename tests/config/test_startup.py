"""One process of a job prints; exit statuses; what is asked for beside the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan.config import startup
from titan.config.errors import UserError
from titan.config.loader import load_config
from titan.config.startup import config_from_command_line, exit_on_mistake, save_config

ROOT = Path(__file__).parents[2]


def test_first_rank_prints_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        config_from_command_line(["--training.steps=0"])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: 1 mistake in the config:\n  - command line: --training.steps 0")


def test_other_ranks_wait_for_the_first_before_they_print(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as exit_:
        config_from_command_line(["--training.steps=0"])
    assert exit_.value.code == 2
    assert waits == [startup._WAIT_SECONDS]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("[rank 3] error: 1 mistake")


def test_any_mistake_of_the_users() -> None:
    with pytest.raises(SystemExit), exit_on_mistake():
        raise UserError("no such thing")
    with pytest.raises(ZeroDivisionError), exit_on_mistake():
        1 / 0  # noqa: B018


@pytest.mark.parametrize("size", ["0", "four", "-1", ""])
def test_wrong_world_size(size: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(SystemExit):
        config_from_command_line([])
    assert f"WORLD_SIZE = {size}" in capsys.readouterr().err


def test_world_size_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--parallelism.data_parallel_replicate_degree=4"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert config_from_command_line(arguments).config.parallelism.data_parallel_replicate_degree == 4
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(SystemExit):
        config_from_command_line(arguments)


def test_print_config(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--training.batch_size=4", "--job.print_config"]
    with pytest.raises(SystemExit) as exit_:
        config_from_command_line(arguments)
    assert exit_.value.code == 0
    captured = capsys.readouterr()
    assert "warning: command line: --training.batch_size is an older name" in captured.err
    Path("printed.toml").write_text(captured.out)
    assert load_config(["--job.config_file=printed.toml"]).config == load_config(arguments).config
    for silent in (arguments, ["--help"]):
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(SystemExit) as exit_:
            config_from_command_line(silent)
        assert exit_.value.code == 0
        assert capsys.readouterr().out == ""


def test_save_config_file(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = config_from_command_line(["--job.save_config_file=new/saved.toml", "--training.steps=500"])
    assert load_config(["--job.config_file=new/saved.toml"]).config == loaded.config
    Path("file").write_text("")
    with pytest.raises(SystemExit):
        config_from_command_line(["--job.save_config_file=file/saved.toml"])
    assert 'job.save_config_file = "file/saved.toml"' in capsys.readouterr().err


def test_the_config_in_the_dump_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--job.dump_folder=new/run", "--training.steps=500"]
    saved = Path("new/run/config.toml")
    save_config(load_config([*arguments, "--checkpoint.load_only"]))
    monkeypatch.setenv("RANK", "1")
    save_config(load_config(arguments))
    assert not Path("new").exists()
    monkeypatch.delenv("RANK")
    for description in ("first", "second"):
        loaded = load_config([*arguments, f"--job.description={description}"])
        save_config(loaded)
        assert load_config([f"--job.config_file={saved}"]).config == loaded.config
    assert "steps = 500  # command line" in saved.read_text().splitlines()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r'job\.dump_folder = "new/run": No space left on device'):
        save_config(load_config(arguments))
    assert load_config([f"--job.config_file={saved}"]).config == loaded.config


def test_a_real_process_shows_no_traceback() -> None:
    code = "from titan.config.startup import config_from_command_line; config_from_command_line()"
    result = subprocess.run(
        [sys.executable, "-c", code, "--training.seq_lenn", "64"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 2
    assert "did you mean --training.seq_len?" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.slow
def test_one_process_of_a_real_job_prints() -> None:
    Path("run.py").write_text("from titan.config.startup import config_from_command_line\nconfig_from_command_line()\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
    result = subprocess.run(
        [*torchrun, "run.py", "--training.seq_lenn", "64"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode != 0
    assert result.stderr.count("did you mean --training.seq_len?") == 1
