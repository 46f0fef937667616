"""Pictures of pipeline schedules, and the command line that asks for them."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

from scripts.draw_schedule import Picture, draw_svg, draw_text, main
from titan.estimation.pipeline_timeline import timeline

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"

ONE_F_ONE_B = """\
        0              5              10
rank 0  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---
rank 1  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .

F forward, B backward; the microbatch after it; . idle
1F1B, 2 ranks, 4 microbatches: total time 15, bubble 20.0%, peak in flight per rank 2 1
"""

ZERO_BUBBLE = """\
        0       1       2       3       4
rank 0  0F0 .   .   3F0 3I0 3W0 .   .   0I0 0W0
rank 1  .   1F0 2F0 .   .   2I0 2W0 1I0 1W0 .
"""


def picture(name: str, ranks: int, microbatches: int, stages: int | None = None) -> Picture:
    return Picture(name, timeline(name, ranks, microbatches, stages))


def boxes(svg: str) -> list[ElementTree.Element]:
    return [rect for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if rect.get("class") == "box"]


def run(arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    try:
        main(arguments.split())
        status = 0
    except SystemExit as end:
        assert isinstance(end.code, int)
        status = end.code
    out, err = capsys.readouterr()
    return status, out, err


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--schedule 1F1B --ranks 2 --microbatches 4", capsys) == (0, ONE_F_ONE_B, "")


def test_text_with_stages() -> None:
    lines = draw_text(picture("ZBVZeroBubble", 2, 1)).splitlines()
    assert lines[:3] == ZERO_BUBBLE.splitlines()
    assert lines[4] == (
        "F forward, I gradients of inputs, W gradients of weights; the stage before it, the microbatch after it; . idle"
    )
    assert lines[5].startswith("ZBVZeroBubble, 2 ranks × 2 stages, 1 microbatch: total time 5, bubble 40.0%, ")


def test_text_in_blocks_has_the_same_cells() -> None:
    """A narrow terminal gets the picture in parts that, put together, are the whole one."""
    whole = draw_text(picture("GPipe", 12, 12)).splitlines()
    parts = draw_text(picture("GPipe", 12, 12), width=60).splitlines()
    assert max(len(line) for line in parts[:-3]) <= 60
    for rank in range(12):
        name = f"rank {rank} "
        (row,) = [line for line in whole if line.startswith(name)]
        pieces = [line[9:].ljust(48) for line in parts if line.startswith(name)]
        assert "".join(pieces).rstrip() == row[9:]


def test_colours_change_nothing_but_colours() -> None:
    plain, coloured = (draw_text(picture("DualPipeV", 2, 4), colour=colour) for colour in (False, True))
    assert "\x1b" not in plain
    pieces = coloured.split("\x1b[")
    text = pieces[0] + "".join(piece.split("m", 1)[1] for piece in pieces[1:])
    assert [line.rstrip() for line in text.splitlines()] == plain.splitlines()


@pytest.mark.parametrize(
    ("name", "stages", "per_microbatch"),
    [("GPipe", 1, 2), ("Interleaved1F1B", 2, 2), ("LoopedBFS", 4, 2), ("ZBVZeroBubble", 2, 3)],
)
def test_svg_has_a_box_per_action(name: str, stages: int, per_microbatch: int) -> None:
    drawn = picture(name, 4, 8, stages)
    svg = draw_svg(drawn)
    assert len(boxes(svg)) == 4 * stages * 8 * per_microbatch == len(drawn.timeline.slots)
    assert f"bubble {float(drawn.timeline.bubble):.1%}" in (ElementTree.fromstring(svg).findtext(f"{SVG}title") or "")


@pytest.mark.parametrize("name", ["1F1B", "DualPipeV"])
@pytest.mark.parametrize("ranks", [1, 4, 16])
def test_svg_boxes_lie_inside_and_apart(name: str, ranks: int) -> None:
    svg = draw_svg(picture(name, ranks, 2 * ranks))
    width, height = (float(ElementTree.fromstring(svg).get(name, 0)) for name in ("width", "height"))
    rows: dict[str | None, list[tuple[float, float]]] = {}
    for box in boxes(svg):
        x, y, wide, high = (float(box.get(name, -1)) for name in ("x", "y", "width", "height"))
        assert x >= 0 <= y and x + wide <= width and y + high <= height
        assert wide >= 16
        rows.setdefault(box.get("y"), []).append((x, x + wide))
    assert len(rows) == ranks
    for row in rows.values():
        row.sort()
        assert all(end <= start + 0.25 for (_, end), (start, _) in pairwise(row))  # rounded to 0.1


def test_svg_needs_no_other_file_and_escapes_names() -> None:
    svg = draw_svg(Picture("a<b>&c.csv", timeline("GPipe", 2, 2)))
    assert (ElementTree.fromstring(svg).findtext(f"{SVG}title") or "").startswith("a<b>&c.csv, 2 ranks")
    assert "href" not in svg and "url(" not in svg and "<script" not in svg


def test_svg_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "picture.svg"
    assert run(f"--schedule 1F1B --ranks 2 --microbatches 4 --svg {path}", capsys)[0] == 0
    assert len(boxes(path.read_text(encoding="utf-8"))) == 16


def test_own_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n")
    status, out, _ = run(f"--csv {path}", capsys)
    assert status == 0 and "own.csv, 2 ranks, 1 microbatch: total time 6, bubble 50.0%" in out
    assert run(f"--csv {path} --ranks 2 --microbatches 1 --stages_per_rank 1", capsys)[:2] == (0, out)


CONFIG = """\
[model]
flavor = "debugmodel"
[parallelism]
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1F1B"
[training]
local_batch_size = 4
dataset = "text"
dataset_path = "/not/here"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def test_config(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same picture as by name; the text it would train on need not be there."""
    svg = tmp_path / "picture.svg"
    assert run(f"--job.config_file {config} --svg {svg}", capsys) == (0, ONE_F_ONE_B, "")
    assert len(boxes(svg.read_text(encoding="utf-8"))) == 16


def test_config_with_more_on_the_command_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = "--parallelism.pipeline_parallel_schedule=DualPipeV --parallelism.pipeline_parallel_microbatch_size 1"
    status, out, _ = run(f"--job.config_file {config} {more}", capsys)
    assert status == 0 and "DualPipeV, 2 ranks × 2 stages, 4 microbatches" in out


def test_config_with_own_file(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.csv"
    path.write_text("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3\n")
    status, out, _ = run(f"--job.config_file {config} --parallelism.pipeline_parallel_schedule_csv {path}", capsys)
    assert status == 0 and "own.csv, 2 ranks, 4 microbatches: total time 15, bubble 20.0%" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "--schedule, --ranks, --microbatches: required"),
        ("--schedule 1F1B --ranks 4", "--microbatches: required"),
        ("--schedule 1F1B --ranks four --microbatches 4", "invalid int value: 'four'"),
        ("--schedule 1F1B --rank 4 --microbatches 4", "unrecognized arguments: --rank 4"),
        ("--schedule 2F2B --ranks 4 --microbatches 4", 'schedule "2F2B": no such schedule'),
        ("--schedule GPipe --ranks 2 --microbatches 2 --svg /not/here.svg", "--svg /not/here.svg: No such file"),
        ("--csv /not/here.csv", "schedule file /not/here.csv: No such file"),
        ("--job.config_file {config} --ranks 4", "--ranks can't go with a config"),
        ("--job.config_file /not/here.toml", "job.config_file = /not/here.toml: no such file"),
        ("--job.config_file {config} --parallelism.pipeline_parallel_degree 1", "there is no pipeline to draw"),
        ("--job.config_file {config} --training.local_batch_size 1", "needs at least one per stage, 2"),
        ("--job.config_file {config} --model.flavor 9000B", "9000B"),
    ],
)
def test_mistakes(arguments: str, expected: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(arguments.format(config=config), capsys)
    assert (status, out) == (2, "")
    assert expected in err and "Traceback" not in err


def test_help_doesnt_wait_for_torch() -> None:
    code = """if True:
        import sys, runpy
        try:
            runpy.run_path(sys.argv[1], run_name="__main__")
        finally:
            print("torch" in sys.modules)
    """
    script = ROOT / "scripts" / "draw_schedule.py"
    done = subprocess.run(
        [sys.executable, "-c", code, str(script), "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--microbatches" in done.stdout and done.stdout.endswith("False\n")
