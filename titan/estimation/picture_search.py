"""A search drawn: all layouts that fit by memory and speed, and the frontier."""

from __future__ import annotations

from collections.abc import Sequence

from titan.estimation.hardware import GIB
from titan.estimation.report import Report
from titan.estimation.search import Candidate, frontier
from titan.estimation.time import BAND, rounded
from titan.pages.areas import scatter_chart
from titan.pages.charts import Axes
from titan.pages.page import Markup, legend, section, table, tag
from titan.pages.scale import gib


def search_section(
    fitting: Sequence[Candidate], ranked: Sequence[Candidate], why: Sequence[str], best: Report
) -> Markup:
    """All that fit, the frontier and the best; arguments as of `picture.search_page`."""
    edge = frontier(list(fitting))
    spots = [(found.reserved / GIB, found.tokens_per_second) for found in fitting]
    path = [(found.reserved / GIB, found.tokens_per_second) for found in edge]
    first = ranked[0]
    tips = [(found.reserved / GIB, found.tokens_per_second, _tip(found, "on the frontier")) for found in edge]
    places = {1: "first", 2: "second", 3: "third"}
    tips += [
        (found.reserved / GIB, found.tokens_per_second, _tip(found, places.get(rank, f"number {rank}")))
        for rank, found in enumerate(ranked, 1)
    ]
    limit = best.hardware.fit_bytes
    axes = Axes(
        unit="tokens/s per GPU",
        across="GiB reserved by the rank that needs most",
        height=340,
        marks=[(first.reserved / GIB, first.tokens_per_second, "first")],
    )
    clouds = [
        ("dots small c7", spots),
        ("dots c0", path),
        ("dots c1", [(found.reserved / GIB, found.tokens_per_second) for found in ranked[1:]]),
        ("dots large c2", [(first.reserved / GIB, first.tokens_per_second)]),
    ]
    chart = scatter_chart(clouds, path, axes, tips=tips, limit=(limit / GIB, f"limit {gib(limit)}"))
    keys = legend([(2, "the first"), (1, "the next ones, of other degrees"), (0, "the frontier"), (7, "all that fit")])
    rows = [
        (f"{rank}", str(found), f"{rounded(found.tokens_per_second)}", f"{found.reserved / GIB:.1f}")
        for rank, found in enumerate(ranked, 1)
    ]
    listing = table(("", "Layout", "Tokens/s per GPU", "GiB reserved"), rows, texts=2)
    words = [tag("p", line[0].upper() + line[1:] + ".") for line in why]
    note = (
        f"By closed forms, speeds ± {BAND:.0%}. Dashed: the limit of memory. Nothing on the frontier is beaten in both."
    )
    return section("search", "The search", [chart, keys, *words, listing], note)


def _tip(found: Candidate, what: str) -> str:
    text = str(found).replace(", ", "\n")
    return f"{what}\n{rounded(found.tokens_per_second)} tokens/s per GPU\n{gib(found.reserved)}\n{text}"
