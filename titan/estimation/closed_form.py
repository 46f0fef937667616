"""Memory of a step in closed form: microseconds per layout, with no torch.

The moments at which memory may peak are written down one by one (`_moments`): the loss, the head's reduction, the
backward pass of the last block, that of the embedding, and the update. The largest of them counts.

What the allocator reserves is more than what is alive. FSDP2 gathers weights in one stream and sums gradients in
another, and each stream has a pool of its own that is never given back: the first as large as two neighbouring groups,
the second as large as all sharded gradients, where they don't lie in the pool that computes (parallelisms/fsdp.py).
What is left between blocks of that pool is about 1 %, until gradients take the place of larger tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from titan.config.job_config import JobConfig
from titan.estimation.communication import shares_a_border, traffic_of_rank
from titan.estimation.estimate import CATEGORIES, Moment, RankEstimate, rank_name
from titan.estimation.flops import hardware_flops
from titan.estimation.from_config import layout_of
from titan.estimation.groups import Group, groups_of, stage_numbers
from titan.estimation.layout import Layout, Stage
from titan.estimation.schedule import microbatches_in_flight

_FRAGMENTED = 1.01  # reserved over alive, of the pool that computes, with segments that can grow


def analytic_layout(config: JobConfig, world_size: int) -> list[RankEstimate]:
    """The estimate of a checked config, an entry for each rank of the pipeline."""
    return estimate(layout_of(config, world_size))


def estimate(layout: Layout) -> list[RankEstimate]:
    """An estimate for each rank of the pipeline, whose other ranks are alike."""
    per_rank = layout.world_size // layout.pp
    numbers = stage_numbers(layout)
    estimates = []
    for rank, stages in enumerate(layout.stages):
        where, breakdown = peak(layout, rank)
        name = "every rank" if layout.pp == 1 else rank_name(rank, numbers[rank])
        estimates.append(
            RankEstimate(
                name=name,
                ranks=per_rank,
                parameters=sum(group.parameters for stage in stages for group in groups_of(layout, stage)),
                breakdown=breakdown,
                peak_active_bytes=sum(breakdown.values()),
                peak_reserved_bytes=reserved_bytes(layout, rank),
                peak_at=where,
                hardware_flops=hardware_flops(layout, rank),
                traffic=traffic_of_rank(layout, rank),
                moments=moments_of(layout, rank),
                host_bytes=host_bytes(layout, rank),
            )
        )
    return estimates


def peak(layout: Layout, rank: int) -> tuple[str, Mapping[str, int]]:
    """Where a rank's memory peaks, and the bytes that are alive then, by category."""
    highest = max(_moments(layout, rank), key=lambda moment: sum(moment.alive.values()))
    return highest.where, {category: round(highest.alive.get(category, 0)) for category in CATEGORIES}


def moments_of(layout: Layout, rank: int) -> list[Moment]:
    """The moments of a step at which a rank's memory may peak, in order."""
    return [
        Moment(
            where=moment.where,
            phase=moment.where.partition(",")[0],
            alive={category: round(moment.alive.get(category, 0)) for category in CATEGORIES},
        )
        for moment in _moments(layout, rank)
    ]


def reserved_bytes(layout: Layout, rank: int) -> int:
    """The most that the allocator takes from the device."""
    groups = _groups_of_rank(layout, rank)
    computing = max(
        sum(moment.alive.values()) - moment.elsewhere + moment.in_pieces for moment in _moments(layout, rank)
    )
    if not layout.wrapped:
        return round(_FRAGMENTED * computing)
    # A group's buffer lives until its weights are copied out, while the next group's is gathered.
    sizes = [group.gathered for group in groups]
    pairs = [first + second for first, second in pairwise(sizes)] or sizes
    gather_pool = max(pairs) * (1 + 1 / layout.shards)
    if len(sizes) > 2 and sizes[0] < sizes[1]:
        gather_pool += sizes[0]  # what the first has left is too small for those that come after it
    summing_pool = 0.0 if layout.pools_gradients else _sharded_gradients(layout, groups)
    return round(_FRAGMENTED * computing + gather_pool + summing_pool)


def host_bytes(layout: Layout, rank: int) -> int:
    """What is offloaded: weights, gradients and the optimizer's state; and what blocks keep."""
    states = kept = 0.0
    if layout.cpu_offload:
        parameters = sum(group.parameters for group in _groups_of_rank(layout, rank))
        states = (2 * layout.weight + layout.moments * layout.moment) * parameters / layout.shards
    if layout.checkpointing.offload:
        layers = sum(stage.layers for stage in layout.stages[rank]) // layout.checkpointing.every
        kept = float(microbatches_in_flight(layout, rank)) * layers * layout.kept(layout.checkpointing.mode)
    return round(states + kept)


def _groups_of_rank(layout: Layout, rank: int) -> list[Group]:
    return [group for stage in layout.stages[rank] for group in groups_of(layout, stage)]


def _sharded_gradients(layout: Layout, groups: Sequence[Group]) -> float:
    if layout.cpu_offload or layout.early_step:
        return 0.0
    return layout.weight * sum(group.parameters for group in groups) / layout.shards


class _Moment(NamedTuple):
    """What may be the peak.

    Attributes:
        where: phase and layer.
        alive: bytes by category.
        elsewhere: how many of them lie in the pools of FSDP's streams.
        in_pieces: bytes that are free, but in pieces too small for what is needed.
    """

    where: str
    alive: dict[str, float]
    elsewhere: float
    in_pieces: float = 0.0


def _moments(layout: Layout, rank: int) -> Iterator[_Moment]:
    """The moments of a step at which a rank's memory may peak."""
    stages, groups = layout.stages[rank], _groups_of_rank(layout, rank)
    model, element = layout.model, layout.element
    parameters = sum(group.parameters for group in groups)
    shard = 0.0 if layout.cpu_offload else parameters / layout.shards
    sharded = _sharded_gradients(layout, groups)
    (block,) = groups_of(layout, Stage(1, False, False))
    root = groups[0].gathered if not layout.groups_ends and (stages[0].embedding or stages[-1].head) else 0
    stream = element * layout.split_tokens * model.dim

    # FSDP sums a pipeline's gradients over ranks after the last microbatch: until then they are whole.
    whole = layout.reduce * parameters if layout.pp > 1 and layout.microbatches > 1 and layout.wrapped else 0
    early = sharded if layout.accumulation > 1 or not layout.wrapped else 0.0
    kept_by_rank = sum(stage.layers for stage in stages) * layout.kept_by_block
    if layout.checkpointing.offload:  # one on its way, beside the one in use
        kept_by_rank = min(kept_by_rank, 2 * layout.kept_by_block)
    in_flight = float(microbatches_in_flight(layout, rank))
    # A pipeline's stage has buffers for the inputs and the gradients of all microbatches from the start, and keeps its
    # outputs until their gradients come. Its first block's input is such a buffer.
    received, sent = sum(not stage.embedding for stage in stages), sum(not stage.head for stage in stages)
    kept = in_flight * (kept_by_rank + (sent - received) * stream)
    buffers = float(layout.microbatches * (received + sent) * stream)
    if layout.holds_what_is_sent:  # when the last forward pass is done: all outputs, and gradients of inputs so far
        borders = received + sent - (2 if shares_a_border(layout, rank) else 0)
        buffers += max(0.0, layout.microbatches - in_flight) * borders * stream

    def moment(where: str, sharded_now: float, incoming: float = 0.0, **alive: float) -> _Moment:
        states = {"parameters": layout.weight * shard, "optimizer": layout.moments * layout.moment * shard}
        alive["communication"] = alive.get("communication", 0) + buffers
        alive["gradients"] = alive.get("gradients", 0) + sharded_now + whole
        alive["unsharded_parameters"] = alive.get("unsharded_parameters", 0) + incoming
        return _Moment(where, states | alive, (0 if layout.pools_gradients else sharded_now) + incoming)

    def unsharded(*held: Group) -> float:
        if not layout.wrapped:
            return 0.0
        return root + sum(g.gathered for g in (held if layout.reshards else groups) if g.gathered != root)

    head = groups_of(layout, Stage(0, False, True))[-1] if stages[-1].head and layout.groups_ends else None
    if any(stage.head for stage in stages):
        at_head = kept + _norm_and_head_input(layout)
        held = head or block  # the last group stays gathered between its forward and its backward pass
        # Nothing is gathered after it, so that its buffer lives on too.
        last_gather = held.gathered if layout.wrapped and layout.reshards else 0
        yield moment(
            "loss",
            early,
            last_gather,
            activations=at_head,
            unsharded_parameters=unsharded(held),
            loss=_loss_working_set(layout),
        )
        if head and layout.wrapped:
            yield moment(
                "backward, head",
                early,
                gradients=element * head.parameters,
                activations=at_head,
                unsharded_parameters=unsharded(head),
                communication=layout.reduce * head.parameters,
            )
    yield moment(
        "backward, last block",
        early,
        block.gathered * (1 + 1 / layout.shards) if layout.wrapped and layout.reshards else 0.0,
        gradients=element * block.parameters,
        activations=kept,
        unsharded_parameters=unsharded(block, block),
        # The input of the group's reduction before it is there until its own begins.
        communication=layout.reduce * (head or block).parameters if layout.wrapped and not whole else 0,
        temporaries=_working_set_of_block(layout, stream),
    )
    if not whole:
        yield moment(
            "backward, first block",
            max(early, sharded * (1 - (block.parameters + groups[0].parameters) / parameters)),
            gradients=element * block.parameters,
            activations=max(0.0, 1 - 1 / in_flight) * kept + layout.kept_by_block,
            unsharded_parameters=unsharded(groups[0], block),
            communication=layout.reduce * block.parameters if layout.wrapped else 0,
            temporaries=_working_set_of_block(layout, stream),
        )
    if any(stage.embedding for stage in stages):
        table = layout.vocabulary * model.dim
        if layout.reference and layout.tp > 1:  # DTensor's backward makes a gradient of the whole vocabulary
            table = model.vocab_size * model.dim
        last = moment(
            "backward, embedding",
            max(early, sharded),
            gradients=element * table,
            activations=max(0.0, 1 - 1 / in_flight) * kept + stream,
            unsharded_parameters=unsharded(),
            communication=layout.reduce * table if layout.wrapped else 0,
        )
        # Gradients of blocks lie where the input of the head's reduction was, which is as large as the embedding's.
        broken = layout.reduce * head.parameters if head and layout.wrapped and layout.pools_gradients else 0.0
        yield last._replace(in_pieces=broken)


def _working_set_of_block(layout: Layout, stream: int) -> float:
    """What the backward pass of a block computes again, and gradients on their way through it."""
    again = layout.kept("none") - (layout.kept_by_block if layout.checkpointing.every == 1 else 0)
    whole = layout.element * layout.tokens * layout.model.dim  # what tp gathers of the gradient for w2's products
    return again + layout.element * layout.tokens * layout.model.ffn_dim // layout.tp + stream + whole


def _norm_and_head_input(layout: Layout) -> float:
    """What the last norm keeps, and what it hands to the head, whole with tp."""
    stream = layout.split_tokens * layout.model.dim
    whole = layout.element * layout.tokens * layout.model.dim
    if layout.reference:  # a copy in fp32, and its product with the root mean square
        return (4 + 2 * layout.element) * stream + (whole if layout.tp > 1 else 0)
    return layout.element * stream + whole


def _loss_working_set(layout: Layout) -> float:
    """Logits, their gradient and what lies between; and what chunks of a loss add up in."""
    whole = layout.vocabulary if layout.loss_parallel else layout.model.vocab_size
    logits, element = layout.tokens * whole, layout.element
    if layout.reference:  # casts to fp32, log-softmax and its gradient are tensors of their own
        if layout.compiled_loss:
            return 4.0 * logits
        return (19.0 if layout.tp > 1 else 14.0) * logits
    # A cast of bfloat16 logits to fp32 and their log-softmax, or exponentials; torch.compile fuses the two.
    computing = (element + (4 if layout.compiled_loss else 8)) * logits
    narrowing = (4 + element) * logits
    if layout.chunks == 1:
        return max(computing, narrowing + element * logits)
    table = layout.vocabulary * layout.model.dim
    sums = 4 * table + element * layout.tokens * layout.model.dim
    return sums + max(computing / layout.chunks, narrowing / layout.chunks + element * table)
