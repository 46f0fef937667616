from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan.config.errors import UserError
from titan.config.loader import load_and_check
from titan.config.toml_text import to_toml
from titan.estimation.calibrate import read_calibration
from titan.estimation.from_config import layout_of
from titan.estimation.hardware import PROFILES
from titan.estimation.time import step_time


def logged(folder: Path, *seconds: float, config: bool = True) -> Path:
    """A run of 8B on 8 ranks with windows of these step times."""
    run = load_and_check(["--job.config_file=llama3_8b.toml"], 8)
    if config:
        (folder / "config.toml").write_text(to_toml(run.config, run.origins))
    rows = [
        {"step": n, "step_seconds": s, "tokens_per_second": 8.0, "tokens_per_second_per_device": 1.0}
        for n, s in enumerate(seconds)
    ]
    rows.insert(1, {"step": 1, "validation_loss": 2.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "metrics.jsonl"


def test_the_factor_is_measured_over_predicted(tmp_path: Path) -> None:
    layout = layout_of(load_and_check(["--job.config_file=llama3_8b.toml"], 8).config, 8)
    predicted = step_time(layout, PROFILES["h100"]).seconds
    calibration = read_calibration(logged(tmp_path, 99.0, predicted, 1.5 * predicted, 9 * predicted), PROFILES["h100"])
    assert calibration.factor == pytest.approx(1.5)
    assert (calibration.windows, calibration.ranks) == (3, 8)


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    file = logged(tmp_path, 1.0, 2.0, 3.0)
    with file.open("a") as more:
        more.write('{"step": 3, "step_sec')
    assert read_calibration(file, PROFILES["h100"]).windows == 2


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"estimation\.calibrate.*No such file"):
        read_calibration(tmp_path / "metrics.jsonl", PROFILES["h100"])
    with pytest.raises(UserError, match=r"no config\.toml beside it"):
        read_calibration(logged(tmp_path, 1.0, 1.0, config=False), PROFILES["h100"])
    with pytest.raises(UserError, match="two logged windows at least"):
        read_calibration(logged(tmp_path, 1.0), PROFILES["h100"])
    (tmp_path / "metrics.jsonl").write_text("step 1\n")
    with pytest.raises(UserError, match=r"not a metrics.jsonl"):
        read_calibration(tmp_path / "metrics.jsonl", PROFILES["h100"])
