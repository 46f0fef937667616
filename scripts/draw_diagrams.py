"""Draw the pictures of docs/images: `python scripts/draw_diagrams.py`. The same code gives the same bytes.

Each picture is one function that draws on a `Sheet`. Those of pipelines come from scripts/draw_schedule.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parents[1] / "docs" / "images"
_FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
_INK, _GREY, _PALE = "#1f2933", "#5b6770", "#eef1f4"
_BLUE, _GREEN, _AMBER, _PURPLE = "#b7d6f4", "#b8e2be", "#fcdd9c", "#ddcaf0"
_DEEP = "#5c9ad6"  # of a weight after the update
_OF_RANK = (_BLUE, _GREEN, _AMBER, _PURPLE)


class Sheet:
    """An SVG in the making: shapes by their pixels, from the left top corner."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.title, self.width, self.height = title, width, height
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, text: str = "", size: int = 13) -> None:
        """A filled rectangle with a text in its middle; each line of the text is one."""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="#fff"/>'
        )
        lines = text.split("\n") if text else []
        for number, line in enumerate(lines):
            baseline = y + height / 2 + size * 0.36 + (number - (len(lines) - 1) / 2) * size * 1.3
            self.text(x + width / 2, baseline, line, size=size, anchor="middle")

    def frame(self, x: float, y: float, width: float, height: float, text: str = "") -> None:
        """A line around something, with a text on its upper edge's inside."""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="none" stroke="#9aa5b1"/>'
        )
        if text:
            self.text(x + 10, y + 19, text, fill=_GREY)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 13,
        anchor: str = "start",
        fill: str = _INK,
        weight: str = "normal",
    ) -> None:
        """One line of text that begins, has its middle, or ends at x."""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" '
            f'font-weight="{weight}">{escape(text)}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A straight line with a head at its end."""
        self._shapes.append(
            f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{_GREY}" stroke-width="1.5" marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """The whole file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" role="img" font-family="{_FONT}">'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8Z" fill="{_GREY}"/></marker></defs>'
        )
        paper = f'<rect width="{self.width}" height="{self.height}" fill="#fff"/>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", marker, paper, *self._shapes, "</svg>", ""])


def mesh() -> str:
    """pp 2 × dp_shard 2 × cp 2 × tp 2: every rank where it is."""
    sheet = Sheet("The mesh of 16 ranks: pp 2 × dp_replicate 1 × dp_shard 2 × cp 2 × tp 2", 780, 372)
    sheet.text(20, 30, sheet.title, size=16, weight="bold")
    for pp in range(2):
        left = 20 + pp * 376
        sheet.frame(left, 48, 364, 204, f"pp {pp}: stage {pp} of the layers")
        for dp, cp in product(range(2), range(2)):
            x, y = left + 12 + cp * 174, 76 + dp * 88
            sheet.frame(x, y, 166, 80, f"dp_shard {dp}, cp {cp}")
            for tp in range(2):
                rank = ((pp * 2 + dp) * 2 + cp) * 2 + tp
                sheet.box(x + 8 + tp * 76, y + 28, 74, 44, _OF_RANK[2 * dp + cp], f"rank {rank}\ntp {tp}")
    notes = [
        ("tp", "shares every matrix product of a layer: neighbours, with the fastest links"),
        ("cp", "shares the tokens of each window; for weights it counts as dp_shard"),
        ("dp_shard", "shares the windows of a batch; each rank keeps a part of every weight"),
        ("dp_replicate", "copies of all this, which sum their gradients once a step; here 1"),
        ("pp", "shares the layers: stages say the least to each other, and may be far apart"),
    ]
    for number, (name, text) in enumerate(notes):
        sheet.text(20, 276 + 21 * number, name, weight="bold")
        sheet.text(124, 276 + 21 * number, text)
    return sheet.svg()


def fsdp() -> str:
    """A weight of one block on four ranks, from the start of a step to its end."""
    sheet = Sheet("A parameter under FSDP, on four ranks", 860, 318)
    sheet.text(20, 30, sheet.title, size=16, weight="bold")
    quarter, row, first = 19, 46, 86
    phases = [  # what it is; which quarters of weight and gradient a rank has; what happens then
        ("at rest", "own", "", "all-gather"),
        ("forward", "all", "", "let go"),
        ("other blocks", "own", "", "all-gather"),
        ("backward", "all", "all", "reduce-\nscatter"),
        ("gradient summed", "own", "own", "update"),
        ("next step", "new", "", ""),
    ]
    for number, (name, weights, gradients, then) in enumerate(phases):
        left = 76 + number * 132
        sheet.text(left + 2 * quarter, 68, name, anchor="middle", weight="bold")
        for rank in range(4):
            top = first + rank * row
            for part in range(4):
                mine = part == rank
                there = weights == "all" or mine
                weight = _DEEP if weights == "new" else _BLUE
                sheet.box(left + part * quarter, top, quarter, 16, weight if there else _PALE)
                if gradients:
                    there = gradients == "all" or mine
                    sheet.box(left + part * quarter, top + 18, quarter, 16, _GREEN if there else _PALE)
        if then:
            sheet.arrow(left + 4 * quarter + 6, first + 84, left + 132 - 6, first + 84)
            for line, text in enumerate(reversed(then.split("\n"))):
                sheet.text(left + 4 * quarter + 28, first + 76 - 15 * line, text, size=11, anchor="middle", fill=_GREY)
    for rank in range(4):
        sheet.text(20, first + rank * row + 13, f"rank {rank}")
    keys = [
        (_BLUE, "a quarter of the weight"),
        (_GREEN, "of its gradient; summed over all ranks at last"),
        (_DEEP, "updated"),
    ]
    x: float = 76
    for fill, text in keys:
        sheet.box(x, 284, quarter, 16, fill)
        sheet.text(x + 25, 297, text)
        x += 60 + 6.6 * len(text)
    return sheet.svg()


def tensor_parallel() -> str:
    """One half of a block over two ranks."""
    sheet = Sheet("Tensor and sequence parallelism: half a block on two ranks", 886, 268)
    sheet.text(20, 30, sheet.title, size=16, weight="bold")
    steps = [  # width of a box, its fill and text; or what both ranks do together
        (90, _BLUE, "norm\nhalf of the\nsequence"),
        (84, "", "all-gather\nsequence"),
        (136, _GREEN, "wq wk wv (w1 w3)\nhalf of the columns,\nwhole sequence"),
        (104, _GREEN, "attention (SiLU)\nhalf of the\nheads (width)"),
        (106, _GREEN, "wo (w2)\nhalf of the rows:\na part of a sum"),
        (92, "", "reduce-scatter\nsequence"),
        (92, _BLUE, "+ residual\nhalf of the\nsequence"),
    ]
    x: float = 72
    for number, (width, fill, text) in enumerate(steps):
        if fill:
            for rank in range(2):
                sheet.box(x, 56 + rank * 84, width, 66, fill, text, size=11)
        else:
            sheet.box(x, 56, width, 150, _AMBER, text, size=11)
        if number < len(steps) - 1:
            for rank in range(2):
                sheet.arrow(x + width + 1, 89 + rank * 84, x + width + 13, 89 + rank * 84)
        x += width + 15
    for rank in range(2):
        sheet.text(20, 93 + rank * 84, f"rank {rank}")
    sheet.text(
        72,
        234,
        "A block does this twice, for attention and for the feed-forward (in brackets), and twice more backwards.",
    )
    sheet.text(72, 254, "Between the messages everything is local; norms and residuals cost a half, too.", fill=_GREY)
    return sheet.svg()


def context_parallel() -> str:
    """Who computes which part of a causal attention, with cp = 4."""
    sheet = Sheet("Context parallelism, balanced: a window in 8 chunks on 4 ranks", 780, 366)
    sheet.text(20, 30, sheet.title, size=16, weight="bold")
    cell, left, top, chunks, ranks = 30, 92, 74, 8, 4
    sheet.text(left + chunks * cell / 2, 60, "keys and values: chunk", anchor="middle", fill=_GREY)
    for query in range(chunks):
        owner = min(query, chunks - 1 - query)
        sheet.text(left - 10, top + query * cell + 20, f"queries {query}", anchor="end", size=12)
        for key in range(chunks):
            fill = _OF_RANK[owner] if key <= query else _PALE
            sheet.box(left + key * cell, top + query * cell, cell, cell, fill, str(owner) if key <= query else "")
    for key in range(chunks):
        sheet.text(left + (key + 0.5) * cell, top + chunks * cell + 16, str(key), anchor="middle", size=12)
    x = left + chunks * cell + 60
    sheet.text(x, top + 12, "Each rank has an early and a late chunk:", weight="bold")
    for rank in range(ranks):
        y = top + 26 + rank * 26
        sheet.box(x, y, 20, 20, _OF_RANK[rank], str(rank))
        blocks = sum(query + 1 for query in (rank, chunks - 1 - rank))
        sheet.text(x + 30, y + 15, f"chunks {rank} and {chunks - 1 - rank}: {blocks} squares to compute")
    sheet.text(x, top + 158, "Cut into plain quarters, the last would be late:", weight="bold")
    per = chunks // ranks
    for rank in range(ranks):
        blocks = sum(query + 1 for query in range(per * rank, per * (rank + 1)))
        sheet.text(x + 30, top + 179 + 20 * rank, f"chunks {per * rank} and {per * rank + 1}: {blocks} squares")
    sheet.text(
        20,
        352,
        "A token attends to itself and to what is before it. Keys and values come from the other ranks.",
        fill=_GREY,
    )
    return sheet.svg()


def setup_order() -> str:
    """What train.py does before its first step, and why in this order."""
    steps = [
        (_PALE, "config read and checked", "a mistake ends the program before anything starts"),
        (_BLUE, "device, process group, preflight", "ranks find each other, and compare themselves"),
        (_BLUE, "one mesh of five dimensions", "every technique takes its ranks from here"),
        (_GREEN, "tokenizer, data", "which rows a rank reads follows from the mesh"),
        (
            _AMBER,
            "model without memory (meta device)",
            "405B parameters fit on a laptop as long as they are only shapes",
        ),
        (_AMBER, "pp: cut into stages", "the rest is done to each stage by itself"),
        (_AMBER, "float8: which linears", "the modules must be replaced before they are split"),
        (_AMBER, "tp: matrices split", "shapes are final from here on"),
        (_AMBER, "cp: attention replaced", "it has to know the heads that tp has left"),
        (_AMBER, "activation checkpointing", "within what is compiled, or around it"),
        (_AMBER, "torch.compile, block by block", "it sees tp's messages, and FSDP's hooks stay outside"),
        (_AMBER, "FSDP: weights sharded", "last, since it takes the parameters as the others left them"),
        (_PURPLE, "memory for this rank's shards", "never more than a rank's share"),
        (_PURPLE, "optimizer", "its state is sharded as the weights are"),
        (_PURPLE, "newest checkpoint, or initial weights", "the same numbers in every layout"),
        (_PALE, "the loop", "loss, gradients, update; now and then a checkpoint"),
    ]
    sheet = Sheet("What train.py does before the first step", 780, 56 + 39 * len(steps))
    sheet.text(20, 30, sheet.title, size=16, weight="bold")
    for number, (fill, what, why) in enumerate(steps):
        y = 48 + 39 * number
        sheet.box(20, y, 276, 27, fill, what)
        sheet.text(312, y + 18, why, fill=_GREY)
        if number < len(steps) - 1:
            sheet.arrow(158, y + 27, 158, y + 38)
    return sheet.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "mesh.svg": mesh,
    "fsdp.svg": fsdp,
    "tensor_parallel.svg": tensor_parallel,
    "context_parallel.svg": context_parallel,
    "setup_order.svg": setup_order,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Write all pictures."""
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/images.", allow_abbrev=False)
    parser.add_argument("--folder", type=Path, default=IMAGES, help="where to (default: docs/images)")
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
