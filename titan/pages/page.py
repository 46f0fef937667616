"""One HTML file that needs no other: a page of sections, escaped text, tables. No network, no library.

`Markup` is HTML that is ready; every other text is escaped where it is put into a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

# Nothing is loaded from anywhere: a browser would refuse to.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


class Markup(str):
    """HTML that is ready to be put into a page."""

    __slots__ = ()


Content = str | Iterable[str]  # text, HTML, or several of both


def markup(content: Content) -> Markup:
    """HTML of what may be text, HTML, or several of both."""
    if isinstance(content, Markup):
        return content
    if isinstance(content, str):
        return Markup(escape(content))
    return Markup("".join(markup(part) for part in content))


def tag(name: str, content: Content = "", **attributes: str | float | None) -> Markup:
    """An element. `class_` is class, `data_x` is data-x; an attribute that is None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{markup(content)}</{name}>")


def page(title: str, lead: Content, sections: Iterable[Markup]) -> str:
    """A whole file.

    Args:
        title: what it is of.
        lead: a line or two below the title.
        sections: as `section` makes them.
    """
    head = [
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Markup('<link rel="icon" href="data:,">'),
        tag("title", title),
        tag("style", Markup(_beside("page.css"))),
    ]
    body = [
        tag("header", [tag("h1", title), tag("p", lead, class_="lead")]),
        tag("main", sections),
        Markup('<div id="tip" hidden></div>'),
        tag("script", Markup(_beside("page.js"))),
    ]
    return f'<!doctype html>\n<html lang="en">\n{tag("head", head)}\n{tag("body", body)}\n</html>\n'


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def section(name: str, title: str, content: Content, note: Content = "", *, wide: bool = True) -> Markup:
    """A part of a page.

    Args:
        name: its id, for links and tests.
        note: small print below the title.
        wide: it takes the page's whole width; else two stand side by side where there is room.
    """
    parts = [tag("h2", title)]
    if note:
        parts.append(tag("p", note, class_="note"))
    return tag("section", [*parts, markup(content)], id=name, class_="wide" if wide else None)


def table(heads: Sequence[Content], rows: Iterable[Sequence[Content]], *, texts: int = 1) -> Markup:
    """A table that scrolls by itself where it is too wide.

    Args:
        texts: how many of the first columns are text; the others are numbers, which stand to the right.
    """
    align = ["text" if number < texts else None for number in range(len(heads))]
    head = tag("tr", [tag("th", cell, class_=kind) for cell, kind in zip(heads, align, strict=True)])
    body = [tag("tr", [tag("td", cell, class_=kind) for cell, kind in zip(row, align, strict=True)]) for row in rows]
    return tag("div", tag("table", [tag("thead", head), tag("tbody", body)]), class_="scroll")


def tiles(facts: Iterable[tuple[str, Content, str]]) -> Markup:
    """Figures to read first: what it is, its value, and a word on it."""
    return tag(
        "dl",
        [
            tag("div", [tag("dt", name), tag("dd", value), tag("dd", remark, class_="remark")])
            for name, value, remark in facts
        ],
        class_="tiles",
    )


def legend(names: Sequence[tuple[int, str] | tuple[int, str, str]]) -> Markup:
    """What the colours mean: the number of each, its name, and how its line is drawn if not whole."""
    keys = [tag("li", [tag("i", class_=f"key c{colour} {''.join(style)}"), name]) for colour, name, *style in names]
    return tag("ul", keys, class_="legend")


def folded(summary: str, content: Content) -> Markup:
    """What is only shown when asked for."""
    return tag("details", [tag("summary", summary), markup(content)])
