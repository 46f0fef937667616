"""Memory over a step, thinned out to what a picture shows: of each column the moments with the least and the most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from titan.estimation.allocator import block_size
from titan.estimation.estimate import CATEGORIES, Moment
from titan.estimation.events import Allocation, Event, Place

COLUMNS = 300


class _Seen(NamedTuple):
    number: int
    place: Place
    active: int
    alive: dict[str, int]
    reserved: int


class History:
    """Follows the events of a step, which are as many as is said.

    Events of the phase "build" are what is there when the step begins.
    """

    def __init__(self, events: int) -> None:
        self._width = max(1, -(-events // COLUMNS))
        self._objects: dict[int, tuple[str, int]] = {}
        self._alive: Counter[str] = Counter()
        self._active = self._number = 0
        self._least: list[_Seen] = []
        self._most: list[_Seen] = []

    def add(self, event: Event, reserved: int) -> None:
        """An event has happened, and the allocator has taken so much from the device."""
        if isinstance(event, Allocation):
            size = block_size(event.bytes)
            self._objects[event.object] = event.category, size
        else:
            category, size = self._objects.pop(event.object)
            size = -size
        self._alive[event.category if isinstance(event, Allocation) else category] += size
        self._active += size
        if event.place.phase == "build":
            return
        column = self._number // self._width
        if column == len(self._most):
            seen = self._seen(event.place, reserved)
            self._least.append(seen)
            self._most.append(seen)
        elif self._active > self._most[column].active:
            self._most[column] = self._seen(event.place, reserved)
        elif self._active < self._least[column].active:
            self._least[column] = self._seen(event.place, reserved)
        self._number += 1

    def _seen(self, place: Place, reserved: int) -> _Seen:
        return _Seen(self._number, place, self._active, dict(self._alive), reserved)

    def moments(self, describe: Callable[[Place], str]) -> list[Moment]:
        """In order.

        Args:
            describe: a place for people.
        """
        chosen = {seen.number: seen for seen in (*self._least, *self._most)}
        return [
            Moment(
                where=describe(seen.place),
                phase=seen.place.phase,
                alive={category: seen.alive.get(category, 0) for category in CATEGORIES},
                at=number,
                reserved_bytes=seen.reserved,
            )
            for number, seen in sorted(chosen.items())
        ]
