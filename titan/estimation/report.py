"""What is known of a run before it starts, and the same as JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from titan.config.derived import global_batch_size, resolved_steps
from titan.config.job_config import JobConfig
from titan.config.toml_text import to_toml
from titan.estimation.calibrate import Calibration
from titan.estimation.changes import Fitting
from titan.estimation.estimate import RankEstimate, Traffic
from titan.estimation.hardware import Hardware
from titan.estimation.layout import Layout
from titan.estimation.time import BAND, StepTime, exchange_seconds
from titan.models.spec import FlopsPerToken
from titan.parallelisms.parallel_dims import ParallelDims

_MOST_COLUMNS = 4


@dataclass(frozen=True)
class Report:
    """All that is known of a run before it starts.

    Attributes:
        parameters: of the whole model.
        layout: None of a model without a closed form, which then has no time either.
        ranks: estimates of the kinds of ranks.
        closed_form: of the ranks too, where both methods are asked for.
        flops: model FLOPs per token.
        calibration: None without a measured run.
        changes: that would make it fit; none when it does.
    """

    config: JobConfig
    world_size: int
    parameters: int
    layout: Layout | None
    hardware: Hardware
    ranks: Sequence[RankEstimate]
    closed_form: Sequence[RankEstimate]
    time: StepTime | None
    flops: FlopsPerToken
    calibration: Calibration | None
    changes: Sequence[Fitting]

    @property
    def peak(self) -> RankEstimate:
        """The kind of rank that reserves most."""
        return max(self.ranks, key=lambda rank: rank.peak_reserved_bytes)

    @property
    def chosen(self) -> list[RankEstimate]:
        """All kinds of ranks, or of many the first, the one that needs most, and the last."""
        ranks, peak = self.ranks, self.peak
        if len(ranks) <= _MOST_COLUMNS:
            return list(ranks)
        return [rank for rank in ranks if rank is ranks[0] or rank is peak or rank is ranks[-1]]

    @property
    def fits(self) -> bool:
        return self.peak.peak_reserved_bytes <= self.hardware.fit_bytes

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims.from_config(self.config.parallelism, self.world_size)

    @property
    def windows_per_step(self) -> int:
        return global_batch_size(self.config, self.dims.batch_degree)

    @property
    def tokens_per_step(self) -> int:
        return self.windows_per_step * self.config.training.seq_len

    @property
    def tokens_per_second(self) -> float | None:
        """Of one rank; None without a time."""
        return None if self.time is None else self.tokens_per_step / self.world_size / self.time.seconds

    @property
    def mfu(self) -> float | None:
        """A share of 1, by the full-attention count; None where the hardware has no peak of the compute type."""
        peak, speed = self.hardware.peak_flops.get(self.config.training.mixed_precision_param), self.tokens_per_second
        return None if peak is None or speed is None else speed * self.flops.full / peak

    @property
    def hardware_flops(self) -> float:
        """Of a step, over all ranks."""
        return sum(rank.hardware_flops * rank.ranks for rank in self.ranks)

    @property
    def traffic(self) -> list[Traffic]:
        """Of each kind what the rank that sends most of it sends."""
        most: dict[tuple[str, str], Traffic] = {}
        for row in (row for rank in self.ranks for row in rank.traffic):
            kind = row.collective, row.dim
            if kind not in most or row.bytes > most[kind].bytes:
                most[kind] = row
        return list(most.values())

    @property
    def exchanges(self) -> list[tuple[Traffic, float, float]]:
        """The traffic with its seconds, and how many of them nothing hides; none without a time."""
        if self.layout is None or self.time is None:
            return []
        timed = [(row, self.time.scale * exchange_seconds(self.layout, self.hardware, row)) for row in self.traffic]
        return [(row, seconds, seconds * self.time.exposed[row.dim]) for row, seconds in timed]

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return resolved_steps(self.config, self.windows_per_step)

    def as_json(self) -> dict[str, Any]:
        """With keys that stay."""
        peak = self.peak
        return {
            "parameters": self.parameters,
            "peak_active_bytes": peak.peak_active_bytes,
            "peak_reserved_bytes": peak.peak_reserved_bytes,
            "peak_rank": peak.name,
            "peak_at": peak.peak_at,
            "fits": self.fits,
            "breakdown_bytes": dict(peak.breakdown),
            "host_bytes": max(rank.host_bytes for rank in self.ranks),
            "closed_form": self._closed_form_as_json(),
            "model_flops_per_step": self.flops.full * self.tokens_per_step,
            "hardware_flops_per_step": self.hardware_flops,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "mfu": self.mfu,
            "step_seconds": self.time and self.time.seconds,
            "band": BAND,
            "bubble": self.time and self.time.bubble,
            "communication": [vars(row) for row in self.traffic],
            "changes_that_fit": [change.settings for change in self.changes],
            "hardware": self.hardware.name,
            "world_size": self.world_size,
            "method": self.config.estimation.method,
            "torch": version("torch"),
            "config_hash": hashlib.sha256(to_toml(self.config, {}).encode()).hexdigest(),
        }

    def _closed_form_as_json(self) -> dict[str, Any] | None:
        if not self.closed_form:
            return None
        peak = max(self.closed_form, key=lambda rank: rank.peak_reserved_bytes)
        return {
            "peak_active_bytes": peak.peak_active_bytes,
            "peak_reserved_bytes": peak.peak_reserved_bytes,
            "peak_rank": peak.name,
            "breakdown_bytes": dict(peak.breakdown),
            "difference": peak.peak_reserved_bytes / self.peak.peak_reserved_bytes - 1,
        }
