"""What the dry run says of a run that begins, and what the device says once it has trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan.config.errors import UserError
from titan.config.job_config import JobConfig
from titan.observability.device import Device
from titan.parallelisms.parallel_dims import ParallelDims

if TYPE_CHECKING:
    from titan.estimation.layout import Layout

_GIB = 2**30


@dataclass(frozen=True)
class Prediction:
    """By the closed form (docs/estimation.md): quick, and no part of what is trained.

    Attributes:
        lines: for the log's start.
        reserved_bytes: the most that this rank's allocator is expected to reserve; None where it isn't known.
    """

    lines: list[str]
    reserved_bytes: int | None = None

    def beside(self, device: Device) -> str | None:
        """A line with what the device has reserved so far; None where either isn't known."""
        if self.reserved_bytes is None or not device.reserves_memory:
            return None
        predicted, measured = self.reserved_bytes / _GIB, device.memory().peak_bytes / _GIB
        return (
            f"memory reserved: predicted {predicted:.2f} GiB, measured {measured:.2f} GiB, "
            f"difference {measured - predicted:+.2f} GiB ({measured / predicted - 1:+.1%})"
        )


def predict(config: JobConfig, dims: ParallelDims, pp_rank: int, device: Device) -> Prediction:
    """What a rank will need and how fast the run will be. Never raises: a run needs no prediction.

    Args:
        pp_rank: this process's rank of the pipeline.
    """
    try:
        return _predict(config, dims, pp_rank, device)
    except UserError as error:
        return Prediction([f"no prediction: {error}"])
    except Exception as error:
        return Prediction([f"no prediction: {type(error).__name__}: {error}"])


def _predict(config: JobConfig, dims: ParallelDims, pp_rank: int, device: Device) -> Prediction:
    from titan.estimation.closed_form import estimate
    from titan.estimation.from_config import layout_of

    layout = layout_of(config, dims.world_size)
    if layout.holds_scores:
        return Prediction(
            ["no prediction: in float32 attention holds whole matrices of scores, which it doesn't count"]
        )
    ranks = estimate(layout)
    most = max(ranks, key=lambda rank: rank.peak_reserved_bytes)
    if not device.reserves_memory:
        tensors = most.peak_active_bytes / _GIB
        return Prediction(
            [f"predicted for an accelerator: {tensors:.2f} GiB of tensors at the peak; a CPU's operators take others"]
        )
    capacity = device.memory().capacity_bytes
    of = "" if capacity is None else f" of {capacity / _GIB:.1f}"
    memory = (
        f"predicted: {most.name} reserves up to {most.peak_reserved_bytes / _GIB:.1f}{of} GiB, peak at {most.peak_at}"
    )
    return Prediction([memory, _speed(layout, device)], ranks[pp_rank].peak_reserved_bytes)


def _speed(layout: Layout, device: Device) -> str:
    from titan.estimation.hardware import find_hardware
    from titan.estimation.time import BAND, banded, step_time

    profile = device.hardware_profile()
    if profile is None:
        return f"no prediction of speed: no hardware profile is of {device.name}"
    seconds = step_time(layout, find_hardware(profile)).seconds
    speed = layout.windows_per_step * layout.seq_len / layout.world_size / seconds
    return f"predicted: {banded(seconds)} s per step, {banded(speed)} tokens/s per device, ± {BAND:.0%}"
