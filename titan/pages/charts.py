"""What all charts over one axis have in common. SVG stretches with the page, numbers are text beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from titan.pages.page import Markup, legend, tag
from titan.pages.scale import HEIGHT, WIDTH, Range, number, tick_labels, ticks

_HEIGHT = 210  # pixels


@dataclass(frozen=True)
class Axes:
    """How a chart is measured.

    Attributes:
        unit: of the vertical axis, above it.
        across: what the horizontal axis counts.
        zero: the vertical axis begins at 0.
        text: of a value, for the pointer.
        scale: what values are divided by for the axis, such as bytes for GiB.
        events: places to mark on the horizontal axis, with what happened there.
        x: the horizontal range; that of the points when None.
        height: of the plot, in pixels.
        marks: places with text.
    """

    unit: str
    across: str
    zero: bool = False
    text: Callable[[float], str] = number
    scale: float = 1.0
    events: Sequence[tuple[float, str]] = ()
    x: Range | None = None
    height: int = _HEIGHT
    marks: Sequence[tuple[float, float, str]] = ()


def figure(
    drawn: Sequence[Markup],
    x: Range,
    y: Range,
    axes: Axes,
    hover: Sequence[tuple[float, str]],
    names: Sequence[tuple[int, str] | tuple[int, str, str]],
    notes: Sequence[Markup],
    below: str = "",
    extra: Sequence[Markup] = (),
) -> Markup:
    """A drawing with its axes: numbers are text of the page, so that they keep their size on a phone."""
    scaled = Range(y.low / axes.scale, y.high / axes.scale)
    heights = ticks(scaled, 4 if axes.height < 200 else 5)
    labels = tick_labels(heights)
    lines = "".join(f"M0 {HEIGHT * (1 - scaled.share(value)):.1f}H{WIDTH}" for value in heights)
    svg = tag(
        "svg",
        [tag("path", d=lines, class_="grid"), *drawn],
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=axes.unit,
    )
    numbers = [
        tag("span", text, style=f"bottom:{100 * scaled.share(value):.2f}%")
        for value, text in zip(heights, labels, strict=True)
    ]
    widest = tag("i", max(labels, key=len, default=""))
    plot = tag(
        "div",
        [svg, *(_mark(x, y, *mark) for mark in axes.marks), *extra],
        class_="plot",
        style=f"height:{axes.height}px",
        data_points=json.dumps(hover, ensure_ascii=False) if hover else None,
    )
    parts = [
        tag("div", axes.unit, class_="unit"),
        tag("div", [widest, *numbers], class_="y"),
        plot,
        below,
        *_across(x, axes),
    ]
    chart = tag("div", (part for part in parts if part), class_="chart")
    return tag("figure", [chart, *([legend(names)] if names else []), *notes])


def _mark(x: Range, y: Range, place: float, value: float, text: str) -> Markup:
    """Text at a place in a plot, on the side where there is room; what follows a colon is for wide windows."""
    across, up = x.share(place), y.share(value)
    side = " left" if across < 0.15 else " right" if across > 0.85 else ""
    short, sign, detail = text.partition(": ")
    content = [short, tag("span", sign + detail, class_="detail")] if sign else text
    return tag("span", content, class_=f"mark{side}", style=f"left:{100 * across:.2f}%;top:{100 * (1 - up):.2f}%")


def _across(x: Range, axes: Axes) -> list[Markup]:
    if not axes.across:
        return []
    values = ticks(x, 6)
    labels = tick_labels(values)
    spans = []
    for value, text in zip(values, labels, strict=True):
        share = x.share(value)
        kind = "end" if share > 0.97 else None
        spans.append(tag("span", text, class_=kind, style=f"left:{100 * share:.2f}%"))
    return [tag("div", spans, class_="x"), tag("div", axes.across, class_="axis")]


def line_path(places: Iterable[tuple[float, float]], kind: str, *, end: str = "") -> Markup:
    d = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places) + end
    return tag("path", d=d, class_=kind)


def dots(places: Iterable[tuple[float, float]], kind: str) -> Markup:
    """Round dots, however the drawing is stretched: lines of no length with round ends."""
    return tag("path", d="".join(f"M{a:.1f} {b:.1f}h.01" for a, b in places), class_=kind)


def upright(share: float, kind: str, text: str = "") -> Markup:
    title = tag("title", text) if text else ""
    return tag("path", title, d=f"M{WIDTH * share:.1f} 0V{HEIGHT}", class_=kind)
