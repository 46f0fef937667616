"""The device mesh of an estimate drawn: who holds what."""

from __future__ import annotations

from titan.estimation.holdings import Holding, holdings, place_of
from titan.estimation.layout import Layout
from titan.pages.page import Markup, folded, section, table, tag
from titan.pages.scale import number

_MOST_STAGES, _MOST_COLUMNS, _MOST_ROWS = 8, 16, 4  # of the mesh that are drawn


def mesh_section(layout: Layout, per_node: int) -> Markup:
    """The ranks of each place in the pipeline as a grid.

    Args:
        per_node: ranks of a node.
    """
    held = holdings(layout)
    shown = held if len(held) <= _MOST_STAGES else [*held[: _MOST_STAGES - 1], held[-1]]
    stages = [_stage(layout, each, per_node) for each in shown]
    left_out = f" {len(held) - len(shown)} pipeline ranks in between aren't drawn." if len(shown) < len(held) else ""
    across = [name for name in ("cp", "tp") if getattr(layout, name) > 1]
    batch_ranks = layout.dp_replicate * layout.dp_shard
    if across:
        order = (
            f"Each row is one of {batch_ranks:,} batch rank(s), with windows of its own; columns: {' × '.join(across)}."
        )
    else:
        order = "Each rank is a batch rank, with windows of its own."
    note = f"A cell is a rank, with its number; shades alternate between nodes. {order}{left_out}"
    rows = [
        (
            each.pp if layout.pp > 1 else "–",
            f"{each.ranks[0]:,} to {each.ranks[-1]:,}",
            ", ".join(map(str, each.stages)),
            each.what,
            f"{number(each.parameters / layout.shards)}",
        )
        for each in held
    ]
    cells = [[str(cell) for cell in row] for row in rows]
    heads = ("pp", "Ranks", "Stages", "What", "Parameters on a rank")
    parts = [tag("div", stages, class_="mesh"), _shares(layout)]
    listing = table(heads, cells, texts=4)
    parts.append(folded("the whole list", listing) if len(held) > 2 else listing)
    return section("mesh", "Who holds what", parts, note)


def _shares(layout: Layout) -> Markup:
    """How a weight and a window come to be divided."""
    words = []
    if layout.tp > 1:
        words.append(f"each matrix of a layer is cut into {layout.tp} by tp")
    if layout.shards > 1:
        by = "dp_shard × cp" if layout.cp > 1 else "dp_shard"
        what = "its part" if layout.tp > 1 else "every weight"
        words.append(f"a rank keeps 1/{layout.shards:,} of {what}, and of the gradients and moments ({by})")
    if layout.dp_replicate > 1:
        words.append(f"there are {layout.dp_replicate:,} copies (dp_replicate)")
    if layout.cp > 1:
        words.append(f"a window of {layout.seq_len:,} tokens is cut into {layout.cp} pieces (cp)")
    text = "; ".join(words) or "one rank holds all"
    return tag("p", text[0].upper() + text[1:] + ".")


def _stage(layout: Layout, held: Holding, per_node: int) -> Markup:
    columns = layout.tp * layout.cp
    wide = columns if columns > 1 else min(len(held.ranks), 8)
    drawn_columns = min(wide, _MOST_COLUMNS)
    rows = -(-len(held.ranks) // wide)
    cells = []
    for row in range(min(rows, _MOST_ROWS)):
        for column in range(drawn_columns):
            index = row * wide + column
            if index < len(held.ranks):
                rank = held.ranks[index]
                place = ", ".join(f"{name} {at}" for name, at in place_of(layout, rank).items())
                kind = "odd" if rank // per_node % 2 else None
                cells.append(tag("span", str(rank), class_=kind, data_tip=f"rank {rank:,}: {place}\n{held.what}"))
    more = []
    if rows > _MOST_ROWS:
        more.append(f"and {(rows - _MOST_ROWS) * wide:,} more ranks like these")
    if wide > drawn_columns:
        more.append(f"{drawn_columns} of {wide} columns are drawn")
    title = f"pp {held.pp}: {held.what}" if layout.pp > 1 else held.what
    grid = tag("div", cells, class_="cells", style=f"grid-template-columns:repeat({drawn_columns},minmax(0,1fr))")
    note = [tag("div", "; ".join(more), class_="more")] if more else []
    return tag("div", [tag("h3", title), grid, *note], class_="stage")
