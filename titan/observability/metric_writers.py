"""What is logged of a run, and where it goes: metrics.jsonl, TensorBoard and the console."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

from titan.config.job_config import Metrics
from titan.observability.logging import ColorName, color_allowed, logger, paint

MetricValues: TypeAlias = Mapping[str, "int | float | str | None"]


@dataclass(frozen=True)
class WindowMetrics:
    """What is logged of a window: the steps since the last log. The names are the keys in metrics.jsonl.

    Attributes:
        loss: mean over the window's steps.
        loss_max: the largest of them; NaN when any is.
        grad_norm, lr: of the last step.
        tokens_seen: since the run began, before resumes too.
        tokens_per_second: over all ranks. All speeds leave pauses out.
        tokens_per_second_per_device: the same divided by the number of ranks.
        tflops_per_device: model TFLOP/s, by the full-attention count (flops.CONVENTION).
        mfu: a share of 1; None when the device's peak is unknown.
        step_seconds: mean time of a step, with waiting for data, without pauses.
        data_seconds: mean time that a step waited for data.
        checkpoint_seconds: how long training stood still in the window for saves, those in the background too; one
            after a logged step is the next window's, so that the one after the run's last step is in no line.
        memory_peak_bytes: the largest peak of any rank.
        fingerprint: of the last step's global batch; left out when metrics.fingerprint is off.
    """

    loss: float
    loss_max: float
    grad_norm: float
    lr: float
    tokens_seen: int
    tokens_per_second: float
    tokens_per_second_per_device: float
    tflops_per_device: float
    mfu: float | None
    step_seconds: float
    data_seconds: float
    checkpoint_seconds: float
    memory_peak_bytes: int
    fingerprint: str | None = None


@dataclass(frozen=True)
class ValidationMetrics:
    """What is logged of a validation round. The names are the keys in metrics.jsonl.

    Attributes:
        validation_loss: mean over all tokens of the set, in nats, by the function that training minimises.
        validation_perplexity: e to the loss.
        validation_bits_per_byte: the loss in bits over the set's bytes of text, which no tokenizer changes; None when
            only its tokens are known.
    """

    validation_loss: float
    validation_perplexity: float
    validation_bits_per_byte: float | None

    @staticmethod
    def of(loss: float, bytes_per_token: float | None) -> ValidationMetrics:
        """
        Args:
            loss: in nats per token.
            bytes_per_token: of the set's text, in UTF-8.
        """
        perplexity = math.exp(loss) if loss < 700 else math.inf  # math.exp overflows from 710 on
        bits = None if bytes_per_token is None else loss / math.log(2) / bytes_per_token
        return ValidationMetrics(loss, perplexity, bits)


class JsonLinesWriter:
    """One JSON object a line, numbers in full precision, each line on its way to disk as soon as it is written.

    An unknown value is null. JSON has no numbers that aren't finite, and a diverged loss must stay visible: those are
    the strings "nan", "inf" and "-inf", which Python's `float` reads.

    Args:
        path: the file; its folder must exist.
        start_step: steps that the run has done already. Later lines, which a resumed run writes again, are dropped, and
            so is a line that a kill cut off. At 0 an existing file belongs to an earlier run: it is renamed to
            `<stem>.1.jsonl`, or the first free number.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        if path.exists():
            if start_step == 0:
                _set_aside(path)
            else:
                _drop_after(path, start_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: MetricValues) -> None:
        """Add one line, `step` first."""
        line = {"step": step} | {key: _json_value(value) for key, value in values.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()


class TensorBoardWriter:
    """The same keys as TensorBoard scalars; values that are unknown, or no numbers, are left out.

    Args:
        folder: where the events go; made when missing.
        start_step: steps that the run has done already; TensorBoard hides later points of earlier runs in this folder.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)

    def write(self, step: int, values: MetricValues) -> None:
        """Add a point to each scalar."""
        for key, value in values.items():
            if value is not None and not isinstance(value, str):
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file; may be called twice."""
        self._writer.close()


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


def open_writers(
    settings: Metrics, dump_folder: Path | None, rank: int, start_step: int
) -> list[JsonLinesWriter | TensorBoardWriter]:
    """The files that this rank writes, none without a dump folder; rank 0 makes it."""
    writers: list[JsonLinesWriter | TensorBoardWriter] = []
    if dump_folder is None:
        return writers
    if rank == 0:
        dump_folder.mkdir(parents=True, exist_ok=True)
        writers.append(JsonLinesWriter(dump_folder / "metrics.jsonl", start_step))
    if settings.enable_tensorboard and (rank == 0 or settings.save_for_all_ranks):
        folder = dump_folder / settings.save_tb_folder
        if settings.save_for_all_ranks:
            folder /= f"rank_{rank}"
        writers.append(TensorBoardWriter(folder, start_step))
    return writers


def _json_value(value: int | float | str | None) -> int | float | str | None:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _set_aside(path: Path) -> None:
    """Rename a file to the first free `<stem>.N<suffix>`; an empty one may as well be used."""
    if path.stat().st_size == 0:
        return
    candidates = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    path.rename(next(candidate for candidate in candidates if not candidate.exists()))


def _drop_after(path: Path, last_step: int) -> None:
    """Keep only whole lines up to a step. A kill leaves the file as it was or as it should be, nothing between."""
    temporary = path.with_name(path.name + ".tmp")
    with path.open("rb") as old, temporary.open("wb") as new:
        new.writelines(line for line in old if _belongs_before(line, last_step))
        new.flush()
        os.fsync(new.fileno())
    temporary.replace(path)


def _belongs_before(line: bytes, last_step: int) -> bool:
    if not line.endswith(b"\n"):  # the kill came in the middle of the line
        return False
    try:
        return bool(json.loads(line)["step"] <= last_step)
    except (ValueError, KeyError, TypeError):  # not a line of ours, or damaged
        return False


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
