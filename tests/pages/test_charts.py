"""What charts are made of; whole pages are looked at by those who make them."""

from __future__ import annotations

import json
import math
import random
import re

import pytest

from titan.pages.bars import Bar, Box, bar_chart, gantt_chart
from titan.pages.charts import Axes
from titan.pages.lines import Line, line_chart
from titan.pages.page import Markup, page, section, table, tag
from titan.pages.scale import Range, gib, number, seconds, thin, tick_labels, ticks


def test_text_is_escaped_and_markup_is_not() -> None:
    made = page("<b>", "a & b", [section("s", "<i>", [tag("p", '"x" < y'), table(("<th>",), [("<td>",)])])])
    for raw in ("<b>", "<i>", "<th>", "<td>"):
        assert raw.replace("<", "&lt;").replace(">", "&gt;") in made
    assert "<p>&quot;x&quot; &lt; y</p>" in made and "a &amp; b" in made
    assert tag("p", title='"><script>') == '<p title="&quot;&gt;&lt;script&gt;"></p>'
    assert tag("p", Markup("<b>x</b>")) == "<p><b>x</b></p>"


def extremes(points: list[tuple[float, float]], width: float) -> dict[int, tuple[float, float]]:
    columns: dict[int, list[float]] = {}
    for x, y in points:
        columns.setdefault(int(x / width), []).append(y)
    return {column: (min(ys), max(ys)) for column, ys in columns.items()}


def test_thinned_points_keep_every_columns_extremes() -> None:
    generator = random.Random(0)
    xs = list(map(float, range(50_000)))
    ys = [generator.gauss(2, 0.1) for _ in xs]
    ys[31_415] = 40.0
    ys[27_182] = -3.0
    kept = thin(xs, ys, 500)
    assert len(kept) <= 4 * 501 and kept == sorted(kept)
    assert set(kept) <= set(zip(xs, ys, strict=True))
    width = (xs[-1] - xs[0]) / 500
    assert extremes(kept, width) == extremes(list(zip(xs, ys, strict=True)), width)
    assert kept[0] == (xs[0], ys[0]) and kept[-1] == (xs[-1], ys[-1])


def test_few_points_are_kept_as_they_are() -> None:
    assert thin([1.0, 2.0], [3.0, 4.0], 500) == [(1.0, 3.0), (2.0, 4.0)]


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 100, ["0", "20", "40", "60", "80", "100"]),
        (2.13, 5.5, ["3", "4", "5"]),
        (0, 0.004, ["0", "0.001", "0.002", "0.003", "0.004"]),
        (0, 3e6, ["0", "1M", "2M", "3M"]),
        (10_000, 10_500, ["10,000", "10,100", "10,200", "10,300", "10,400", "10,500"]),
    ],
)
def test_ticks_are_round_and_differ(low: float, high: float, labels: list[str]) -> None:
    assert tick_labels(ticks(Range(low, high))) == labels


def test_numbers_for_people() -> None:
    assert [number(x) for x in (0, 12345, 0.05, 3e-5, 1.2e6, math.nan)] == [
        "0",
        "12,345",
        "0.05",
        "3e-5",
        "1.2M",
        "nan",
    ]
    assert [gib(x) for x in (3 * 2**30, 2**20, 700, 10)] == ["3.0 GiB", "1.0 MiB", "0.7 KiB", "10 B"]
    assert [seconds(x) for x in (0, 0.0123, 59, 600, 7200 * 3, 86400 * 3, 1e-9)] == [
        "0 s",
        "12.3 ms",
        "59 s",
        "10 min",
        "6 h",
        "3 days",
        "< 1 µs",
    ]


def test_what_is_not_finite_is_marked_and_said() -> None:
    chart = line_chart([Line("a", 0, [1, 2, 3, 4], [2.0, math.nan, math.inf, 1.0])], Axes("loss", "step"))
    assert "not finite in 2 line(s), step 2 to 3" in chart
    assert re.search(r'd="M333 0v80M667 0v80" class="wrong"', chart)
    points = json.loads(re.search(r'data-points="([^"]*)"', chart)[1].replace("&quot;", '"'))  # type: ignore[index]
    assert [text for _, text in points] == ["step 1\na  2", "step 2\na  nan", "step 3\na  inf", "step 4\na  1"]


def test_a_spike_leaves_the_frame_and_is_said() -> None:
    ys = [2 + 0.01 * (step % 7) for step in range(100)]
    ys[50] = 1e6
    chart = line_chart([Line("a", 0, list(range(100)), ys)], Axes("loss", "step"))
    assert "1 value(s) above the frame; the largest, 1M, at step 50" in chart
    assert '<span style="bottom' in chart and ">2<" in chart


def test_a_short_run_beside_a_long_one_is_no_spike() -> None:
    lines = [
        Line("a", 0, list(range(5000)), [1.0] * 5000),
        Line("b", 1, list(range(20)), [30.0 + n for n in range(20)]),
    ]
    assert "above the frame" not in line_chart(lines, Axes("lr", "step", zero=True))


def test_a_steep_start_is_no_spike() -> None:
    ys = [2 + 9 * math.exp(-step / 200) for step in range(3000)]
    assert "above the frame" not in line_chart([Line("a", 0, list(range(3000)), ys)], Axes("loss", "step"))


@pytest.mark.parametrize("values", [[], [None], [math.nan], [0.0], [5.0, 5.0], [-1.0, -1.0]])
def test_any_values_make_a_chart(values: list[float | None]) -> None:
    for zero in (False, True):
        assert "<svg" in line_chart([Line("a", 0, list(range(len(values))), values)], Axes("x", "step", zero=zero))


def test_bars_are_to_one_scale() -> None:
    made = bar_chart([Bar("a", [(0, 50.0, "x"), (1, 0.0, "none")], "50"), Bar("b", [(0, 100.0, "y")], "100")])
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", made)]
    assert len(widths) == 2 and widths[1] == pytest.approx(2 * widths[0], abs=0.01)


@pytest.mark.parametrize(("count", "paths"), [(20, 20), (4000, 1)])
def test_very_many_boxes_are_one_path(count: int, paths: int) -> None:
    boxes = [Box(0, 0, False, str(n), n, n + 1, f"box {n}") for n in range(count)]
    made = gantt_chart(["a"], boxes, count)
    assert made.count("<path") == paths and made.count("H") == 2 * count
    assert ("<span" in made.partition('class="scale"')[0]) == (count == 20)
