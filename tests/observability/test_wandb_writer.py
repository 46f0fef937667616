"""titan/observability/wandb_writer.py, without a network: what it keeps is read back from W&B's own file."""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.observability.test_metrics import KEYS, Run
from titan.config.job_config import Metrics
from titan.observability.device import Device

pytest.importorskip("wandb")

SETTINGS = Metrics(log_freq=2, progress="none", enable_wandb=True)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    import wandb

    wandb.teardown()


def read_runs(folder: Path) -> list[tuple[Any, list[dict[str, float]]]]:
    """Of each start of a run that was kept in a folder: W&B's description of it, and the rows."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # only then is all on the disk
    runs = []
    for path in sorted(folder.glob("offline-run-*/*.wandb")):
        described, rows = None, []
        for data in read_records(path):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                described = record.run
            if record.WhichOneof("record_type") == "history":
                items = ((item.key or "/".join(item.nested_key), item) for item in record.history.item)
                rows.append({key: json.loads(item.value_json) for key, item in items})
        runs.append((described, rows))
    return runs


def read_records(path: Path) -> Iterator[bytes]:
    """W&B's file is a log as LevelDB has it: blocks of 32 KiB, in which records lie in pieces behind a header each."""
    content, at, record = path.read_bytes(), 7, b""
    assert content.startswith(b":W&B")
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or a last piece
            yield record
            record = b""


def test_wandb_has_the_same_numbers_and_a_resume_goes_on_with_the_run(tmp_path: Path, cpu: Device) -> None:
    run = Run(tmp_path / "my_run", cpu, SETTINGS, total_steps=8, config={"model": {"name": "tiny"}})
    run.step(1, loss=math.nan)
    run.steps(2, 4, loss=2.0)
    run.metrics.validation(4, 2.5, None)
    run.metrics.close()
    resumed = Run(tmp_path / "my_run", cpu, SETTINGS, start_step=4, now=50.0, total_steps=8)
    resumed.steps(5, 8, loss=1.5)
    resumed.metrics.close()
    (first, early), (second, late) = read_runs(tmp_path / "my_run" / "wandb")
    assert first.run_id == second.run_id == (tmp_path / "my_run" / "wandb_run_id").read_text().strip()
    assert (first.project, first.display_name) == ("titan", "my_run")
    rows = {row.pop("_step"): row for row in [*early, *late]}
    assert list(rows) == [1, 2, 4, 5, 6, 8]
    assert rows[4].pop("validation_loss") == 2.5 and rows[4].pop("validation_perplexity") == math.exp(2.5)
    for line in run.lines():
        if "validation_loss" not in line:
            row = rows[line["step"]]
            assert set(row) - {"_runtime", "_timestamp"} == set(KEYS) - {"step", "mfu"}
            assert {key: row[key] for key in row if key in line} == pytest.approx(
                {key: float(line[key]) for key in row if key in line}, nan_ok=True
            )


def test_wandbs_own_variables_have_the_last_word(tmp_path: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"WANDB_PROJECT": "theirs", "WANDB_NAME": "a name", "WANDB_RUN_ID": "own1d", "WANDB_DIR": str(tmp_path)}
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    run = Run(tmp_path / "run", cpu, SETTINGS)
    run.step(1)
    run.metrics.close()
    ((described, _),) = read_runs(tmp_path / "wandb")
    assert (described.project, described.display_name, described.run_id) == ("theirs", "a name", "own1d")


# A server that refuses, one that never answers, a user without a key: each in a process of its own, to its very end.
_ALONE = """
import sys
from pathlib import Path
from titan.observability import wandb_writer
from titan.observability.logging import init_logging

init_logging(0, color=False)
wandb_writer._CONNECT_SECONDS = 3
writer = wandb_writer.WandbWriter(Path(sys.argv[1]), 0, {"config": {}})
writer.write(1, {"loss": 2.5})
writer.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["refused", "none", "no key"])
def test_a_server_that_cannot_be_reached_costs_seconds_and_no_numbers(tmp_path: Path, answer: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if answer == "refused":
            server.close()
        variables = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "HOME": str(tmp_path), "PYTHONPATH": os.getcwd()}
        variables |= {} if answer == "no key" else {"WANDB_API_KEY": "0" * 40}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")} | variables
        command = [sys.executable, "-c", _ALONE, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "the run is kept in a folder instead, `wandb sync` sends it later" in done.stderr
    ((_, rows),) = read_runs(tmp_path / "wandb")
    assert [(row["_step"], row["loss"]) for row in rows] == [(1, 2.5)]


def test_a_failure_of_wandb_is_told_once_and_ends_nothing(
    tmp_path: Path, cpu: Device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def fail(*_: Any, **__: Any) -> None:
        raise wandb.errors.CommError("its service is gone")

    from titan.observability.logging import init_logging

    run = Run(tmp_path, cpu, SETTINGS)
    init_logging(0, color=False)
    monkeypatch.setattr(wandb.Run, "log", fail)
    run.steps(1, 6)
    run.metrics.close()
    assert capsys.readouterr().err.count("W&B: its service is gone; from here on the run goes on without it") == 1
    assert [line["step"] for line in run.lines()] == [1, 2, 4, 6]
