"""What is logged of a run, and the files that it goes to: metrics.jsonl, TensorBoard's events and W&B."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from titan.config.errors import refused_by_system
from titan.config.job_config import Metrics
from titan.observability.json_lines import drop_after, set_aside

MetricValues: TypeAlias = Mapping[str, Any]  # numbers, texts, and None for what is unknown


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
        validation_seconds, profiling_seconds: the same for validation, and for the writing of traces.
        memory_peak_bytes: the largest peak of any rank.
        time: when it was logged, in unix seconds.
        goodput: share of the wall time since the run's first start in which it trained steps that count; None on ranks
            other than 0, which don't know the earlier starts.
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
    validation_seconds: float
    profiling_seconds: float
    memory_peak_bytes: int
    time: float
    goodput: float | None
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


def numbers(values: MetricValues) -> dict[str, float]:
    """Without those that are unknown, or no numbers: what places take that have nothing else."""
    return {key: value for key, value in values.items() if value is not None and not isinstance(value, str)}


class Writer(Protocol):
    """A place that numbers go to."""

    def write(self, step: int, values: MetricValues) -> None:
        """Add the values of a step."""

    def close(self) -> None:
        """Close what is open; may be called twice."""


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
        if start_step == 0:
            set_aside(path)
        elif path.exists():
            drop_after(path, start_step)
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

    `time` is each point's own, for a scalar's 32 bits don't hold it.

    Args:
        folder: where the events go; made when missing.
        start_step: steps that the run has done already; TensorBoard hides later points of earlier runs in this folder.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)

    def write(self, step: int, values: MetricValues) -> None:
        """Add a point to each scalar, at the time of the values."""
        for key, value in numbers(values).items():
            if key != "time":
                self._writer.add_scalar(key, value, step, walltime=values["time"])
        self._writer.flush()

    def close(self) -> None:
        """Close the event file; may be called twice."""
        self._writer.close()


def open_writers(
    settings: Metrics, dump_folder: Path | None, rank: int, start_step: int, description: Mapping[str, Any]
) -> list[Writer]:
    """The files that this rank writes, none without a dump folder, which must exist.

    Args:
        description: of the run, nested, for W&B.

    Raises:
        UserError: metrics.save_tb_folder can't be written to.
    """
    writers: list[Writer] = []
    if dump_folder is None:
        return writers
    if rank == 0:
        writers.append(JsonLinesWriter(dump_folder / "metrics.jsonl", start_step))
    if settings.enable_tensorboard and (rank == 0 or settings.save_for_all_ranks):
        folder = dump_folder / settings.save_tb_folder
        if settings.save_for_all_ranks:
            folder /= f"rank_{rank}"
        with refused_by_system(f'metrics.save_tb_folder = "{settings.save_tb_folder}"'):
            writers.append(TensorBoardWriter(folder, start_step))
    if settings.enable_wandb and rank == 0:
        from titan.observability.wandb_writer import WandbWriter

        writers.append(WandbWriter(dump_folder, start_step, description))
    return writers


def _json_value(value: int | float | str | None) -> int | float | str | None:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
