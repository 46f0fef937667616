"""Pages in a real browser without a window: Chromium, over playwright. No page may load anything or report an error."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome")
# Nothing that a browser does by itself: no updates, no lists fetched, no accounts.
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDE, PHONE = 1280, 360


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for a module's tests, since its event loop is in the way of others; skips where there is none."""
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium, or any browser of its kind on PATH")
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[dev]'")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, path: Path, *, width: int = WIDE, dark: bool = False) -> Iterator[Page]:
    """A file as a browser shows it. At the end: it asked for no other file, and reported no error."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    try:
        page.goto(path.resolve().as_uri())
        yield page
        assert [url for url in asked if not url.startswith("data:")] == [path.resolve().as_uri()]
        assert errors == []
    finally:
        page.close()


def overflows(page: Page) -> list[str]:
    """What reaches beyond the right edge of the window, unless it scrolls by itself."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter((element) =>
            element.getBoundingClientRect().right > document.documentElement.clientWidth + 1
            && !element.closest(".scroll, pre, .plot svg, .cells")
        ).map((element) => element.outerHTML.slice(0, 120))"""
    )
    wider = page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    return [*found, *(["the page scrolls sideways"] if wider else [])]


def colours(picture: bytes) -> int:
    """How many different colours a screenshot has, as a PNG; a blank one has one."""
    import io

    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    return len(image.getcolors(maxcolors=image.width * image.height) or [])
