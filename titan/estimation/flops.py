"""FLOPs of a step on one rank, in closed form: of all products that are computed, those computed again included.

For T tokens of a microbatch on a rank, P parameters of a block's matrices, tp = t, queries of width q, sequences of s:

    linears    2·T·P/t · (3 + r)            forward, gradients of inputs and of weights, and the share r computed again:
                                            "full" all of it, "op" wk, wo and w3, whose results it doesn't keep
    attention  4·T·s·q/t · (1 + 2.5 [+ 1])  the backward of flash attention computes the scores again; "full" once more
    head       6·T·V·d/t

Attention is counted over the full square, as the model FLOPs of titan/observability/flops.py are by default.
"""

from __future__ import annotations

from typing import NamedTuple

from titan.estimation.layout import Layout

ATTENTION_BACKWARD = 2.5  # of the forward: five products instead of two


class Passes(NamedTuple):
    """FLOPs of a block and microbatch, by pass; attention over the full square."""

    linear_forward: float
    linear_backward: float
    attention_forward: float
    attention_backward: float


def recomputed(layout: Layout) -> tuple[float, float]:
    """Shares, 0 to 1, of a block's linears and of its attention that the backward pass computes again."""
    products, own = layout.model.products, layout.checkpointing
    total = sum(products.values())
    if own.budget is not None:  # by and by, as memory gets less
        return 1 - own.budget, 1 - own.budget
    if own.mode == "none":
        return 0.0, 0.0
    # Computing again stops short of w2, whose result nobody needs; but a float8 product keeps its inputs at its end.
    last = products["w2"] if not layout.float8 or layout.compiled else 0
    if own.mode == "op":
        return (products["wk"] + products["wo"] + products["w3"] + products["w2"] - last) / total, 0.0
    early = last / total if own.early_stop or layout.reference else 0.0
    return (1 - early) / own.every, 1 / own.every


def block_passes(layout: Layout) -> Passes:
    """Of one block and microbatch, a mean over blocks."""
    linear = 2 * layout.tokens * sum(layout.model.products.values()) / layout.tp
    attention = 4 * layout.tokens * layout.seq_len * layout.model.query / layout.tp
    linear_again, attention_again = recomputed(layout)
    return Passes(linear, linear * (2 + linear_again), attention, attention * (ATTENTION_BACKWARD + attention_again))


def _seen(layout: Layout) -> float:
    """Share of the keys that a rank's queries are multiplied with.

    With keys gathered over cp, a late and an early chunk of queries see those before their end, half and a bit of all.
    In a ring they see all of their own, and half of all others.
    """
    cp = layout.cp
    if layout.ring:
        return (cp + 1) / (2 * cp) if layout.balanced else 1.0
    return (2 * cp + 1) / (4 * cp) if cp > 1 and layout.balanced else 1.0


def head_flops(layout: Layout) -> float:
    """The head's three products, of a microbatch."""
    return 6 * layout.tokens * layout.vocabulary * layout.model.dim


def hardware_flops(layout: Layout, rank: int) -> float:
    """Of a step of a rank of the pipeline."""
    stages = layout.stages[rank]
    layers, heads = sum(stage.layers for stage in stages), sum(stage.head for stage in stages)
    linear_forward, linear_backward, *attention = block_passes(layout)
    block = linear_forward + linear_backward + _seen(layout) * sum(attention)
    per_microbatch = layers * block + heads * head_flops(layout)
    return layout.microbatches * layout.accumulation * per_microbatch
