"""What an estimate of a layout consists of, whichever method made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# What memory is for. Every byte that is alive at the peak is one of these.
CATEGORIES = (
    "parameters",  # this rank's shards
    "gradients",  # of the shards
    "optimizer",  # its state
    "activations",  # kept for the backward pass
    "unsharded_parameters",  # gathered, with the memory that gathers pass through
    "communication",  # buffers of other collectives, of reduce-scatters above all
    "loss",  # logits, or chunks of them, and their gradient
    "temporaries",
)


# Of a step that is traced; those of a pipeline alternate.
PHASES = ("build", "forward", "loss", "backward", "optimizer")


@dataclass(frozen=True)
class Traffic:
    """What one kind of collective sends over one dimension of the mesh in a step, per rank.

    Attributes:
        collective: as torch.distributed calls it, such as all_gather or reduce_scatter; send for point to point.
        dim: of the mesh, such as "fsdp", "dp_replicate", "tp", "cp", "pp".
        calls: how many.
        bytes: that the rank sends, by a ring algorithm's count.
    """

    collective: str
    dim: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class Moment:
    """What is alive at a moment of a step.

    Attributes:
        where: phase and layer.
        phase: alone, such as "backward".
        alive: bytes by category.
        at: how many allocations and frees come before it in the step; None in closed form, which knows only the order.
        reserved_bytes: that the allocator has taken by then; None in closed form.
    """

    where: str
    phase: str
    alive: Mapping[str, int]
    at: int | None = None
    reserved_bytes: int | None = None

    @property
    def active_bytes(self) -> int:
        return sum(self.alive.values())


def rank_name(rank: int, stages: Sequence[int]) -> str:
    """How a rank of a pipeline is called, by the numbers of its stages. Both methods' estimates are matched by it."""
    return f"pp {rank} (stages {', '.join(map(str, stages))})"


@dataclass(frozen=True)
class RankEstimate:
    """A step of one rank; of a pipeline's ranks those that differ have one each.

    Attributes:
        name: such as "every rank", or "pp 0 (stages 0, 4)".
        ranks: how many ranks of the world are like it.
        parameters: that this rank's stages hold, before sharding over data parallel ranks, after that over tp.
        breakdown: bytes by category at the peak.
        peak_active_bytes: the most that tensors take at one time.
        peak_reserved_bytes: what the allocator has taken from the device by then.
        peak_at: phase, layer and operator of the peak.
        hardware_flops: of all products that are computed, those that are computed again included.
        traffic: what is sent.
        moments: of the step in order: those at which memory may peak, or what a trace saw, thinned out.
        host_bytes: the most that tensors which are kept there take of the host's memory, for each rank.
    """

    name: str
    ranks: int
    parameters: int
    breakdown: Mapping[str, int]
    peak_active_bytes: int
    peak_reserved_bytes: int
    peak_at: str
    hardware_flops: float
    traffic: Sequence[Traffic]
    moments: Sequence[Moment] = ()
    host_bytes: int = 0

    @property
    def highest(self) -> list[Moment]:
        """The closed form's moments, or of each phase of a trace the one with the most."""
        if any(moment.at is None for moment in self.moments):
            return list(self.moments)
        highest: dict[str, Moment] = {}
        for moment in self.moments:
            if moment.phase not in highest or moment.active_bytes > highest[moment.phase].active_bytes:
                highest[moment.phase] = moment
        return [highest[phase] for phase in PHASES if phase in highest]
