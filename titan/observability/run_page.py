"""Runs as one HTML page, side by side: loss, speed, memory, where time went, what was read, how they were set up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from titan.observability.run_facts import facts_section, percent
from titan.observability.run_folder import Run
from titan.observability.run_setup import config_section, moment, starts_section
from titan.pages.bars import Bar, bar_chart
from titan.pages.charts import Axes
from titan.pages.lines import Line, line_chart
from titan.pages.page import Markup, legend, page, section, table, tag
from titan.pages.scale import Range, gib, number, seconds

MOST_RUNS = 8  # as many as there are colours
_GIB = 2**30
# Kinds of wall time in the order of the bar, with their colours.
_KINDS = {
    "training": (2, "training"),
    "data": (5, "waiting for data"),
    "checkpoint": (1, "checkpoints"),
    "validation": (3, "validation"),
    "profiling": (8, "writing traces"),
    "compile": (4, "compiling"),
    "startup": (0, "starting up"),
    "lost": (6, "lost, and done again"),
    "down": (7, "down between starts"),
}


def run_page(runs: Sequence[Run], now: float | None = None) -> str:
    """The page of one run, or of several.

    Args:
        runs: at most MOST_RUNS.
        now: unix seconds; the clock's when None.
    """
    made = time.time() if now is None else now
    names = ", ".join(run.name for run in runs)
    title = f"Run {names}" if len(runs) == 1 else f"{len(runs)} runs: {names}"
    described = runs[0].settings.get("job.description") if len(runs) == 1 else None
    lead = [described.text, " · "] if described else []
    return page(title, [*lead, f"page made {moment(made)}"], _sections(runs, made))


def _sections(runs: Sequence[Run], now: float) -> Iterator[Markup]:
    yield facts_section(runs, now)
    yield _loss(runs)
    yield _chart(runs, "grad_norm", "Gradient norm", "before clipping, of a window's last step")
    yield _chart(runs, "lr", "Learning rate", "that the window's last step used")
    speed = "tokens_per_second_per_device"
    yield _chart(runs, speed, "Throughput", "tokens per second per device, without pauses")
    yield _step_time(runs)
    memory = "GiB, the largest peak of any rank"
    yield _chart(runs, "memory_peak_bytes", "Memory", memory, scale=_GIB, text=gib)
    yield _chart(runs, "tokens_seen", "Data position", "tokens read since the run began", extra=_read(runs))
    shares = {"mfu": ("MFU", "%, by the full-attention count"), "goodput": ("Goodput", "%, of wall time")}
    known = [key for key in shares if any(run.last(key) is not None for run in runs)]
    for key in known:
        yield _chart(runs, key, *shares[key], scale=0.01, text=percent, wide=len(known) == 1)
    yield _wall_time(runs)
    yield starts_section(runs)
    yield config_section(runs)


def _loss(runs: Sequence[Run]) -> Markup:
    lines = _lines(runs, "loss", "mean of a window")
    alone = len(runs) == 1
    if alone:
        steps, values = runs[0].series("loss_max")
        if values != runs[0].series("loss")[1]:
            lines.append(Line("largest of a window", 0, steps, values, "thin"))
    for number_, run in enumerate(runs):
        steps, values = run.series("validation_loss")
        if values:
            name = "validation" if alone else f"{run.name}, validation"
            lines.append(Line(name, 1 if alone else number_, steps, values, "dashed"))
    restarts = _restarts(runs)
    note = "Nats per token."
    if restarts:
        note += f" Dotted upright lines, {len(restarts)}: the run was started again."
    axes = _axes(runs, "loss", height=320)
    return section(
        "loss", "Loss", line_chart(lines, axes, named=len(runs) > 1) if lines else tag("p", "no line has loss"), note
    )


def _chart(
    runs: Sequence[Run],
    key: str,
    title: str,
    unit: str,
    *,
    scale: float = 1.0,
    text: Callable[[float], str] = number,
    extra: Markup | str = "",
    wide: bool = False,
) -> Markup:
    lines = _lines(runs, key, title.lower())
    axes = _axes(runs, unit, zero=True, scale=scale, text=text)
    content = line_chart(lines, axes, named=len(runs) > 1) if lines else tag("p", f"no line has {key}")
    return section(key, title, [content, extra] if extra else content, wide=wide)


def _step_time(runs: Sequence[Run]) -> Markup:
    lines = _lines(runs, "step_seconds", "a step, with its data")
    for number_, run in enumerate(runs):
        steps, values = run.series("data_seconds")
        if values:
            name = "waiting for data" if len(runs) == 1 else f"{run.name}, data"
            lines.append(Line(name, 5 if len(runs) == 1 else number_, steps, values, "dashed"))
    axes = _axes(runs, "seconds, mean of a window", zero=True, text=seconds)
    content = line_chart(lines, axes, named=len(runs) > 1) if lines else tag("p", "no line has step_seconds")
    return section("step_seconds", "Step time", content, wide=False)


def _lines(runs: Sequence[Run], key: str, name: str) -> list[Line]:
    found = []
    for number_, run in enumerate(runs):
        steps, values = run.series(key)
        if any(value is not None for value in values):
            found.append(Line(run.name if len(runs) > 1 else name, number_, steps, values))
    return found


def _axes(runs: Sequence[Run], unit: str, **how: Any) -> Axes:
    """Over steps from 0 on, so that all charts of a page are alike."""
    across = Range(0.0, float(max(1, *(run.step for run in runs))))
    return Axes(unit=unit, across="step", events=_restarts(runs), x=across, **how)


def _restarts(runs: Sequence[Run]) -> list[tuple[float, str]]:
    return [(step, f"{run.name}, {text}" if len(runs) > 1 else text) for run in runs for step, text in run.restarts]


def _read(runs: Sequence[Run]) -> Markup:
    """Where each run is in its data, and whether runs have read the same."""
    prints = [_fingerprints(run) for run in runs]
    rows = []
    for run, own in zip(runs, prints, strict=True):
        tokens = run.last("tokens_seen")
        newest = f"{own[max(own)]} (step {max(own):,})" if own else "not logged"
        rows.append((run.name, "n/a" if tokens is None else f"{tokens:,.0f}", newest))
    parts: list[Markup] = [table(("Run", "Tokens seen", "Fingerprint of the last batch"), rows, texts=3)]
    for run, own in zip(runs[1:], prints[1:], strict=True):
        if shared := sorted(own.keys() & prints[0].keys()):
            other = next((step for step in shared if own[step] != prints[0][step]), None)
            if other is None:
                text = f"{run.name} has read the same as {runs[0].name} in all {len(shared)} logged steps of both"
            else:
                text = f"{run.name} has read something else than {runs[0].name} from logged step {other:,} on"
            parts.append(tag("p", text, class_="note"))
    return tag("div", parts)


def _fingerprints(run: Run) -> dict[int, str]:
    return {row["step"]: str(row["fingerprint"]) for row in run.windows if row.get("fingerprint")}


def _wall_time(runs: Sequence[Run]) -> Markup:
    known = [(run, spent) for run in runs if (spent := run.seconds) and sum(spent.values()) > 0]
    title = "Where wall time went"
    if not known:
        return section("wall_time", title, tag("p", "No starts.jsonl: an older titan wrote this folder."))
    shown = [kind for kind in _KINDS if any(spent.get(kind, 0) > 0 for _, spent in known)]
    bars = []
    for run, spent in known:
        whole = sum(spent.values())
        parts = [
            (_KINDS[kind][0], spent[kind], f"{_KINDS[kind][1]}  {seconds(spent[kind])}, {spent[kind] / whole:.1%}")
            for kind in shown
        ]
        bars.append(Bar(run.name, parts, seconds(whole)))
    rows = []
    for kind in shown:
        cells = [f"{seconds(spent[kind])}, {spent[kind] / sum(spent.values()):.1%}" for _, spent in known]
        rows.append((_KINDS[kind][1], *cells))
    parts_ = [
        legend([_KINDS[kind] for kind in shown]),
        bar_chart(bars),
        table(("", *(run.name for run, _ in known)), rows),
    ]
    missing = [run.name for run in runs if run.seconds is None]
    if missing:
        parts_.append(tag("p", f"No starts.jsonl in {', '.join(missing)}: an older titan wrote it.", class_="note"))
    return section("wall_time", title, parts_, "From the first start to the last line that was logged.")
