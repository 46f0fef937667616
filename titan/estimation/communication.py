"""What a rank sends in a step, by collective and dimension of the mesh, in closed form.

Bytes are those of a ring algorithm on n ranks: an all-gather of b bytes per rank sends b·(n − 1), a reduce-scatter of b
bytes in all b·(n − 1)/n, an all-reduce twice that. Messages of a few bytes (the loss, the norm) aren't listed.

    fsdp          each group's weights once per pass, forward and backward, except the last group's, which stay; once
                  per step where weights stay gathered. Gradients once per microbatch, in a pipeline once per batch
    dp_replicate  gradients of the shards, once per step
    tp            of the stream, per block and direction two all-gathers and two reduce-scatters; as many again when a
                  block is computed again, of "op" the all-gathers alone. One of each for embedding and head. Gradients
                  of norms' gains; three numbers per token for the loss
    cp            keys and values of every block
    pp            the stream, over each border between stages, once each way
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from titan.estimation.estimate import Traffic
from titan.estimation.layout import Layout, Stage
from titan.parallelisms.schedules import SCHEDULES

Shape = tuple[int, ...]


def traffic_of_rank(layout: Layout, rank: int) -> list[Traffic]:
    """All that a rank of the pipeline sends in a step; rank 0 of every other dimension."""
    return [
        *_fsdp(layout, layout.stages[rank]),
        *_tensor_parallel(layout, layout.stages[rank]),
        *_context_parallel(layout, layout.stages[rank]),
        *_pipeline(layout, rank),
    ]


def group_shapes(layout: Layout, stage: Stage) -> list[list[Shape]]:
    """Shapes of the weights of each of FSDP's groups on one rank of tp, in the order of the forward pass."""
    model, tp, vocabulary = layout.model, layout.tp, layout.vocabulary
    gain: list[Shape] = [(model.dim,)] * (model.gains // model.dim)
    columns = [(width // tp, model.dim) for width in (model.query, model.key, model.key, model.ffn_dim, model.ffn_dim)]
    rows = [(model.dim, width // tp) for width in (model.query, model.ffn_dim)]
    blocks: list[list[Shape]] = [[*gain, *gain, *columns, *rows]] * stage.layers
    first: list[Shape] = [(vocabulary, model.dim)] if stage.embedding else []
    last: list[Shape] = [*gain, (vocabulary, model.dim)] if stage.head else []
    if not layout.groups_ends:
        root = last if model.tied and first and last else [*first, *last]
        return [*blocks, root] if root else blocks
    return [group for group in ([*first], *blocks, [*last]) if group]


def _shard_elements(shapes: Sequence[Shape], ranks: int) -> int:
    """A rank's part of some weights, with the padding of those whose rows don't divide."""
    return sum(math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes)


def _fsdp(layout: Layout, stages: Sequence[Stage]) -> Iterator[Traffic]:
    if not layout.wrapped:
        return
    ranks, passes = layout.shards, layout.accumulation
    gathers = gathered = 0
    shards: list[int] = []
    for stage in stages:
        groups = group_shapes(layout, stage)
        sizes = [_shard_elements(shapes, ranks) for shapes in groups]
        sent = [_gathered_bytes(layout, shapes, ranks) for shapes in groups]
        shards += sizes
        again = len(groups) if layout.reshards else 0
        if again and layout.reshard == "default":  # the last group stays gathered, and the root if it has weights
            again -= 1 if layout.groups_ends else 2
        gathers += len(groups) + again
        gathered += sum(sent) + sum(sent[:again])
    if ranks > 1:
        yield Traffic("all_gather", "fsdp", passes * gathers, passes * (ranks - 1) * gathered)
        scattered = (ranks - 1) * layout.reduce * sum(shards)
        yield Traffic("reduce_scatter", "fsdp", passes * len(shards), passes * scattered)
    if (copies := layout.dp_replicate) > 1:
        yield Traffic(
            "all_reduce",
            "dp_replicate",
            len(shards),
            2 * (copies - 1) * layout.reduce * sum(shards) // copies,
        )


def _gathered_bytes(layout: Layout, shapes: Sequence[Shape], ranks: int) -> int:
    """What a rank gives to the gather of a group: matrices of blocks in float8 where they are gathered so."""
    narrow = [shape for shape in shapes if len(shape) > 1 and len(shapes) > 2] if layout.float8_gather else []
    saved = (layout.element - 1) * _shard_elements(narrow, ranks)
    return layout.element * _shard_elements(shapes, ranks) - saved


def stream_exchanges(layout: Layout) -> tuple[float, float, float, float]:
    """Of a block and microbatch: all-gathers and reduce-scatters over tp, forward, then backward."""
    own = layout.checkpointing
    if own.mode == "op":
        return 2, 2, 4, 2
    again = 0.0 if own.mode == "none" else 2 / own.every
    left_out = again / 2 if own.early_stop and not layout.compiled else 0.0  # the sum of w2's results
    return 2, 2, 2 + again, 2 + again - left_out


def _tensor_parallel(layout: Layout, stages: Sequence[Stage]) -> Iterator[Traffic]:
    if (tp := layout.tp) == 1:
        return
    model, times = layout.model, layout.microbatches * layout.accumulation
    layers = sum(stage.layers for stage in stages)
    embeddings, heads = (sum(getattr(stage, end) for stage in stages) for end in ("embedding", "head"))
    stream = layout.element * layout.tokens * model.dim * (tp - 1) // tp
    gathers_forward, scatters_forward, gathers_backward, scatters_backward = stream_exchanges(layout)
    gathers = round(layers * (gathers_forward + gathers_backward)) + embeddings + heads
    scatters = round(layers * (scatters_forward + scatters_backward)) + embeddings + heads
    messages = 0  # of the loss
    if heads and layout.loss_parallel:
        messages = 2 * layout.chunks * times * heads
    numbers = 3 * 4 * layout.tokens * times if messages else 0
    norms = (2 * layers + heads) * (model.gains // model.dim)
    sums = numbers * 2 * (tp - 1) // tp
    if layout.sequence_parallel:
        yield Traffic("all_gather", "tp", times * gathers, times * gathers * stream)
        yield Traffic("reduce_scatter", "tp", times * scatters, times * scatters * stream)
        reductions = layout.accumulation * norms  # a rank saw its part of the sequence only
        sums += reductions * layout.element * model.dim * 2 * (tp - 1) // tp
        yield Traffic("all_reduce", "tp", reductions + messages, sums)
    else:
        yield Traffic("all_reduce", "tp", times * scatters + messages, times * scatters * 2 * stream + sums)


def _context_parallel(layout: Layout, stages: Sequence[Stage]) -> Iterator[Traffic]:
    if (cp := layout.cp) == 1:
        return
    blocks = sum(stage.layers for stage in stages) * layout.microbatches * layout.accumulation
    keys_values = 2 * layout.element * layout.tokens * layout.model.key // layout.tp
    own = layout.checkpointing
    again = 1 / own.every if own.mode == "full" or (own.mode == "op" and not layout.ring) else 0
    forwards = round(blocks * (1 + again))
    if layout.ring:  # keys and values again in the backward pass, and their gradients, in fp32, all the way round
        hops, hops_of_gradients = (cp - 1) * (forwards + blocks), (cp - 1) * blocks
        size = keys_values * hops + keys_values * 4 // layout.element * hops_of_gradients
        yield Traffic("send", "cp", hops + hops_of_gradients, size)
    else:
        yield Traffic("all_gather", "cp", forwards, forwards * (cp - 1) * keys_values)
        yield Traffic("reduce_scatter", "cp", blocks, blocks * (cp - 1) * keys_values)


def _pipeline(layout: Layout, rank: int) -> Iterator[Traffic]:
    if layout.pp == 1:
        return
    stages = layout.stages[rank]
    sends = sum((not stage.head) + (not stage.embedding) for stage in stages)
    if shares_a_border(layout, rank):
        sends -= 2  # the two stages at the bottom of a V are one rank's
    calls = sends * layout.microbatches * layout.accumulation
    stream = layout.element * layout.split_tokens * layout.model.dim
    yield Traffic("send", "pp", calls, calls * stream)


def shares_a_border(layout: Layout, rank: int) -> bool:
    """Two stages of this rank follow each other, so that nothing is sent from one to the other."""
    return SCHEDULES[layout.schedule].v_shaped and rank == layout.pp - 1
