"""Times scaled by a run that was measured."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from titan.config.errors import UserError
from titan.config.loader import load_and_check
from titan.config.machine import planned_for
from titan.estimation.from_config import layout_of
from titan.estimation.hardware import Hardware
from titan.estimation.time import step_time


@dataclass(frozen=True)
class Calibration:
    """How much longer a measured run took than was predicted for it.

    Attributes:
        factor: measured over predicted seconds of a step.
        windows: logged ones that count.
        ranks: of that run.
    """

    factor: float
    windows: int
    ranks: int


def read_calibration(path: Path, hardware: Hardware) -> Calibration:
    """Compare a run's metrics.jsonl with what is predicted for the config.toml beside it.

    The first window is left out: it has the warm-up in it.

    Raises:
        UserError: a file is missing, or has no speeds.
    """
    key = f'estimation.calibrate = "{path}"'
    config_file = path.parent / "config.toml"
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]  # another is being written, or a kill cut it
    except OSError as error:
        raise UserError(f"{key}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{key}: not a metrics.jsonl: {error}") from error
    if not config_file.is_file():
        raise UserError(f"{key}: no config.toml beside it, which train.py writes, says what was run")
    windows = [row for row in rows if isinstance(row, dict) and row.get("step_seconds")][1:]
    if not windows:
        raise UserError(f"{key}: it needs two logged windows at least, of which the first isn't counted")
    ranks = round(windows[0]["tokens_per_second"] / windows[0]["tokens_per_second_per_device"])
    with planned_for(hardware.machine):
        measured_run = layout_of(load_and_check([f"--job.config_file={config_file}"], ranks).config, ranks)
    measured = statistics.median(row["step_seconds"] for row in windows)
    return Calibration(measured / step_time(measured_run, hardware).seconds, len(windows), ranks)
