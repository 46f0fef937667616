"""Memory of an estimate drawn: over one step, and of every kind of rank."""

from __future__ import annotations

from titan.estimation.estimate import CATEGORIES, RankEstimate
from titan.estimation.hardware import FIT_SHARE, GIB, NOT_RESERVED
from titan.estimation.report import Report
from titan.pages.areas import Layer, area_chart, phase_strip
from titan.pages.bars import Bar, bar_chart
from titan.pages.charts import Axes
from titan.pages.lines import Line
from titan.pages.page import Markup, folded, legend, section, table, tag
from titan.pages.scale import gib

# From the ground up: what stays through the step is below what comes and goes.
_GROUND = ("parameters", "optimizer", "gradients", "activations")
STACK = (*_GROUND, *(category for category in CATEGORIES if category not in _GROUND))
COLOUR = {name: number for number, name in enumerate(STACK)}


def step_section(report: Report) -> Markup:
    """What is alive over the step of the rank that needs most: a trace as a timeline, closed forms as bars."""
    peak = report.peak
    traced = any(moment.at is not None for moment in peak.moments)
    others = [rank for rank in report.chosen if rank is not peak]
    if not traced:
        note = (
            "The closed form knows the moments at which memory may peak; the longest counts. "
            "--estimation.method trace draws the whole step."
        )
        content = [legend([(COLOUR[name], _words(name)) for name in STACK if _occurs(peak, name)])]
        content += [_moments(report, rank) for rank in (peak, *others)]
        return section("step", "Memory over one step", content, note)
    note = (
        "What is alive after each allocation and free, in their order, which is not time: of each column the least and "
        "the most. The thin line is what the allocator has taken from the device; not counted: " + NOT_RESERVED
    )
    content = [_timeline(report, peak)]
    content += [folded(rank.name, _timeline(report, rank)) for rank in others if rank.moments]
    return section("step", f"Memory over one step: {peak.name}", content, note)


def _moments(report: Report, rank: RankEstimate) -> Markup:
    top = max(rank.moments, key=lambda moment: moment.active_bytes)
    bars = [
        Bar(
            moment.where + (" (peak)" if moment is top else ""),
            [(COLOUR[name], moment.alive[name], f"{_words(name)}  {gib(moment.alive[name])}") for name in STACK],
            gib(moment.active_bytes),
        )
        for moment in rank.moments
    ]
    limit = report.hardware.fit_bytes, f"limit  {gib(report.hardware.fit_bytes)}"
    return tag("div", [tag("h3", rank.name), bar_chart(bars, limit=limit)])


def _timeline(report: Report, rank: RankEstimate) -> Markup:
    moments = rank.moments
    places = [float(moment.at or 0) for moment in moments]
    layers = [Layer(_words(name), COLOUR[name], [moment.alive[name] for moment in moments]) for name in STACK]
    top = max(moments, key=lambda moment: moment.active_bytes)
    hover = []
    for moment in moments:
        lines = [moment.where, f"alive  {gib(moment.active_bytes)}"]
        lines += [f"{_words(name)}  {gib(moment.alive[name])}" for name in reversed(STACK) if moment.alive[name]]
        lines.append(f"reserved  {gib(moment.reserved_bytes or 0)}")
        hover.append("\n".join(lines))
    reserved = Line("reserved", 7, places, [float(moment.reserved_bytes or 0) for moment in moments])
    limit = report.hardware.fit_bytes
    axes = Axes(
        unit="GiB",
        across="allocations and frees",
        scale=GIB,
        height=320,
        marks=[(float(top.at or 0), rank.peak_active_bytes, f"peak {gib(rank.peak_active_bytes)}: {rank.peak_at}")],
        events=[(float(top.at or 0), "peak")],
    )
    strip = phase_strip(places, [moment.phase for moment in moments])
    return area_chart(
        places, layers, axes, limit=(limit, f"limit {gib(limit)}"), outline=reserved, hover=hover, below=strip
    )


def ranks_section(report: Report) -> Markup:
    """Every kind of rank at its peak, beside what fits."""
    limit = report.hardware.fit_bytes
    bars = [
        Bar(
            f"{rank.name}, {rank.ranks:,} rank(s)",
            [(COLOUR[name], rank.breakdown[name], f"{_words(name)}  {gib(rank.breakdown[name])}") for name in STACK],
            f"{rank.peak_reserved_bytes / GIB:.1f} GiB",
            (rank.peak_reserved_bytes, f"peak reserved  {gib(rank.peak_reserved_bytes)}"),
        )
        for rank in report.ranks
    ]
    shown = [name for name in STACK if any(rank.breakdown[name] for rank in report.ranks)]
    heads = (
        "GiB at the peak",
        "where it is",
        *(_words(name).removesuffix(" parameters") for name in shown),
        "active",
        "reserved",
    )
    rows = [
        (
            rank.name,
            rank.peak_at,
            *(f"{rank.breakdown[name] / GIB:.2f}" for name in shown),
            f"{rank.peak_active_bytes / GIB:.2f}",
            f"{rank.peak_reserved_bytes / GIB:.2f}",
        )
        for rank in report.ranks
    ]
    note = (
        f"Parts: what is alive at the peak. The upright line: peak reserved. Dashed: the limit, {FIT_SHARE:.0%} of "
        f"{report.hardware.memory_gib:g} GiB = {gib(limit)}."
    )
    parts = [legend([(COLOUR[name], _words(name)) for name in shown])]
    parts += [bar_chart(bars, limit=(limit, f"limit  {gib(limit)}")), table(heads, rows, texts=2)]
    return section("ranks", "Ranks against the limit", parts, note)


def _occurs(rank: RankEstimate, category: str) -> bool:
    return any(moment.alive[category] for moment in rank.moments)


def _words(category: str) -> str:
    return category.replace("_", " ")
