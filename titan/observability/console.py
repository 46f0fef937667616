"""What people see of a run's numbers: a line per log, above a progress bar."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

from titan.config.job_config import Metrics
from titan.observability.logging import ColorName, color_allowed, logger, paint
from titan.observability.metric_writers import ValidationMetrics, WindowMetrics


class Console:
    """One aligned line per log, above a progress bar where `metrics.progress` asks for one; for rank 0.

    Args:
        settings: the [metrics] section.
        total_steps: of the whole run.
        start_step: steps that the run has done already.
    """

    def __init__(self, settings: Metrics, total_steps: int, start_step: int) -> None:
        self._total_steps = total_steps
        self._silent = settings.progress == "none"
        self._color = color_allowed(not settings.disable_color_printing)
        with_bar = settings.progress == "bar" or (settings.progress == "auto" and sys.stderr.isatty())
        self._bar = _open_bar(total_steps, start_step) if with_bar else None

    def advance(self) -> None:
        """Move the bar by one step."""
        if self._bar is not None:
            self._bar.update()

    def show(self, step: int, metrics: WindowMetrics, capacity_bytes: int | None, seconds_left: float | None) -> None:
        """Print a window's metrics. What the device can hold and the time left are None when unknown."""
        if self._silent:
            return
        fields = _fields(step, self._total_steps, metrics, capacity_bytes, seconds_left)
        logger.info("  ".join(paint(text, color) if self._color and color else text for text, color in fields))

    def show_validation(self, step: int, metrics: ValidationMetrics) -> None:
        """Print a validation round."""
        if not self._silent:
            bits = metrics.validation_bits_per_byte
            logger.info(
                f"Validation after step {step}: loss {metrics.validation_loss:.4f}  "
                f"perplexity {metrics.validation_perplexity:.2f}{'' if bits is None else f'  bits/byte {bits:.4f}'}"
            )

    def close(self) -> None:
        """Leave the bar as it is; may be called twice."""
        if self._bar is not None:
            self._bar.close()


def _fields(
    step: int, total_steps: int, metrics: WindowMetrics, capacity_bytes: int | None, seconds_left: float | None
) -> list[tuple[str, ColorName | None]]:
    """The console line's parts, each with its colour."""
    mfu = "mfu   n/a" if metrics.mfu is None else f"mfu {metrics.mfu:5.1%}"
    share = f" ({metrics.memory_peak_bytes / capacity_bytes:3.0%})" if capacity_bytes else ""
    left = "-" if seconds_left is None else str(timedelta(seconds=round(seconds_left)))
    return [
        (f"{step / total_steps:4.0%}", None),
        (f"step {step:{len(str(total_steps))}}/{total_steps}", "cyan"),
        (f"loss {metrics.loss:7.4f} (max {metrics.loss_max:7.4f})", "green"),
        (f"norm {metrics.grad_norm:6.3g}", "yellow"),
        (f"lr {metrics.lr:.2e}", None),
        (f"{metrics.tokens_per_second_per_device:7,.0f} tok/s/device", "blue"),
        (mfu, "magenta"),
        (f"{metrics.step_seconds:6.3f} s/step (data {metrics.data_seconds / metrics.step_seconds:3.0%})", None),
        (f"{metrics.memory_peak_bytes / 2**30:5.1f} GiB{share}", None),
        (f"{_short(metrics.tokens_seen)} tokens", None),
        (f"eta {left}", "dim"),
    ]


def _short(count: int) -> str:
    """A count in six characters: 1.23M."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:5.4g}{letter}"
    return f"{count:6}"


def _open_bar(total_steps: int, start_step: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total_steps, initial=start_step, unit="step", file=sys.stderr, dynamic_ncols=True)
