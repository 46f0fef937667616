"""The events of a step → the most memory that it takes, what that is for, and where in the step it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from titan.estimation.allocator import CachingAllocator, block_size
from titan.estimation.events import HOST, Allocation, Event, Free, Place
from titan.estimation.history import History


class Peak(NamedTuple):
    """The moment at which tensors take the most memory.

    Attributes:
        active_bytes: by the allocator's count, blocks rounded up to 512 bytes.
        reserved_bytes: the most that the allocator has reserved in the whole step.
        breakdown: bytes by category of what is alive at the moment.
        place: of the moment.
        operator: whose result is the last to come.
        host_bytes: the most that tensors take of the host's memory.
    """

    active_bytes: int
    reserved_bytes: int
    breakdown: Mapping[str, int]
    place: Place
    operator: str
    host_bytes: int


def classify(events: Iterable[Event], known: Mapping[int, str]) -> list[Event]:
    """Set each allocation's category, by what is known of it, or by where it begins and ends.

    Args:
        known: categories of some objects.
    """
    events = list(events)
    ends = {event.object: event.place for event in events if isinstance(event, Free)}
    return [
        event._replace(category=known.get(event.object) or _category(event, ends.get(event.object)))
        if isinstance(event, Allocation)
        else event
        for event in events
    ]


def _category(event: Allocation, end: Place | None) -> str:
    born = event.place.phase
    if born == "forward" and end is not None and end.phase != "forward":
        return "activations"
    if event.stream != 0 or event.operator.startswith("_c10d_functional::"):
        return "communication"
    if born == "loss":
        return "loss"
    return "temporaries"


def find_peak(events: Iterable[Event], *, expandable: bool = True, history: History | None = None) -> Peak:
    """Run the events through the allocator, and show each to the history."""
    events = list(events)
    host = {event.object: event.bytes for event in events if isinstance(event, Allocation) and event.stream == HOST}
    host_now = most_on_host = 0
    for event in events:
        if event.object in host:
            host_now += host[event.object] * (1 if isinstance(event, Allocation) else -1)
            most_on_host = max(most_on_host, host_now)
    events = [event for event in events if event.object not in host]
    allocator = CachingAllocator(expandable=expandable)
    blocks = {}
    alive: dict[int, Allocation] = {}
    highest, peak_number, last = 0, -1, None
    for number, event in enumerate(events):
        if isinstance(event, Allocation):
            blocks[event.object] = allocator.allocate(event.bytes, event.stream)
            if allocator.active > highest:
                highest, peak_number, last = allocator.active, number, event
        else:
            allocator.free(blocks.pop(event.object))
        if history is not None:
            history.add(event, allocator.reserved)
    for event in events[: peak_number + 1]:
        if isinstance(event, Allocation):
            alive[event.object] = event
        else:
            del alive[event.object]
    breakdown: Counter[str] = Counter()
    for allocation in alive.values():
        breakdown[allocation.category] += block_size(allocation.bytes)
    assert last is not None
    return Peak(highest, allocator.reserved, breakdown, last.place, last.operator, most_on_host)
