"""An estimate as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from titan.config.derived import compiles, microbatch_rows
from titan.estimation.estimate import CATEGORIES, RankEstimate
from titan.estimation.from_config import unknown_blocks
from titan.estimation.hardware import FIT_SHARE, GIB, NOT_RESERVED
from titan.estimation.holdings import holdings
from titan.estimation.methods import METHODS
from titan.estimation.report import Report
from titan.estimation.time import BAND, UNSURE_RANKS, banded, rounded


def lines(report: Report) -> Iterator[str]:
    """For people."""
    yield from _head(report)
    yield ""
    yield from _memory(report)
    yield ""
    yield from _work(report)
    yield ""
    yield from _communication(report)
    yield ""
    yield from _speed(report)
    yield ""
    yield from _in_short(report)


def method(report: Report) -> str:
    """How it was estimated, to follow "by"."""
    return METHODS[report.config.estimation.method].description


def mesh(report: Report) -> str:
    """The degrees of all dimensions."""
    dims = report.dims
    return f"pp {dims.pp} × dp_replicate {dims.dp_replicate} × dp_shard {dims.dp_shard} × cp {dims.cp} × tp {dims.tp}"


def _head(report: Report) -> Iterator[str]:
    dims, model, compat = report.dims, report.config.model, report.config.estimation.compat
    rows = microbatch_rows(report.config)
    microbatches = report.windows_per_step // (rows * dims.batch_degree)
    yield f"{report.config.job.description}: {report.world_size:,} × {report.hardware.name}, by {method(report)}"
    yield f"model: {model.name} {model.flavor}, {report.parameters:,} parameters"
    yield f"mesh: {mesh(report)}"
    yield (
        f"step: {report.windows_per_step:,} windows × {report.config.training.seq_len:,} tokens = "
        f"{report.tokens_per_step:,}, as {microbatches} microbatch(es) of {rows} window(s) on a rank"
    )
    for held in holdings(report.layout) if report.layout and dims.pp > 1 else []:
        yield f"holds: {held}"
    if compat:
        yield f"step of {compat.replace('-', ', ')}: to compare published figures, not what train.py does"


def _memory(report: Report) -> Iterator[str]:
    shown = report.chosen
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
    yield from _methods_compared(report, shown, width)
    if len(shown) < len(report.ranks):
        yield f"  … and {len(report.ranks) - len(shown)} kinds of ranks that need no more"
    yield f"most that is alive over the step of {report.peak.name}, GiB"
    for moment in report.peak.highest:
        yield f"  {moment.where:30}{moment.active_bytes / GIB:8.2f}"
    spare = report.hardware.fit_bytes - report.peak.peak_reserved_bytes
    limit = f"{FIT_SHARE:.0%} of {report.hardware.memory_gib:g} GiB = {report.hardware.fit_bytes / GIB:.1f}"
    verdict = f"fits, with {spare / GIB:.1f} GiB to spare" if spare >= 0 else f"DOESN'T FIT, by {-spare / GIB:.1f} GiB"
    reserved = report.peak.peak_reserved_bytes / GIB
    yield f"{verdict}: {report.peak.name} reserves {reserved:.1f} GiB, the limit is {limit}"
    yield "  more than active, since FSDP's streams have pools of their own, for gathered weights and for gradients"
    yield f"  {NOT_RESERVED}"
    if most := max(rank.host_bytes for rank in report.ranks):
        on_node = min(report.world_size, report.hardware.ranks_per_node)
        yield (
            f"  host memory for what is offloaded: {most / GIB:.1f} GiB a rank, {on_node * most / GIB:.1f} GiB a "
            f"node of {on_node} rank(s), at least: pinned memory is rounded up"
        )
    float8 = report.config.float8.enable_float8_linear and not compiles(report.config, "model")
    if float8 and report.config.estimation.method == "analytic":
        yield "  float8 without torch.compile: what its casts take isn't counted; estimation.method = trace does"
    if report.layout and report.layout.holds_scores and report.config.estimation.method == "analytic":
        yield "  in float32 attention holds whole matrices of scores: more than is counted here, but not by a trace"
    for change in report.changes:
        longer = round(100 * (change.slower - 1))
        time = f"{longer:+} % GPU time per token" if longer else "no slower"
        yield f"  would fit: {change} ({change.reserved_bytes / GIB:.1f} GiB, {time})"


def _methods_compared(report: Report, shown: Sequence[RankEstimate], width: int) -> Iterator[str]:
    """Under a table of traced ranks, what the closed form says of each."""
    closed = {rank.name: rank for rank in report.closed_form}
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


def _work(report: Report) -> Iterator[str]:
    tokens = report.tokens_per_step
    yield "FLOPs of a step, all ranks"
    yield f"  {'model':22}{report.flops.full * tokens:.3e}, attention over the full square"
    yield f"  {'':22}{report.flops.causal * tokens:.3e}, attention counted as causal"
    yield f"  {'hardware':22}{report.hardware_flops:.3e}, with what is computed again; attention over the full square"


def _communication(report: Report) -> Iterator[str]:
    yield "communication of a step, per rank (of each kind the rank that sends most)"
    if not report.traffic:
        yield "  none"
        return
    titles = f"  {'collective':16}{'dimension':14}{'calls':>9}{'GiB':>10}"
    if not report.exchanges:
        yield titles
        for row in report.traffic:
            yield f"  {row.collective:16}{row.dim:14}{row.calls:9,}{row.bytes / GIB:10.3f}"
        return
    yield f"{titles}{'ms':>9}{'exposed ms':>13}"
    for row, seconds, exposed in report.exchanges:
        yield (
            f"  {row.collective:16}{row.dim:14}{row.calls:9,}{row.bytes / GIB:10.3f}"
            f"{rounded(seconds * 1e3):>9}{rounded(exposed * 1e3):>13}"
        )


def _speed(report: Report) -> Iterator[str]:
    speed = report.tokens_per_second
    if report.time is None or speed is None:
        yield f"speed: not estimated. {unknown_blocks(report.config)}"
        return
    seconds, ranks = report.time.seconds, report.world_size
    steps = report.steps
    days = steps * seconds / 86400
    yield f"speed, ± {BAND:.0%}: {_basis(report)}"
    yield f"  {'step':22}{banded(seconds)} s"
    if report.dims.pp > 1:
        yield f"  {'pipeline bubble':22}{report.time.bubble:.0%} of the schedule"
    yield f"  {'tokens/s per GPU':22}{banded(speed)}"
    yield f"  {'tokens/s in all':22}{banded(speed * ranks)}"
    yield f"  {'MFU':22}{'n/a' if report.mfu is None else f'{banded(100 * report.mfu)} %'}"
    yield f"  {f'{steps:,} steps':22}{banded(days)} days, {banded(days * 24 * ranks)} GPU-hours"
    if report.time.unsure:
        yield f"  beyond about {UNSURE_RANKS:,} ranks it is a guess: congestion and stragglers aren't counted"


def _basis(report: Report) -> str:
    if report.calibration is None:
        return "constants of published H100 runs of 2024; --estimation.calibrate scales them by a run of yours"
    own = report.calibration
    return f"scaled by {own.factor:.2f}, as {own.windows} logged window(s) of a run on {own.ranks} rank(s) say"


def _in_short(report: Report) -> Iterator[str]:
    """In the words of an older tool; memory is that of the rank that reserves most."""
    peak = report.peak
    yield f"Estimated model size: {peak.breakdown['parameters'] / 1e9:.2f} GB"
    yield f"Estimated optimizer state size: {peak.breakdown['optimizer'] / 1e9:.2f} GB"
    yield f"Total estimated GPU memory: {peak.peak_reserved_bytes / 1e9:.2f} GB"
    yield f"Estimated FLOP per step: {report.flops.full * report.tokens_per_step:.3e}"
