"""Who holds what: the layers of each pipeline rank, and where a rank of the job is in the mesh."""

from __future__ import annotations

from dataclasses import dataclass

from titan.estimation.groups import groups_of, stage_numbers
from titan.estimation.layout import Layout


@dataclass(frozen=True)
class Holding:
    """What the ranks of one place in the pipeline hold.

    Attributes:
        pp: the place.
        ranks: of the job; they follow each other.
        stages: their numbers.
        what: such as "embedding, layers 0 to 15".
        parameters: on one rank of tp, before sharding.
    """

    pp: int
    ranks: range
    stages: tuple[int, ...]
    what: str
    parameters: int

    def __str__(self) -> str:
        ranks = f"ranks {self.ranks[0]:,} to {self.ranks[-1]:,}" if len(self.ranks) > 1 else f"rank {self.ranks[0]:,}"
        return f"pp {self.pp} ({ranks}): {self.what}"


def holdings(layout: Layout) -> list[Holding]:
    """Of each pipeline rank."""
    numbers = stage_numbers(layout)
    stages = {
        number: stage
        for own, held in zip(numbers, layout.stages, strict=True)
        for number, stage in zip(own, held, strict=True)
    }
    first, starts = 0, dict[int, int]()
    for number in sorted(stages):
        starts[number] = first
        first += stages[number].layers
    each = layout.world_size // layout.pp
    found = []
    for rank, own in enumerate(numbers):
        layers = []
        for number in own:
            start, count = starts[number], stages[number].layers
            layers += [f"{start} to {start + count - 1}" if count > 1 else str(start)] if count else []
        parts = ["embedding"] if any(stages[number].embedding for number in own) else []
        parts += [f"layers {', '.join(layers)}"] if layers else []
        parts += ["head"] if any(stages[number].head for number in own) else []
        parameters = sum(group.parameters for number in own for group in groups_of(layout, stages[number]))
        ranks = range(rank * each, (rank + 1) * each)
        found.append(Holding(rank, ranks, tuple(own), ", ".join(parts), parameters))
    return found


def place_of(layout: Layout, rank: int) -> dict[str, int]:
    """The coordinates of a rank, by dimension; the last dimension's neighbours follow each other."""
    place = {}
    for name in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        rank, place[name] = divmod(rank, getattr(layout, name))
    return dict(reversed(place.items()))
