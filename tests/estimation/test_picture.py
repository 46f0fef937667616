"""Estimates and searches as pages, and what stands in them: who holds what, and memory over a step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser import PHONE, WIDE, colours, opened, overflows
from tests.test_estimation import GOLDEN, planned, report
from titan.config.errors import UserError
from titan.estimation.estimate import CATEGORIES
from titan.estimation.events import Allocation, Event, Free, Place
from titan.estimation.history import COLUMNS, History
from titan.estimation.holdings import holdings, place_of
from titan.estimation.peak import find_peak
from titan.estimation.picture import estimate_page
from titan.estimation.run import DOESNT_FIT_STATUS, estimate
from titan.estimation.schedule import timeline_of
from titan.estimation.search import TIE, fitting_layouts, frontier
from titan.estimation.search_report import search

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_a_pipeline_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    made, file = report(*GOLDEN["405b_on_512.txt"]), tmp_path / "405b.html"
    file.write_text(estimate_page(made))
    for width, dark in ((WIDE, True), (PHONE, False)):
        with opened(browser, file, width=width, dark=dark) as page:
            ids = page.eval_on_selector_all("section", "all => all.map(one => one.id)")
            assert ids == ["short", "mesh", "step", "ranks", "schedule", "communication", "text"]
            assert overflows(page) == []
            assert colours(page.screenshot()) > 20
            assert page.locator("#schedule path.box").count() == len(timeline_of(made.layout).slots) == 8 * 32 * 2
            assert page.locator("#ranks .bar").count() == len(made.ranks) == 8
            assert page.locator("#mesh .stage").count() == 8
            assert "17.9%" in page.locator("#schedule").inner_text()
            assert page.locator("#communication tbody tr").count() == len(made.traffic)
            page.locator("#schedule path.box").first.hover(force=True)
            assert page.locator("#tip").inner_text() == "forward of microbatch 0, stage 0"


def test_a_search_in_a_browser(browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "search.html"
    given = ["--job.config_file=llama3_8b.toml", "--estimation.gpus=8", "--estimation.search"]
    assert search(*planned(*given, f"--estimation.html={file}")) == 0
    printed = capsys.readouterr().out
    first = printed.splitlines()[1].split("GiB  ")[1]
    for width in (WIDE, PHONE):
        with opened(browser, file, width=width) as page:
            assert page.locator("#search tbody tr").first.inner_text().split("\t")[1] == first
            assert page.locator("#search .mark").inner_text() == "first"
            assert page.locator("#search path.trace").count() == 1
            assert page.locator("#short").count() == 1  # the estimate of the first
            assert overflows(page) == []
            page.locator("#search .spot").last.hover()
            assert "tokens/s per GPU" in page.locator("#tip").inner_text()


def events(count: int) -> list[Event]:
    """Allocations and frees as they may come, with half of the memory there from the start."""
    generator = random.Random(0)
    made: list[Event] = [Allocation(0, 10**6, 0, Place("build", None), None, "x", category="parameters")]
    alive: list[int] = []
    for number in range(1, count):
        place = Place("forward" if number < count / 2 else "backward", number % 7)
        if alive and generator.random() < 0.45:
            made.append(Free(alive.pop(generator.randrange(len(alive))), place, None))
        else:
            alive.append(number)
            size, category = generator.randrange(1, 10**6), generator.choice(CATEGORIES)
            made.append(Allocation(number, size, 0, place, None, "x", category=category))
    return made


def test_history_has_the_least_and_the_most_of_each_column() -> None:
    step = events(10_000)
    history = History(len(step))
    peak = find_peak(step, history=history)
    moments = history.moments(lambda place: f"{place.phase} {place.unit}")
    assert COLUMNS < len(moments) <= 2 * COLUMNS
    highest = max(moments, key=lambda moment: moment.active_bytes)
    assert highest.active_bytes == peak.active_bytes
    assert {name: size for name, size in highest.alive.items() if size} == dict(peak.breakdown)
    assert highest.where == f"{peak.place.phase} {peak.place.unit}"
    assert moments[-1].reserved_bytes == peak.reserved_bytes
    active, levels = 0, []
    sizes: dict[int, int] = {}
    for event in step:
        if isinstance(event, Allocation):
            sizes[event.object] = -(-event.bytes // 512) * 512
            active += sizes[event.object]
        else:
            active -= sizes[event.object]
        levels.append(active)
    levels = levels[1:]  # without what is there from the start
    width = -(-len(step) // COLUMNS)
    for start in range(0, len(levels), width):
        column = levels[start : start + width]
        shown = [m.active_bytes for m in moments if m.at is not None and start <= m.at < start + width]
        assert (min(shown), max(shown)) == (min(column), max(column))


def test_a_trace_is_drawn_as_a_timeline(browser: Browser, tmp_path: Path) -> None:
    given = ["--job.config_file=debug.toml", "--estimation.gpus=2", "--training.seq_len=64"]
    made, file = report(*given, "--estimation.method=trace"), tmp_path / "trace.html"
    assert [moment.phase for moment in made.peak.highest] == ["forward", "loss", "backward", "optimizer"]
    assert max(moment.active_bytes for moment in made.peak.moments) == made.peak.peak_active_bytes
    file.write_text(estimate_page(made))
    with opened(browser, file) as page:
        assert page.locator("#step path.area").count() >= 5
        assert "peak" in page.locator("#step .mark").first.inner_text()
        assert "backward" in page.locator("#step .strip").inner_text()
        page.locator("#step .plot").hover()
        assert "reserved" in page.locator("#tip").inner_text()


def test_moments_of_the_closed_form() -> None:
    (rank,) = report(*GOLDEN["8b_on_8.txt"]).ranks
    highest = max(rank.moments, key=lambda moment: moment.active_bytes)
    assert (highest.where, highest.alive, highest.active_bytes) == (
        rank.peak_at,
        rank.breakdown,
        rank.peak_active_bytes,
    )


def test_who_holds_what() -> None:
    layout = report(*GOLDEN["405b_on_512.txt"]).layout
    held = holdings(layout)
    assert str(held[0]) == "pp 0 (ranks 0 to 63): embedding, layers 0 to 14"
    assert str(held[-1]) == "pp 7 (ranks 448 to 511): layers 111 to 125, head"
    assert sum(each.parameters for each in held) * layout.tp == pytest.approx(layout.model.parameters, rel=1e-4)
    assert place_of(layout, 64 + 8 + 3) == {"pp": 1, "dp_replicate": 0, "dp_shard": 1, "cp": 0, "tp": 3}


def test_the_frontier_is_beaten_by_none() -> None:
    loaded, ranks = planned("--job.config_file=llama3_8b.toml", "--estimation.gpus=8", "--estimation.search")
    fitting = fitting_layouts(loaded.config, ranks, report(*GOLDEN["8b_on_8.txt"]).hardware)
    edge = frontier(fitting)
    assert edge[0].reserved == min(found.reserved for found in fitting)
    for found in fitting:
        better = [own for own in edge if own.reserved <= found.reserved]
        assert min(own.time.seconds for own in better) <= found.time.seconds * (1 + TIE)


def test_the_page_is_written_whether_it_fits_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tight = ["--job.config_file=llama3_8b.toml", "--estimation.gpus=8", "--training.local_batch_size=8"]
    file = tmp_path / "tight.html"
    assert estimate(*planned(*tight, f"--estimation.html={file}")) == DOESNT_FIT_STATUS
    assert "doesn&#x27;t fit" in file.read_text() and "What would make it fit" in file.read_text()
    with pytest.raises(UserError, match=r"estimation\.html = "):
        estimate(*planned(*GOLDEN["8b_on_8.txt"], f"--estimation.html={tmp_path}/no/page.html"))
