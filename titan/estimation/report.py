"""An estimate as text and as JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from titan.config.derived import compiles, global_batch_size, microbatch_rows, resolved_steps
from titan.config.job_config import JobConfig
from titan.config.toml_text import to_toml
from titan.estimation.calibrate import Calibration
from titan.estimation.changes import Fitting
from titan.estimation.estimate import CATEGORIES, RankEstimate, Traffic
from titan.estimation.from_config import unknown_blocks
from titan.estimation.hardware import FIT_SHARE, GIB, NOT_RESERVED, Hardware
from titan.estimation.holdings import holdings
from titan.estimation.layout import Layout
from titan.estimation.methods import METHODS
from titan.estimation.time import BAND, UNSURE_RANKS, StepTime, banded, exchange_seconds, rounded
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

    def lines(self) -> Iterator[str]:
        """For people."""
        yield from self._head()
        yield ""
        yield from self._memory()
        yield ""
        yield from self._work()
        yield ""
        yield from self._communication()
        yield ""
        yield from self._speed()
        yield ""
        yield from self._in_short()

    def _head(self) -> Iterator[str]:
        dims, model, compat = self.dims, self.config.model, self.config.estimation.compat
        degrees = f"pp {dims.pp} × dp_replicate {dims.dp_replicate} × dp_shard {dims.dp_shard} × cp {dims.cp}"
        rows = microbatch_rows(self.config)
        microbatches = self.windows_per_step // (rows * dims.batch_degree)
        method = METHODS[self.config.estimation.method].description
        yield f"{self.config.job.description}: {self.world_size:,} × {self.hardware.name}, by {method}"
        yield f"model: {model.name} {model.flavor}, {self.parameters:,} parameters"
        yield f"mesh: {degrees} × tp {dims.tp}"
        yield (
            f"step: {self.windows_per_step:,} windows × {self.config.training.seq_len:,} tokens = "
            f"{self.tokens_per_step:,}, as {microbatches} microbatch(es) of {rows} window(s) on a rank"
        )
        for held in holdings(self.layout) if self.layout and dims.pp > 1 else []:
            yield f"holds: {held}"
        if compat:
            yield f"step of {compat.replace('-', ', ')}: to compare published figures, not what train.py does"

    def _memory(self) -> Iterator[str]:
        shown = self.chosen
        names = [rank.name for rank in shown]
        width = max(8, *map(len, names), *(len(rank.peak_at) for rank in shown))
        yield f"{'memory, GiB':24}" + "  ".join(name.rjust(width) for name in names)
        rows: list[tuple[str, list[float]]] = [
            (category.replace("_", " "), [rank.breakdown[category] for rank in shown]) for category in CATEGORIES
        ]
        rows.append(("peak active", [rank.peak_active_bytes for rank in shown]))
        rows.append(("peak reserved", [rank.peak_reserved_bytes for rank in shown]))
        for label, values in rows:
            yield f"  {label:22}" + "  ".join(f"{value / GIB:{width}.2f}" for value in values)
        yield f"  {'peak at':22}" + "  ".join(rank.peak_at.rjust(width) for rank in shown)
        yield from self._methods_compared(shown, width)
        if len(shown) < len(self.ranks):
            yield f"  … and {len(self.ranks) - len(shown)} kinds of ranks that need no more"
        yield f"most that is alive over the step of {self.peak.name}, GiB"
        for moment in self.peak.highest:
            yield f"  {moment.where:30}{moment.active_bytes / GIB:8.2f}"
        spare = self.hardware.fit_bytes - self.peak.peak_reserved_bytes
        limit = f"{FIT_SHARE:.0%} of {self.hardware.memory_gib:g} GiB = {self.hardware.fit_bytes / GIB:.1f}"
        verdict = (
            f"fits, with {spare / GIB:.1f} GiB to spare" if spare >= 0 else f"DOESN'T FIT, by {-spare / GIB:.1f} GiB"
        )
        reserved = self.peak.peak_reserved_bytes / GIB
        yield f"{verdict}: {self.peak.name} reserves {reserved:.1f} GiB, the limit is {limit}"
        yield "  more than active, since FSDP's streams have pools of their own, for gathered weights and for gradients"
        yield f"  {NOT_RESERVED}"
        if most := max(rank.host_bytes for rank in self.ranks):
            on_node = min(self.world_size, self.hardware.ranks_per_node)
            yield (
                f"  host memory for what is offloaded: {most / GIB:.1f} GiB a rank, {on_node * most / GIB:.1f} GiB a "
                f"node of {on_node} rank(s), at least: pinned memory is rounded up"
            )
        float8 = self.config.float8.enable_float8_linear and not compiles(self.config, "model")
        if float8 and self.config.estimation.method == "analytic":
            yield "  float8 without torch.compile: what its casts take isn't counted; estimation.method = trace does"
        if self.layout and self.layout.holds_scores and self.config.estimation.method == "analytic":
            yield "  in float32 attention holds whole matrices of scores: more than is counted here, but not by a trace"
        for change in self.changes:
            longer = round(100 * (change.slower - 1))
            time = f"{longer:+} % GPU time per token" if longer else "no slower"
            yield f"  would fit: {change} ({change.reserved_bytes / GIB:.1f} GiB, {time})"

    def _methods_compared(self, shown: Sequence[RankEstimate], width: int) -> Iterator[str]:
        """Under a table of traced ranks, what the closed form says of each."""
        closed = {rank.name: rank for rank in self.closed_form}
        pairs = [(rank, closed[rank.name]) for rank in shown if rank.name in closed]
        if not pairs or len(pairs) < len(shown):
            return
        for label, values in (
            ("active", [other.peak_active_bytes for _, other in pairs]),
            ("reserved", [other.peak_reserved_bytes for _, other in pairs]),
        ):
            yield f"  {f'closed form, {label}':22}" + "  ".join(f"{value / GIB:{width}.2f}" for value in values)
        apart = [other.peak_reserved_bytes / rank.peak_reserved_bytes - 1 for rank, other in pairs]
        yield f"  {'  over the trace':22}" + "  ".join(f"{difference:{width}.1%}" for difference in apart)

    def _work(self) -> Iterator[str]:
        tokens = self.tokens_per_step
        yield "FLOPs of a step, all ranks"
        yield f"  {'model':22}{self.flops.full * tokens:.3e}, attention over the full square"
        yield f"  {'':22}{self.flops.causal * tokens:.3e}, attention counted as causal"
        yield f"  {'hardware':22}{self.hardware_flops:.3e}, with what is computed again; attention over the full square"

    def _communication(self) -> Iterator[str]:
        yield "communication of a step, per rank (of each kind the rank that sends most)"
        if not self.traffic:
            yield "  none"
            return
        titles = f"  {'collective':16}{'dimension':14}{'calls':>9}{'GiB':>10}"
        if not self.exchanges:
            yield titles
            for row in self.traffic:
                yield f"  {row.collective:16}{row.dim:14}{row.calls:9,}{row.bytes / GIB:10.3f}"
            return
        yield f"{titles}{'ms':>9}{'exposed ms':>13}"
        for row, seconds, exposed in self.exchanges:
            yield (
                f"  {row.collective:16}{row.dim:14}{row.calls:9,}{row.bytes / GIB:10.3f}"
                f"{rounded(seconds * 1e3):>9}{rounded(exposed * 1e3):>13}"
            )

    def _speed(self) -> Iterator[str]:
        speed = self.tokens_per_second
        if self.time is None or speed is None:
            yield f"speed: not estimated. {unknown_blocks(self.config)}"
            return
        seconds, ranks = self.time.seconds, self.world_size
        steps = self.steps
        days = steps * seconds / 86400
        yield f"speed, ± {BAND:.0%}: {self._basis()}"
        yield f"  {'step':22}{banded(seconds)} s"
        if self.dims.pp > 1:
            yield f"  {'pipeline bubble':22}{self.time.bubble:.0%} of the schedule"
        yield f"  {'tokens/s per GPU':22}{banded(speed)}"
        yield f"  {'tokens/s in all':22}{banded(speed * ranks)}"
        yield f"  {'MFU':22}{'n/a' if self.mfu is None else f'{banded(100 * self.mfu)} %'}"
        yield f"  {f'{steps:,} steps':22}{banded(days)} days, {banded(days * 24 * ranks)} GPU-hours"
        if self.time.unsure:
            yield f"  beyond about {UNSURE_RANKS:,} ranks it is a guess: congestion and stragglers aren't counted"

    def _basis(self) -> str:
        if self.calibration is None:
            return "constants of published H100 runs of 2024; --estimation.calibrate scales them by a run of yours"
        own = self.calibration
        return f"scaled by {own.factor:.2f}, as {own.windows} logged window(s) of a run on {own.ranks} rank(s) say"

    def _in_short(self) -> Iterator[str]:
        """In the words of an older tool; memory is that of the rank that reserves most."""
        peak = self.peak
        yield f"Estimated model size: {peak.breakdown['parameters'] / 1e9:.2f} GB"
        yield f"Estimated optimizer state size: {peak.breakdown['optimizer'] / 1e9:.2f} GB"
        yield f"Total estimated GPU memory: {peak.peak_reserved_bytes / 1e9:.2f} GB"
        yield f"Estimated FLOP per step: {self.flops.full * self.tokens_per_step:.3e}"
