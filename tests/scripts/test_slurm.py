"""scripts/slurm/titan.sbatch with stand-ins for Slurm's commands and torchrun."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/slurm/titan.sbatch"

STANDINS = {
    "srun": 'shift; exec "$@"',
    # Saves for a moment when it is asked to, as the real one's workers do.
    "torchrun": 'echo "$@" >torchrun-was; trap "sleep 0.5; echo saved >saved; exit 1" USR1; echo >runs\n'
    'for i in $(seq "${TENTHS:-300}"); do sleep 0.1; done; exit "${STATUS:-0}"',
    "scontrol": 'case "$1" in hostnames) ;; show) [[ -n ${NO_SLURM-} ]] && exit 1; printf "node7\\nnode8\\n" ;;\n'
    '*) echo "$@" >>scontrol-was ;; esac',
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    for name, text in STANDINS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    return tmp_path


def start(folder: Path, **variables: str) -> subprocess.Popen[str]:
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "41234"}
    environment = os.environ | slurm | variables | {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(SCRIPT), "--job.config_file", "debug.toml", "--job.description", "two words"]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert path.exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_saves_and_queues_the_job_again(folder: Path, number: signal.Signals) -> None:
    process = start(folder)
    wait_for(folder / "runs")
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0, output
    assert (folder / "saved").exists()  # before that
    assert (folder / "scontrol-was").read_text() == "requeue 41234\n"


@pytest.mark.parametrize("status", [0, 1])
def test_an_end_of_its_own_is_not_queued_again(folder: Path, status: int) -> None:
    process = start(folder, TENTHS="1", STATUS=str(status))
    output, _ = process.communicate(timeout=20)
    assert process.returncode == status, output
    assert not (folder / "scontrol-was").exists()


def test_la_multinode_what_torchrun_is_told(folder: Path) -> None:
    start(folder, TENTHS="1").communicate(timeout=20)
    words = (folder / "torchrun-was").read_text()
    assert "--nnodes=2 " in words and "--rdzv_endpoint=node7:21234 " in words and "SIGUSR1" in words
    assert words.endswith("train.py --job.config_file debug.toml --job.description two words\n")


def test_la_multinode_without_slurm_it_fails(folder: Path) -> None:
    """Never a job of one node on localhost."""
    for variables in ({"NO_SLURM": "1"}, {"SLURM_JOB_NODELIST": ""}):
        process = start(folder, **variables)
        output, _ = process.communicate(timeout=20)
        assert process.returncode != 0, output
        assert not (folder / "torchrun-was").exists()


def test_shellcheck_finds_nothing() -> None:
    program = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("shellcheck isn't installed")
    for script in [SCRIPT, *(ROOT / "scripts").glob("*.sh")]:
        done = subprocess.run([program, str(script)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
