"""Runs in short: where each is, how it does, and what to know before trusting its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from titan.observability.run_folder import Run
from titan.pages.page import Markup, section, table, tag, tiles
from titan.pages.scale import gib, number, seconds


def facts_section(runs: Sequence[Run], now: float) -> Markup:
    """Figures of one run, or a table of several.

    Args:
        now: unix seconds.
    """
    validated = any(run.validations for run in runs)
    facts = [[fact for fact in _facts(run, now) if validated or fact[0] != "Validation loss"] for run in runs]
    notes = [tag("p", text, class_=kind) for run in runs for kind, text in _remarks(run, len(runs) > 1)]
    if len(runs) == 1:
        return section("short", "In short", [tiles(facts[0]), *notes])
    heads = ("", *(tag("span", [tag("i", class_=f"key c{n}"), run.name]) for n, run in enumerate(runs)))
    rows = []
    for own in zip(*facts, strict=True):
        cells = [tag("div", [value, tag("div", remark, class_="note")]) for _, value, remark in own]
        rows.append((own[0][0], *cells))
    return section("short", "In short", [table(heads, rows, texts=1 + len(runs)), *notes])


def _facts(run: Run, now: float) -> list[tuple[str, str, str]]:
    total, spent = run.total_steps, run.seconds
    rounds = [value for value in run.series("validation_loss")[1] if value is not None and math.isfinite(value)]
    lowest = f"lowest {number(min(rounds))}" if rounds else ""
    step = f"{run.step:,}"
    speed, memory = run.usual("tokens_per_second_per_device"), run.series("memory_peak_bytes")[1]
    most = max((value for value in memory if value is not None), default=None)
    mfu, good = run.usual("mfu"), run.last("goodput")
    return [
        ("Step", step, f"of {total:,}" if total else ""),
        ("State", *_state(run, now)),
        ("Loss", _shown(run.last("loss")), "mean of the last window"),
        ("Validation loss", _shown(run.last("validation_loss")), lowest),
        ("Tokens", _shown(run.last("tokens_seen")), "read so far"),
        ("Tokens/s per device", _shown(speed), "median" if mfu is None else f"median; MFU {percent(mfu)}"),
        ("Memory", "n/a" if most is None else gib(most), "largest peak of any rank"),
        ("Goodput", "n/a" if good is None else percent(good), f"of {seconds(sum(spent.values()))}" if spent else ""),
        ("Starts", f"{len(run.starts)}" if run.starts else "n/a", "" if run.starts else "no starts.jsonl"),
    ]


def _state(run: Run, now: float) -> tuple[str, str]:
    """Whether it is over, as far as the files say."""
    when = run.last("time")
    newest = "" if when is None else f"last line {seconds(max(0.0, now - when), 2)} before this page"
    if run.total_steps is not None and run.step >= run.total_steps:
        return "finished", newest
    if run.starts and run.starts[-1].get("end"):
        return "stopped", newest
    return ("running, or killed" if run.starts else "unknown"), newest


def _shown(value: float | None) -> str:
    text = "n/a" if value is None else number(value)
    return text if value is None or math.isfinite(value) else tag("span", text, class_="bad")


def _remarks(run: Run, named: bool) -> Iterator[tuple[str, str]]:
    """What someone should know who reads the numbers, and how loud it is said."""
    name = f"{run.name}: " if named else ""
    if wrong := run.not_finite:
        where = ", ".join(f"{step:,}" for step in wrong[:8]) + (", …" if len(wrong) > 8 else "")
        yield "note bad", f"{name}loss or gradient norm isn't finite in {len(wrong)} line(s): steps {where}"
    if run.cut:
        yield "note", f"{name}the last line of the file isn't whole: it was being written, or a kill cut it off"
    if run.unreadable:
        yield "note", f"{name}{run.unreadable} line(s) of the file can't be read, and are left out"
    if run.earlier:
        files = ", ".join(run.earlier)
        yield "note", f"{name}earlier runs in this folder: {files}; name such a file instead of the folder to see one"


def percent(value: float) -> str:
    """A share of 1 as text."""
    return f"{100 * value:.1f} %"
