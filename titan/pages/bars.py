"""Horizontal bars in parts, and a pipeline's schedule as rows of boxes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from titan.pages.page import Markup, tag
from titan.pages.scale import HEIGHT, WIDTH, Range, tick_labels, ticks

_NUMBERED, _SINGLE = 160, 3000  # boxes of a schedule that still have a number to read, and a tip of their own


@dataclass(frozen=True)
class Bar:
    """A bar of parts.

    Attributes:
        name: before it.
        parts: number of the colour, length, and what to say of it.
        value: text behind it.
        mark: a place on it, such as what is reserved beside what is used.
    """

    name: str
    parts: Sequence[tuple[int, float, str]]
    value: str
    mark: tuple[float, str] | None = None


def bar_chart(bars: Sequence[Bar], *, limit: tuple[float, str] | None = None) -> Markup:
    """Bars below each other, to the same scale, that of the longest.

    Args:
        limit: a length that none should pass, and its name.
    """
    lengths = [sum(length for _, length, _ in bar.parts) for bar in bars] + [bar.mark[0] for bar in bars if bar.mark]
    whole = max([*lengths, limit[0] if limit else 0.0]) * 1.01 or 1.0
    cells = []
    for bar in bars:
        pieces, start = [], 0.0
        for colour, length, text in bar.parts:
            if length > 0:
                place = f"left:{100 * start / whole:.3f}%;width:{100 * length / whole:.3f}%"
                pieces.append(tag("i", class_=f"c{colour}", style=place, data_tip=text))
            start += length
        if bar.mark:
            pieces.append(tag("u", style=f"left:{100 * bar.mark[0] / whole:.3f}%", data_tip=bar.mark[1]))
        if limit:
            pieces.append(tag("b", style=f"left:{100 * limit[0] / whole:.3f}%", data_tip=limit[1]))
        cells += [
            tag("div", bar.name, class_="name"),
            tag("div", bar.value, class_="value"),
            tag("div", pieces, class_="bar"),
        ]
    return tag("div", cells, class_="bars")


@dataclass(frozen=True)
class Box:
    """What a row of a schedule does from `start` to `end`."""

    row: int
    colour: int
    later: bool
    label: str
    start: float
    end: float
    tip: str


def gantt_chart(names: Sequence[str], boxes: Sequence[Box], end: float) -> Markup:
    """A row per name. Boxes have numbers where they are few, and tips unless they are very many."""
    rows = []
    of_row: dict[int, list[Box]] = defaultdict(list)
    for box in boxes:
        of_row[box.row].append(box)
    draw = _single if len(boxes) <= _SINGLE else _together
    numbered = len(boxes) <= _NUMBERED * max(1, len(names) // 4)
    across = Range(0.0, end)
    for row, name in enumerate(names):
        svg = tag(
            "svg",
            draw(of_row[row], across),
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            preserveAspectRatio="none",
            role="img",
            aria_label=name,
        )
        texts = [
            tag("span", box.label, style=f"left:{50 * (across.share(box.start) + across.share(box.end)):.2f}%")
            for box in of_row[row]
            if numbered
        ]
        rows.append(tag("div", [tag("div", name), tag("div", [svg, *texts], class_="lane")], class_="row"))
    values = ticks(across, 10)
    scale = [
        tag("span", text, style=f"left:{100 * across.share(value):.2f}%")
        for value, text in zip(values, tick_labels(values), strict=True)
    ]
    rows.append(tag("div", [tag("div", "time"), tag("div", scale, class_="scale")], class_="row"))
    return tag("div", tag("div", rows, class_="gantt"), class_="scroll")


def _rectangle(box: Box, across: Range) -> str:
    left, right = WIDTH * across.share(box.start), WIDTH * across.share(box.end)
    return f"M{left:.2f} 0H{right:.2f}V{HEIGHT}H{left:.2f}z"


def _kind(box: Box) -> str:
    return f"box c{box.colour}{' later' if box.later else ''}"


def _single(boxes: Sequence[Box], across: Range) -> list[Markup]:
    return [tag("path", d=_rectangle(box, across), class_=_kind(box), data_tip=box.tip) for box in boxes]


def _together(boxes: Sequence[Box], across: Range) -> list[Markup]:
    """One path per colour: thousands of elements make a page slow."""
    paths: dict[str, list[str]] = defaultdict(list)
    for box in boxes:
        paths[_kind(box)].append(_rectangle(box, across))
    return [tag("path", d="".join(parts), class_=kind) for kind, parts in paths.items()]
