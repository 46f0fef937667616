"""The pictures of docs/images are those that the scripts make, and each is shown on a page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from scripts import draw_diagrams, draw_schedule
from scripts.draw_diagrams import IMAGES, PICTURES

ROOT = Path(__file__).parents[2]


def test_the_files_are_what_the_scripts_make(tmp_path: Path) -> None:
    draw_diagrams.main(["--folder", str(tmp_path)])
    pipeline = ["--schedule", "1F1B", "--ranks", "4", "--microbatches", "8"]
    draw_schedule.main([*pipeline, "--svg", str(tmp_path / "pipeline.svg")])
    made, committed = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (tmp_path, IMAGES))
    assert made == committed, "run scripts/draw_diagrams.py"


@pytest.mark.parametrize("name", PICTURES)
def test_nothing_is_drawn_beyond_the_edge(name: str) -> None:
    svg = "{http://www.w3.org/2000/svg}"
    root = ET.fromstring(PICTURES[name]())
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.iter(f"{svg}rect"):
        x, y, wide, high = (float(box.attrib.get(key, 0)) for key in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + wide <= width and y + high <= height
    for text in root.iter(f"{svg}text"):
        assert text.text is not None
        length = 0.55 * float(text.attrib["font-size"]) * len(text.text)  # of a letter of middling width
        left = float(text.attrib["x"]) - {"start": 0, "middle": length / 2, "end": length}[text.attrib["text-anchor"]]
        assert left >= 0 and left + length <= width, text.text


def test_every_picture_is_on_a_page() -> None:
    shown = {
        name for page in (ROOT / "docs").glob("*.md") for name in re.findall(r"\(images/([\w.]+)\)", page.read_text())
    }
    assert shown == {path.name for path in IMAGES.iterdir()}
