"""The dry run: what a checked config costs, printed and written."""

from __future__ import annotations

import json
from pathlib import Path

from titan.config.derived import model_sizes
from titan.config.errors import refused_by_system
from titan.config.job_config import JobConfig
from titan.config.loader import LoadedConfig
from titan.estimation.calibrate import read_calibration
from titan.estimation.changes import fitting_changes
from titan.estimation.closed_form import analytic_layout
from titan.estimation.from_config import layout_of, unknown_blocks
from titan.estimation.hardware import find_hardware
from titan.estimation.methods import METHODS
from titan.estimation.report import Report
from titan.estimation.report_text import lines
from titan.estimation.time import step_time
from titan.models.spec import model_families

DOESNT_FIT_STATUS = 3


def make_report(loaded: LoadedConfig, world_size: int) -> Report:
    """The estimate of a checked config.

    Raises:
        UserError: the method doesn't know the model's blocks, or the run to calibrate by can't be read.
    """
    config = loaded.config
    own = config.estimation
    hardware, layout, time, calibration = find_hardware(own.hardware), None, None, None
    if own.method != "trace" or own.calibrate is not None or not unknown_blocks(config):
        layout = layout_of(config, world_size)
        time = step_time(layout, hardware)
    if own.calibrate is not None and time is not None:
        calibration = read_calibration(Path(own.calibrate), hardware)
        time = time.scaled(calibration.factor)
    ranks = METHODS[own.method].ranks(config, world_size)
    fits = max(rank.peak_reserved_bytes for rank in ranks) <= hardware.fit_bytes
    return Report(
        config=config,
        world_size=world_size,
        parameters=_count_parameters(config) if layout is None else layout.model.parameters,
        layout=layout,
        hardware=hardware,
        ranks=ranks,
        closed_form=analytic_layout(config, world_size) if own.method == "both" else [],
        time=time,
        flops=model_families()[config.model.name].flops_per_token(model_sizes(config), config.training.seq_len),
        calibration=calibration,
        changes=[] if fits or own.compat or layout is None else fitting_changes(config, world_size, hardware),
    )


def _count_parameters(config: JobConfig) -> int:
    """Of a model without a closed form."""
    from titan.training.step import count_parameters  # needs torch

    return count_parameters(config)


def estimate(loaded: LoadedConfig, world_size: int) -> int:
    """Print an estimate, and write what [estimation] asks for.

    Returns:
        0, or DOESNT_FIT_STATUS.

    Raises:
        UserError: as `make_report`; or a file can't be written.
    """
    report = make_report(loaded, world_size)
    for line in [*(f"warning: {warning}" for warning in loaded.warnings), *lines(report)]:
        print(line)
    if (target := loaded.config.estimation.json) is not None:
        write_target("json", target, json.dumps(report.as_json(), indent=2) + "\n")
    if (target := loaded.config.estimation.html) is not None:
        from titan.estimation.picture import estimate_page

        write_target("html", target, estimate_page(report))
    return 0 if report.fits else DOESNT_FIT_STATUS


def write_target(name: str, target: str, text: str) -> None:
    """Write what `estimation.<name>` asks for to the file that it names.

    Raises:
        UserError: the file can't be written.
    """
    with refused_by_system(f'estimation.{name} = "{target}"'):
        Path(target).expanduser().write_text(text, encoding="utf-8")
