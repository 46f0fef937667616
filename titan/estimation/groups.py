"""The stages of each pipeline rank, and the groups in which FSDP gathers their weights."""

from __future__ import annotations

from dataclasses import dataclass

from titan.estimation.layout import Layout, Stage
from titan.parallelisms.schedules import SCHEDULES, stages_of_rank


@dataclass(frozen=True)
class Group:
    """Weights that are gathered together.

    Attributes:
        parameters: on a rank of tp, before sharding.
        gathered: bytes once gathered.
    """

    parameters: int
    gathered: int


def stage_numbers(layout: Layout) -> list[list[int]]:
    """Which stages each pipeline rank has."""
    total = sum(len(stages) for stages in layout.stages)
    v_shaped = SCHEDULES[layout.schedule].v_shaped
    return [stages_of_rank(rank, layout.pp, total, v_shaped) for rank in range(layout.pp)]


def groups_of(layout: Layout, stage: Stage) -> list[Group]:
    """FSDP's groups of a stage in the order of the forward pass; the root, if it has weights, comes first."""
    model, element = layout.model, layout.element
    matrices, gains = sum(model.products.values()) // layout.tp, 2 * model.gains
    gathered = (1 if layout.float8_gather else element) * matrices + element * gains
    blocks = [Group(matrices + gains, gathered)] * stage.layers
    end = layout.vocabulary * model.dim
    first, last = end if stage.embedding else 0, end + model.gains if stage.head else 0
    if not layout.groups_ends:  # both are the root's, which comes first
        tied = model.tied and stage.embedding and stage.head
        first, last = first + last - (end if tied else 0), 0
    first_groups, last_groups = ([Group(size, element * size)] if size else [] for size in (first, last))
    return [*first_groups, *blocks, *last_groups]
