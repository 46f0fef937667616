"""Areas on top of each other, and points scattered over two axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from titan.pages.charts import Axes, dots, figure, line_path, upright
from titan.pages.lines import Line
from titan.pages.page import Markup, tag
from titan.pages.scale import HEIGHT, WIDTH, axis, widened


@dataclass(frozen=True)
class Layer:
    """One area of a stack: its values, at the places that all layers share."""

    name: str
    colour: int
    values: Sequence[float]


def area_chart(
    places: Sequence[float],
    layers: Sequence[Layer],
    axes: Axes,
    *,
    limit: tuple[float, str] | None = None,
    outline: Line | None = None,
    hover: Sequence[str] = (),
    below: str = "",
) -> Markup:
    """Areas on top of each other.

    Args:
        places: on the horizontal axis, in order.
        limit: a value that must not be passed, and its name.
        outline: a line over all of it.
        hover: what to say of each place.
        below: what stands directly under the plot, of the same width.
    """
    totals = [sum(column) for column in zip(*(layer.values for layer in layers), strict=True)]
    tallest = [*totals, *(v for v in (outline.ys if outline else []) if v is not None)]
    if limit is not None:
        tallest.append(limit[0])
    x, y = axes.x or axis(places), widened(axis(tallest, zero=True))
    drawn, floor = [], [0.0] * len(places)
    for layer in layers:
        top = [a + b for a, b in zip(floor, layer.values, strict=True)]
        outer = [(WIDTH * x.share(p), HEIGHT * (1 - y.share(v))) for p, v in zip(places, top, strict=True)]
        inner = [(WIDTH * x.share(p), HEIGHT * (1 - y.share(v))) for p, v in zip(places, floor, strict=True)]
        if any(layer.values):
            drawn.append(line_path(outer + inner[::-1], f"area c{layer.colour}", end="z"))
        floor = top
    if outline is not None:
        known = [(a, b) for a, b in zip(outline.xs, outline.ys, strict=True) if b is not None]
        drawn.append(line_path([(WIDTH * x.share(a), HEIGHT * (1 - y.share(b))) for a, b in known], "reserved"))
    drawn += [upright(x.share(place), "event", text) for place, text in axes.events]
    marks = list(axes.marks)
    if limit is not None:
        height = HEIGHT * (1 - y.share(limit[0]))
        drawn.append(tag("path", tag("title", limit[1]), d=f"M0 {height:.1f}H{WIDTH}", class_="limit"))
        marks.append((x.low, limit[0], limit[1]))
    names = [(layer.colour, layer.name) for layer in layers if any(layer.values)]
    points = [(round(100 * x.share(p), 2), text) for p, text in zip(places, hover, strict=False)]
    return figure(drawn, x, y, replace(axes, marks=marks), points, names, [], below)


def phase_strip(places: Sequence[float], phases: Sequence[str]) -> Markup:
    """A band under a plot that says in which phase each place is, with names where there is room."""
    whole = places[-1] - places[0] or 1.0
    pieces = []
    for phase, run in groupby(zip(places, phases, [*places[1:], places[-1]], strict=True), lambda item: item[1]):
        found = list(run)
        left, width = (found[0][0] - places[0]) / whole, (found[-1][2] - found[0][0]) / whole
        name = phase if width > 0.045 else ""
        place = f"left:{100 * left:.2f}%;width:{100 * width:.2f}%"
        pieces.append(tag("span", name, class_=f"phase {phase}", style=place, data_tip=phase))
    return tag("div", pieces, class_="strip")


def scatter_chart(
    clouds: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    path: Sequence[tuple[float, float]],
    axes: Axes,
    *,
    tips: Sequence[tuple[float, float, str]] = (),
    limit: tuple[float, str] | None = None,
) -> Markup:
    """Points, and a path along some of them.

    Args:
        clouds: how they look (a class of `dots`), and where they are.
        path: in order; steps between them.
        tips: places with what the pointer says there.
        limit: of the horizontal axis, and its name.
    """
    every = [point for _, points in clouds for point in points]
    x = widened(axis([a for a, _ in every] + ([limit[0]] if limit else []), zero=True), 0.03)
    y = widened(axis(b for _, b in every), 0.12)
    drawn = []
    if limit is not None:
        drawn.append(upright(x.share(limit[0]), "limit", limit[1]))
    if path:
        corners = [path[0], *(corner for (_, b), (c, d) in pairwise(path) for corner in ((c, b), (c, d)))]
        drawn.append(line_path(((WIDTH * x.share(a), HEIGHT * (1 - y.share(b))) for a, b in corners), "trace c0"))
    for kind, points in clouds:
        places = {(round(WIDTH * x.share(a)), round(HEIGHT * (1 - y.share(b)))) for a, b in points}
        drawn.append(dots(sorted(places), kind))
    spots = [
        tag(
            "span",
            class_="spot",
            data_tip=text,
            style=f"left:{100 * x.share(a):.2f}%;top:{100 * (1 - y.share(b)):.2f}%",
        )
        for a, b, text in tips
    ]
    return figure(drawn, x, y, axes, [], [], [], extra=spots)
