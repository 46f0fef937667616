"""From values to places in a picture, and to short text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

WIDTH = HEIGHT = 1000  # of every drawing; the page stretches it, and text stands outside of it


class Range(NamedTuple):
    """What an axis covers."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high one."""
        return (value - self.low) / (self.high - self.low)


def axis(values: Iterable[float], *, zero: bool = False) -> Range:
    """The range of some finite values, never empty.

    Args:
        zero: begin at 0.
    """
    known = [*values, *([0.0] if zero else [])]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if low == high:
        margin = abs(low) / 2 or 0.5
        low, high = low - (0 if zero and low == 0 else margin), high + margin
    return Range(low, high)


def widened(range_: Range, part: float = 0.05) -> Range:
    """With room above, and below where it doesn't begin at 0."""
    margin = part * (range_.high - range_.low)
    return Range(range_.low if range_.low == 0 else range_.low - margin, range_.high + margin)


def ticks(range_: Range, most: int = 5) -> list[float]:
    """Round values within a range, at most so many."""
    least = (range_.high - range_.low) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))
    first = math.ceil(range_.low / step - 1e-9)
    last = math.floor(range_.high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def number(value: float, digits: int = 4) -> str:
    """So many significant digits, in the shortest form: 12,345, 0.05, 3e-05, 1.2M."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-").replace("e+", "e").replace(".000e", "e")
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if size >= factor:
            return f"{value / factor:.{digits}g}{unit}"
    if size >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def tick_labels(values: Sequence[float]) -> list[str]:
    """Text of an axis's values, with digits enough to tell them apart."""
    for digits in range(1, 9):
        texts = [number(value, max(digits, 4) if abs(value) >= 1000 else digits) for value in values]
        if len(set(texts)) == len(texts) and all(_close(value, values, digits) for value in values):
            return texts
    return [repr(value) for value in values]


def _close(value: float, values: Sequence[float], digits: int) -> bool:
    """A rounded value is where its text says."""
    largest = max(map(abs, values)) or 1.0
    return abs(float(f"{value:.{digits}g}") - value) < 1e-3 * largest


def seconds(value: float, digits: int = 3) -> str:
    """A time in the unit that people would choose."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if value >= 2 * size:
            return f"{number(value / size, digits)} {unit}"
    if value >= 0.1 or value == 0:
        return f"{number(value, digits)} s"
    if value >= 1e-3:
        return f"{number(1e3 * value, digits)} ms"
    return f"{number(1e6 * value, digits)} µs" if value >= 1e-6 else "< 1 µs"


def gib(value: float) -> str:
    """Bytes in GiB, or in a smaller unit where they are few."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size / 2:
            return f"{value / size:,.1f} {unit}"
    return f"{value:.0f} B"


def thin(xs: Sequence[float], ys: Sequence[float], columns: int) -> list[tuple[float, float]]:
    """Points of a long line that draw the same picture: of each column the first, the last, the least and the largest.

    Args:
        xs: in order.
        ys: finite.
        columns: of pixels.
    """
    if len(xs) <= 4 * columns:
        return list(zip(xs, ys, strict=True))
    width = (xs[-1] - xs[0]) / columns or 1.0
    kept: list[tuple[float, float]] = []
    start = 0
    while start < len(xs):
        edge = xs[0] + (math.floor((xs[start] - xs[0]) / width) + 1) * width
        end = start + 1
        while end < len(xs) and xs[end] < edge:
            end += 1
        own = range(start, end)
        chosen = {start, end - 1, min(own, key=lambda i: ys[i]), max(own, key=lambda i: ys[i])}
        kept += [(xs[i], ys[i]) for i in sorted(chosen)]
        start = end
    return kept
