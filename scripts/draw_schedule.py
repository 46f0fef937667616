"""Draw a pipeline schedule: who does what when, and how much of the time ranks wait.

    python scripts/draw_schedule.py --schedule 1F1B --ranks 4 --microbatches 8
    python scripts/draw_schedule.py --job.config_file llama3_70b.toml --parallelism.pipeline_parallel_degree 4 …

The second form takes the arguments of train.py and draws the schedule of that run. Nothing is trained, no GPU is asked.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from titan.config import checks, checks_pipeline
from titan.config.derived import model_stages, pipeline_microbatches
from titan.config.errors import ConfigError, UserError
from titan.config.fields import all_settings
from titan.config.job_config import JobConfig
from titan.config.loader import load_config
from titan.config.startup import exit_on_mistake
from titan.estimation.pipeline_timeline import KINDS, Slot, Timeline, schedule_of_file, simulate, timeline
from titan.parallelisms.schedules import SCHEDULES, number_of_stages

# Of a kind, the terminal's 256 colours for a rank's first stage, its second, and all others.
_TERMINAL_COLOURS = {"F": (153, 75, 68), "B": (157, 78, 71), "I": (223, 215, 208), "W": (189, 141, 134)}
# Of a kind, red, green and blue of a rank's first stage and of its last one. Black is legible on all of them.
_FILLS = {
    "F": ((183, 214, 244), (92, 154, 214)),
    "B": ((184, 226, 190), (92, 176, 110)),
    "I": ((252, 221, 156), (238, 166, 52)),
    "W": ((221, 202, 240), (172, 132, 205)),
}

_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 104, 68, 88  # margins of the chart in the SVG, in pixels
_ROW, _GAP = 28, 4  # height of a rank's row, and the part of it that is left free
_LEAST_WIDTH = 760  # so that title and legend fit


class Picture(NamedTuple):
    """What is drawn, and what it is called."""

    name: str
    timeline: Timeline


def main(argv: Sequence[str] | None = None) -> None:
    """Print the picture; write the SVG if there is to be one.

    Raises:
        SystemExit: status 2 after a mistake was printed.
    """
    parser = _parser()
    options, others = parser.parse_known_args(argv)
    with exit_on_mistake():
        picture = _picture(parser, options, others)
        if options.svg is not None:
            _write(options.svg, draw_svg(picture))
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if terminal else None
        print(draw_text(picture, colour=terminal and not os.environ.get("NO_COLOR"), width=width))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Draw a pipeline schedule: who does what when, and the bubble in percent.",
        epilog="Or, beside --svg only, the arguments of train.py: --job.config_file FILE [--section.field value …]",
        allow_abbrev=False,
    )
    parser.add_argument("--schedule", metavar="NAME", help=f"one of {', '.join(SCHEDULES)}")
    parser.add_argument("--ranks", type=int, metavar="N", help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, metavar="N", help="microbatches per step")
    parser.add_argument("--stages_per_rank", type=int, metavar="N", help="unset: as many as the schedule needs")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="a schedule's file, instead of a named schedule")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture to this file as well")
    return parser


def _picture(parser: argparse.ArgumentParser, options: argparse.Namespace, others: list[str]) -> Picture:
    given = [name for name, value in vars(options).items() if value is not None and name != "svg"]
    if not others:
        return _picture_of_options(parser, options)
    if not any(argument.startswith("--") and "." in argument for argument in others):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if given:
        parser.error(f"--{given[0]} can't go with a config, which says it already (parallelism.pipeline_parallel_…)")
    return picture_of_config(load_config(others).config)


def _picture_of_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Picture:
    if options.csv is not None:
        schedule = schedule_of_file(options.csv)
        ranks = len(schedule.ranks) if options.ranks is None else options.ranks
        microbatches = schedule.microbatches if options.microbatches is None else options.microbatches
        drawn = timeline("", ranks, microbatches, options.stages_per_rank, options.csv)
        return Picture(options.csv.name, drawn)
    missing = [f"--{name}" for name in ("schedule", "ranks", "microbatches") if getattr(options, name) is None]
    if missing:
        parser.error(f"{', '.join(missing)}: required, unless there is --csv or --job.config_file")
    drawn = timeline(options.schedule, options.ranks, options.microbatches, options.stages_per_rank)
    return Picture(options.schedule, drawn)


def picture_of_config(config: JobConfig) -> Picture:
    """The schedule of a run. Only what it follows from is checked, so that no data and no tokenizer need be there.

    Raises:
        UserError: the run has no pipeline, or not one that can be run.
    """
    settings = config.parallelism
    ranks = settings.pipeline_parallel_degree
    if ranks == 1:
        raise UserError("parallelism.pipeline_parallel_degree = 1: there is no pipeline to draw; set it to 2 or more")
    read = {key for rule in checks_pipeline.RULES for key in rule.reads}
    mistakes = checks.check(config, ranks, set(all_settings()) - read)
    if mistakes:
        raise ConfigError(mistakes)
    if settings.pipeline_parallel_schedule_csv is not None:
        path = Path(settings.pipeline_parallel_schedule_csv)
        return Picture(path.name, simulate(schedule_of_file(path)))
    modules = model_stages(config)
    assert modules is not None  # checks_pipeline
    per_rank = number_of_stages(settings, modules) // ranks
    name = settings.pipeline_parallel_schedule
    return Picture(name, timeline(name, ranks, pipeline_microbatches(config), per_rank))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--svg {path}: {error.strerror}") from error


# ---- Text ----


def draw_text(picture: Picture, *, colour: bool = False, width: int | None = None) -> str:
    """A row per rank and a column per tick, the longest time that divides all others, and what it amounts to.

    Args:
        colour: colour the actions for a terminal.
        width: cut the picture into blocks of at most this many characters per line.
    """
    drawn = picture.timeline
    tick = _tick(drawn)
    cell = max(len(_label(drawn, slot)) for slot in drawn.slots) + 1
    rows = [_row(drawn, rank, tick, cell, colour) for rank in range(drawn.ranks)]
    margin = len(f"rank {drawn.ranks - 1}  ")
    ticks = len(rows[0])
    per_block = ticks if width is None else max(1, (width - margin) // cell)
    lines = []
    for start in range(0, ticks, per_block):
        block = range(start, min(start + per_block, ticks))
        lines.append(" " * margin + _scale(block, tick, cell))
        lines += [f"rank {rank}".ljust(margin) + "".join(row[at] for at in block) for rank, row in enumerate(rows)]
        lines.append("")
    return "\n".join(line.rstrip() for line in [*lines, _legend(drawn), _summary(picture)])


def _tick(drawn: Timeline) -> Fraction:
    """The greatest common divisor of all times."""
    times = {time for slot in drawn.slots for time in (slot.start, slot.end)}
    denominator = math.lcm(*(time.denominator for time in times))
    return Fraction(math.gcd(*(int(time * denominator) for time in times)), denominator)


def _label(drawn: Timeline, slot: Slot) -> str:
    """Kind and microbatch; before them the stage, as in a schedule's file, where a rank has more than one."""
    stage = "" if drawn.stages == drawn.ranks else str(slot.stage)
    return f"{stage}{slot.kind}{slot.microbatch}"


def _row(drawn: Timeline, rank: int, tick: Fraction, cell: int, colour: bool) -> list[str]:
    """What stands in each column of a rank's row, `cell` characters wide."""
    columns = [".".ljust(cell)] * int(drawn.total / tick)
    stages = drawn.stages_of_rank(rank)
    for slot in drawn.of_rank(rank):
        first, end = int(slot.start / tick), int(slot.end / tick)
        padding = " " if end - first == 1 else "-"
        text = _label(drawn, slot).ljust((end - first) * cell - 1, padding) + " "
        pieces = [text[at : at + cell] for at in range(0, len(text), cell)]
        if colour:
            shades = _TERMINAL_COLOURS[slot.kind]
            shade = shades[min(stages.index(slot.stage), len(shades) - 1)]
            pieces = [f"\x1b[30;48;5;{shade}m{piece}\x1b[0m" for piece in pieces]
        columns[first:end] = pieces
    return columns


def _scale(block: range, tick: Fraction, cell: int) -> str:
    """Times above the columns."""
    step = _step(8 * tick / cell)
    text = ""
    for at in block:
        if at * tick % step == 0:
            text = text.ljust((at - block.start) * cell) + str(at * tick)
    return text


def _step(least: float | Fraction) -> int:
    """Time between two marks: the first of 1, 2, 5, 10, 20 … that isn't less."""
    return next(step for power in range(9) for step in (10**power, 2 * 10**power, 5 * 10**power) if step >= least)


def _legend(drawn: Timeline) -> str:
    kinds = ", ".join(f"{kind} {meaning}" for kind, meaning in _kinds(drawn).items())
    stage = "" if drawn.stages == drawn.ranks else "the stage before it, "
    return f"{kinds}; {stage}the microbatch after it; . idle"


def _kinds(drawn: Timeline) -> dict[str, str]:
    """The kinds that occur, and what they are."""
    there = {slot.kind for slot in drawn.slots}
    return {kind: meaning for kind, meaning in KINDS.items() if kind in there}


def _summary(picture: Picture) -> str:
    drawn = picture.timeline
    peaks = " ".join(f"{float(peak):g}" for peak in drawn.peak_in_flight)
    return (
        f"{_title(picture)}: total time {float(drawn.total):g}, bubble {float(drawn.bubble):.1%}, "
        f"peak in flight per rank {peaks}"
    )


def _title(picture: Picture) -> str:
    drawn = picture.timeline
    ranks = f"{drawn.ranks} rank{'' if drawn.ranks == 1 else 's'}"
    stages = "" if drawn.stages == drawn.ranks else f" × {float(drawn.stages_per_rank):g} stages"
    microbatches = f"{drawn.microbatches} microbatch{'' if drawn.microbatches == 1 else 'es'}"
    return f"{picture.name}, {ranks}{stages}, {microbatches}"


# ---- SVG ----


def draw_svg(picture: Picture) -> str:
    """A file that needs no other: a row per rank, a box per action with its microbatch, and what the colours mean."""
    drawn = picture.timeline
    scale = _pixels_per_time(drawn)
    chart = float(drawn.total) * scale
    width = max(_LEAST_WIDTH, math.ceil(_LEFT + chart + _RIGHT))
    height = _TOP + drawn.ranks * _ROW + _BOTTOM
    title = f"{_title(picture)}: bubble {float(drawn.bubble):.1%}"
    body = [
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(_LEFT, 30, title, size=17, weight="bold"),
        *_axis(drawn, scale),
        *(line for rank in range(drawn.ranks) for line in _svg_row(drawn, rank, scale)),
        *_svg_legend(drawn, height - 22),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f"role=\"img\" font-family=\"Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif\">"
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *body, "</svg>", ""])


def _pixels_per_time(drawn: Timeline) -> float:
    """Such that the microbatch's number fits into the narrowest box."""
    digits = len(str(drawn.microbatches - 1))
    return (10 + 7 * digits) / float(min(slot.end - slot.start for slot in drawn.slots))


def _axis(drawn: Timeline, scale: float) -> Iterator[str]:
    """Lines and numbers of the time."""
    bottom = _TOP + drawn.ranks * _ROW
    for time in range(0, int(drawn.total) + 1, _step(44 / scale)):
        x = _LEFT + time * scale
        yield f'<path d="M{x:.1f} {_TOP - 6}V{bottom + 4}" stroke="#d5dbe1" stroke-width="1"/>'
        yield _text(x, bottom + 19, str(time), anchor="middle", fill="#5b6770")
    note = "time; 1 = the forward pass of a microbatch through all of a rank's stages"
    yield _text(_LEFT, bottom + 38, note, fill="#5b6770")
    yield _text(_LEFT + float(drawn.total) * scale + 12, _TOP - 10, "peak in flight", fill="#5b6770")


def _svg_row(drawn: Timeline, rank: int, scale: float) -> Iterator[str]:
    top = _TOP + rank * _ROW + _GAP / 2
    baseline = top + (_ROW - _GAP) / 2 + 4
    chart = float(drawn.total) * scale
    stages = drawn.stages_of_rank(rank)
    yield _text(_LEFT - 12, baseline, f"rank {rank}", anchor="end")
    size = f'width="{chart:.1f}" height="{_ROW - _GAP}"'
    yield f'<rect class="idle" x="{_LEFT}" y="{top:g}" {size} fill="#8894a0" fill-opacity="0.13"/>'
    for slot in drawn.of_rank(rank):
        fill = _fill(slot.kind, stages.index(slot.stage), len(stages))
        yield _box(slot, fill, top, baseline, scale)
    yield _text(_LEFT + chart + 12, baseline, f"{float(drawn.peak_of_rank(rank)):g}")


def _box(slot: Slot, fill: str, top: float, baseline: float, scale: float) -> str:
    start, end = float(slot.start), float(slot.end)
    x, width = _LEFT + start * scale, (end - start) * scale
    hover = f"{KINDS[slot.kind]} of microbatch {slot.microbatch}, stage {slot.stage}, time {start:g} to {end:g}"
    return (
        f"<g><title>{hover}</title>"
        f'<rect class="box" x="{x:.1f}" y="{top:g}" width="{width:.1f}" height="{_ROW - _GAP}" fill="{fill}" '
        f'stroke="#fff" stroke-width="1"/>{_text(x + width / 2, baseline, str(slot.microbatch), anchor="middle")}</g>'
    )


def _svg_legend(drawn: Timeline, baseline: float) -> Iterator[str]:
    """Of each kind its shades, from a rank's first stage to its last."""
    count = max(len(drawn.stages_of_rank(rank)) for rank in range(drawn.ranks))
    x: float = _LEFT
    for kind, meaning in _kinds(drawn).items():
        for place in range(count):
            yield (
                f'<rect class="key" x="{x:g}" y="{baseline - 12:g}" width="14" height="15" '
                f'fill="{_fill(kind, place, count)}"/>'
            )
            x += 15
        yield _text(x + 5, baseline, meaning)
        x += 24 + 6.6 * len(meaning)
    if count > 1:
        yield _text(x, baseline, "shades: a rank's first to last stage", fill="#5b6770")


def _fill(kind: str, place: int, count: int) -> str:
    """The colour of a kind in a rank's stage number `place` of `count`."""
    part = 0.6 if count == 1 else place / (count - 1)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(*_FILLS[kind], strict=True))


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    anchor: str = "start",
    weight: str = "normal",
    fill: str = "#1f2933",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}">'
        f"{escape(text)}</text>"
    )


if __name__ == "__main__":
    main()
