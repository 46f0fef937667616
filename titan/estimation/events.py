"""What a traced step consists of: allocations and frees in order, and counters of products and messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

HOST = -1  # in place of a stream: memory of the host, not of the device


class Place(NamedTuple):
    """Where in a step something happens.

    Attributes:
        phase: "build", "forward", "loss", "backward" or "optimizer".
        unit: of layers that repeat (replay.py), counted from 0; None outside of layers.
        visit: how often the step has come into this unit before.
    """

    phase: str
    unit: int | None
    visit: int = 0


class Allocation(NamedTuple):
    """A storage appears.

    Attributes:
        object: its number; no two allocations of a trace have the same.
        bytes: above 0.
        stream: that asks for it, 0 being the one that computes; or HOST.
        place: where it happens.
        unit: of layers that it is counted with; beside the place's, that of the parameter that it is made for.
        operator: whose result it is.
        growth: bytes that each further unit of layers adds, of things like a list of all gradients' norms.
        category: of `estimate.CATEGORIES`.
    """

    object: int
    bytes: int
    stream: int
    place: Place
    unit: int | None
    operator: str
    growth: int = 0
    category: str = "temporaries"


class Free(NamedTuple):
    """A storage is gone."""

    object: int
    place: Place
    unit: int | None


Event = Allocation | Free


class Message(NamedTuple):
    """A kind of collective, as a rank takes part in it.

    Attributes:
        collective: as torch.distributed calls it.
        dim: of the mesh.
        bytes: of the tensor that is handed in.
        ranks: of the group, at least 2.
    """

    collective: str
    dim: str
    bytes: int
    ranks: int

    @property
    def sent(self) -> int:
        """Bytes that the rank sends in a ring."""
        others = self.ranks - 1
        match self.collective:
            case "all_gather":
                return self.bytes * others
            case "reduce_scatter" | "all_to_all":
                return self.bytes * others // self.ranks
            case "all_reduce":
                return 2 * self.bytes * others // self.ranks
            case _:
                return self.bytes


@dataclass
class Trace:
    """What was recorded of a step.

    Attributes:
        events: in order.
        flops: of products, by unit of layers.
        messages: how many of each kind, by unit of layers.
        categories: what objects are for, where their lifetime doesn't say it (peak.py).
        action_starts: for each pass through a pipeline's plan, how many events come before each of its actions, and
            before what follows them.
    """

    events: list[Event] = field(default_factory=list)
    flops: Counter[int | None] = field(default_factory=Counter)
    messages: dict[int | None, Counter[Message]] = field(default_factory=dict)
    categories: dict[int, str] = field(default_factory=dict)
    action_starts: list[list[int]] = field(default_factory=list)
