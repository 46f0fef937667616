"""An estimate as one HTML page: what a rank holds, memory over the step, the schedule, the traffic, and the search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from titan.estimation.layout import Layout
from titan.estimation.picture_memory import ranks_section, step_section
from titan.estimation.picture_mesh import mesh_section
from titan.estimation.picture_search import search_section
from titan.estimation.pipeline_timeline import KINDS
from titan.estimation.report import Report
from titan.estimation.report_text import lines, mesh, method
from titan.estimation.schedule import timeline_of
from titan.estimation.search import Candidate
from titan.estimation.time import BAND, rounded
from titan.pages.bars import Bar, Box, bar_chart, gantt_chart
from titan.pages.page import Markup, folded, legend, page, section, table, tag, tiles
from titan.pages.scale import gib, seconds

_KIND_COLOURS = {"F": 0, "B": 2, "I": 5, "W": 4}


def estimate_page(report: Report) -> str:
    """The page of one layout."""
    title = f"{report.config.job.description}: {report.world_size:,} × {report.hardware.name}"
    return page(title, _lead(report), _sections(report))


def search_page(fitting: Sequence[Candidate], ranked: Sequence[Candidate], why: Sequence[str], best: Report) -> str:
    """The page of a search, with that of the layout that it found.

    Args:
        fitting: all that fit.
        ranked: the best, in order.
        why: the words on the first.
        best: the estimate of the first.
    """
    title = f"{best.config.job.description}: the fastest of {len(fitting):,} layouts on {best.world_size:,} × "
    return page(title + best.hardware.name, _lead(best), [search_section(fitting, ranked, why, best), *_sections(best)])


def _lead(report: Report) -> str:
    model = report.config.model
    return f"{model.name} {model.flavor}, {report.parameters:,} parameters · mesh: {mesh(report)} · by {method(report)}"


def _sections(report: Report) -> Iterator[Markup]:
    yield _in_short(report)
    if report.layout:
        yield mesh_section(report.layout, report.hardware.ranks_per_node)
    yield step_section(report)
    yield ranks_section(report)
    if report.layout and report.layout.pp > 1:
        yield _schedule(report.layout)
    yield _communication(report)
    yield section(
        "text", "The same as text", folded("as estimation.py prints it", tag("pre", "\n".join(lines(report))))
    )


def _in_short(report: Report) -> Markup:
    peak, limit = report.peak, report.hardware.fit_bytes
    spare = limit - peak.peak_reserved_bytes
    verdict = tag("span", "fits", class_="good") if report.fits else tag("span", "doesn't fit", class_="bad")
    more = "to spare" if spare >= 0 else "too much"
    facts: list[tuple[str, str, str]] = [
        ("Memory", verdict, f"{gib(abs(spare))} {more}"),
        ("Peak reserved", gib(peak.peak_reserved_bytes), f"{peak.name}; limit {gib(limit)}"),
        *_speed(report),
    ]
    content: list[Markup] = [tiles(facts)]
    if report.changes:
        content.append(tag("p", "What would make it fit, cheapest first:"))
        rows = [
            (str(change), gib(change.reserved_bytes), f"{round(100 * (change.slower - 1)):+} %")
            for change in report.changes
        ]
        content.append(table(("Change", "Peak reserved", "GPU time per token"), rows))
    return section("short", "In short", content)


def _speed(report: Report) -> Iterator[tuple[str, str, str]]:
    """Nothing of a model whose time isn't known."""
    speed = report.tokens_per_second
    if report.time is None or speed is None:
        return
    step, band = report.time.seconds, f"± {BAND:.0%}"
    yield "Step", f"{rounded(step)} s", f"{band}; {report.tokens_per_step:,} tokens"
    yield "Tokens/s per GPU", rounded(speed), band
    yield "MFU", "n/a" if report.mfu is None else f"{rounded(100 * report.mfu)} %", band
    if report.dims.pp > 1:
        yield "Pipeline bubble", f"{report.time.bubble:.0%}", "of the schedule"
    gpu_hours = report.steps * step * report.world_size / 3600
    yield f"{report.steps:,} steps", seconds(report.steps * step, 2), f"{rounded(gpu_hours)} GPU-hours"


def _schedule(layout: Layout) -> Markup:
    drawn = timeline_of(layout)
    own = {rank: drawn.stages_of_rank(rank) for rank in range(drawn.ranks)}
    boxes = [
        Box(
            row=slot.rank,
            colour=_KIND_COLOURS[slot.kind],
            later=own[slot.rank].index(slot.stage) % 2 == 1,
            label=str(slot.microbatch),
            start=float(slot.start),
            end=float(slot.end),
            tip=f"{KINDS[slot.kind]} of microbatch {slot.microbatch}, stage {slot.stage}",
        )
        for slot in drawn.slots
    ]
    kinds = [
        (_KIND_COLOURS[kind], word) for kind, word in KINDS.items() if any(slot.kind == kind for slot in drawn.slots)
    ]
    note = (
        f"{layout.schedule}: {layout.microbatches} microbatches of {layout.rows} window(s), {drawn.stages} stages. "
        f"Grey is the bubble, {float(drawn.bubble):.1%} of all ranks' time. Unit of time: the forward pass of a "
        "microbatch through a rank's stages; a backward pass takes two; sending takes none."
    )
    if layout.stages_per_rank() > 1:
        note += " Every second stage of a rank is paler."
    kept = [
        (f"pp {rank}", ", ".join(map(str, own[rank])), f"{float(drawn.peak_of_rank(rank)):g}")
        for rank in range(drawn.ranks)
    ]
    listing = folded("microbatches kept at a time", table(("Rank", "Stages", "In flight at most"), kept, texts=2))
    names = [f"pp {rank}" for rank in range(drawn.ranks)]
    content = [legend(kinds), gantt_chart(names, boxes, float(drawn.total)), listing]
    return section("schedule", "Pipeline schedule", content, note)


def _communication(report: Report) -> Markup:
    title = "Communication of a step"
    if report.time is None or not report.traffic:
        untimed = [(row.collective, row.dim, f"{row.calls:,}", gib(row.bytes)) for row in report.traffic]
        sent = table(("Collective", "Dimension", "Calls", "Sent"), untimed, texts=2) if untimed else tag("p", "none")
        return section("communication", title, sent)
    rows = [
        (row.collective, row.dim, f"{row.calls:,}", gib(row.bytes), seconds(time), seconds(exposed))
        for row, time, exposed in report.exchanges
    ]
    heads = ("Collective", "Dimension", "Calls", "Sent", "Takes", "In the open")
    longest = max(time for _, time, _ in report.exchanges) or 1.0
    bars = [
        Bar(
            f"{row.collective}, {row.dim}",
            [
                (6, exposed, f"in the open  {seconds(exposed)}"),
                (7, time - exposed, f"hidden  {seconds(time - exposed)}"),
            ],
            seconds(time),
        )
        for row, time, exposed in report.exchanges
        if time > longest / 200
    ]
    note = f"Per rank: of each kind the rank that sends most. The step takes {rounded(report.time.seconds)} s."
    parts = [legend([(6, "in the open"), (7, "hidden behind computing")]), bar_chart(bars), table(heads, rows, texts=2)]
    return section("communication", title, parts, note)
