"""Lines over one axis, with what is wrong in them said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from titan.pages.charts import Axes, dots, figure, line_path, upright
from titan.pages.page import Markup, tag
from titan.pages.scale import HEIGHT, WIDTH, Range, axis, number, thin, widened

_FEW = 200  # of so many values one may be a spike
COLUMNS = 500  # of pixels, that a long line is thinned out to
_HOVERED = 150  # columns that the pointer finds


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        colour: its number, 0 to 7.
        xs: in order.
        ys: as many; None where there is none, and not finite where a run has gone wrong.
    """

    name: str
    colour: int
    xs: Sequence[float]
    ys: Sequence[float | None]
    style: Literal["", "thin", "dashed", "dots"] = ""

    @property
    def points(self) -> tuple[list[float], list[float]]:
        """Those that are finite."""
        known = [(x, y) for x, y in zip(self.xs, self.ys, strict=True) if y is not None and math.isfinite(y)]
        return [x for x, _ in known], [y for _, y in known]

    @property
    def wrong(self) -> list[float]:
        """Where it isn't finite."""
        return [x for x, y in zip(self.xs, self.ys, strict=True) if y is not None and not math.isfinite(y)]


def line_chart(lines: Sequence[Line], axes: Axes, *, named: bool = False) -> Markup:
    """Lines over one axis. What isn't finite is a red tick at the top; what is far above all else leaves the frame.

    Below it stands, in words, what can't be seen.

    Args:
        named: say whose line it is even if there is but one.
    """
    places = [x for line in lines for x in line.xs]
    x = axes.x or axis(places)
    tops = [_top(line.points[1], axes.zero) for line in lines]
    values = [value for line in lines for value in line.points[1]]
    known = [top for top in tops if top is not None]
    y = widened(axis([*known, *([min(values)] if values else [])], zero=axes.zero))
    drawn: list[Markup] = []
    for line in lines:
        drawn += _line(line, x, y)
    drawn += [upright(x.share(place), "event", text) for place, text in axes.events]
    notes = _notes(lines, y, axes)
    names = [(line.colour, line.name, line.style) for line in lines]
    return figure(drawn, x, y, axes, _hover(lines, axes, x), names if named or len(lines) > 1 else [], notes)


def _top(values: Sequence[float], zero: bool) -> float | None:
    """What the frame must reach for a line: its largest value, but for a few that would press all others flat."""
    ordered = sorted(values)
    if len(ordered) >= 10:
        low, usual = (0.0 if zero else ordered[0]), ordered[-1 - max(2, len(ordered) // _FEW)]
        if usual > low and ordered[-1] - usual > 4 * (usual - low):
            return usual + 0.5 * (usual - low)
    return ordered[-1] if ordered else None


def _line(line: Line, x: Range, y: Range) -> list[Markup]:
    points = thin(*line.points, COLUMNS)
    drawn = []
    if points:
        places = [(WIDTH * x.share(a), HEIGHT * (1 - y.share(b))) for a, b in points]
        if line.style == "dots" or len(places) == 1:
            drawn.append(dots(places, f"dots c{line.colour}"))
        if line.style != "dots" and len(places) > 1:
            drawn.append(line_path(places, f"trace {line.style} c{line.colour}"))
    columns = sorted({round(x.share(place), 3) for place in line.wrong})
    if columns:
        d = "".join(f"M{WIDTH * at:.0f} 0v80" for at in columns)
        drawn.append(tag("path", d=d, class_="wrong"))
    return drawn


def _notes(lines: Sequence[Line], y: Range, axes: Axes) -> list[Markup]:
    notes = []
    for line in (line for line in lines if line.style != "thin"):  # which goes with another line
        name = f"{line.name}: " if len(lines) > 1 else ""
        if wrong := line.wrong:
            where = f"{axes.across} {wrong[0]:,.0f}"
            if len(wrong) > 1:
                where += f" to {wrong[-1]:,.0f}"
            notes.append(tag("p", f"{name}not finite in {len(wrong)} line(s), {where}", class_="note bad"))
        xs, ys = line.points
        above = [(b, a) for a, b in zip(xs, ys, strict=True) if b > y.high]
        if above:
            value, place = max(above)
            text = (
                f"{len(above)} value(s) above the frame; the largest, {axes.text(value)}, at {axes.across} {place:,.0f}"
            )
            notes.append(tag("p", name + text, class_="note"))
    return notes


def _hover(lines: Sequence[Line], axes: Axes, x: Range) -> list[tuple[float, str]]:
    """What the pointer finds: of each place all lines that have a value there."""
    chosen: set[float] = set()
    for line in lines:
        chosen |= {place for place, _ in thin(*line.points, _HOVERED)} | set(line.wrong[:_HOVERED])
    texts: dict[float, list[str]] = {place: [f"{axes.across} {number(place, 9)}"] for place in sorted(chosen)}
    for line in lines:
        for place, value in zip(line.xs, line.ys, strict=True):
            if place in texts and value is not None:
                texts[place].append(f"{line.name}  {axes.text(value)}")
    return [(round(100 * x.share(place), 2), "\n".join(text)) for place, text in texts.items()]
