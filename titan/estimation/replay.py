"""A trace of a few layers → that of all of them.

Layers repeat: what one does with memory, and when, the next one does too. So five units of layers are traced, and the
third is played as often as is needed. A unit is one layer, or as many as it takes for a pattern to repeat, such as that
every fourth layer is checkpointed. The first two and the last two stand for themselves: what is at the ends of the
model reaches that far.

A free in one unit of what another made means, in a repetition, what the unit at the same distance made. Outside of
units, where weights, gradients or norms of all layers come one after another, whatever belongs to the third is
repeated as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from titan.estimation.events import Allocation, Event, Free, Message, Trace

TRACED, REPEATED = 5, 2  # how many units are traced, and the number of the one that is repeated

_Key = tuple[int, object, int]  # a unit, which visit of it, and the number of an allocation in it


@dataclass(frozen=True)
class _Run:
    """Events of one unit in a row, or outside of all (None)."""

    unit: int | None
    visit: object
    events: Sequence[Event]


def replay(trace: Trace, units: int) -> Trace:
    """The trace of so many units of layers, of one of TRACED units.

    Raises:
        ValueError: the layers aren't alike, so that it can't be said what more of them would do.
    """
    more = units - TRACED
    if more <= 0:
        return trace

    def times(unit: int | None) -> int:
        return 1 + more if unit == REPEATED else 1

    return Trace(
        events=_Player(list(_runs(trace.events)), more).play(),
        flops=Counter({unit: count * times(unit) for unit, count in trace.flops.items()}),
        messages={unit: _times(counts, times(unit)) for unit, counts in trace.messages.items()},
        categories=trace.categories,
    )


def _times(counts: Counter[Message], factor: int) -> Counter[Message]:
    return Counter({message: factor * count for message, count in counts.items()})


def _runs(events: Sequence[Event]) -> Iterator[_Run]:
    outside: Counter[int | None] = Counter()
    for (unit, place), run in groupby(events, lambda event: (event.unit, event.place)):
        visit: object = place.visit
        if place.unit is None:
            visit = "outside", outside[unit]
            outside[unit] += 1
        yield _Run(unit, visit, list(run))


class _Player:
    def __init__(self, runs: Sequence[_Run], more: int) -> None:
        self._runs, self._more = runs, more
        self._keys: dict[int, _Key] = {}  # where the trace's objects come from
        self._sizes: dict[_Key, int] = {}
        for run in runs:
            made = [event for event in run.events if isinstance(event, Allocation)]
            if run.unit is not None:
                for number, event in enumerate(made):
                    key = run.unit, run.visit, number
                    self._keys[event.object], self._sizes[key] = key, event.bytes
        self._events: list[Event] = []
        self._objects: dict[object, int] = {}  # in what is played, by where they come from
        self._made = 0

    def play(self) -> list[Event]:
        descending = False
        for run in self._runs:
            if run.unit is None or run.unit < REPEATED:
                self._play(run, 0)
                descending = descending and run.unit is None
            elif run.unit > REPEATED:
                self._play(run, self._more)
                descending = True
            else:  # the backward pass comes from the last layers
                shifts = range(self._more + 1)
                for shift in reversed(shifts) if descending else shifts:
                    self._play(run, shift)
        return self._events

    def _play(self, run: _Run, shift: int) -> None:
        """Once, for the unit that lies `shift` units further in the whole model than in the trace."""
        made = 0
        for event in run.events:
            if isinstance(event, Allocation):
                key: object = event.object
                if run.unit is not None:
                    key = run.unit + shift, run.visit, made
                    made += 1
                self._made += 1
                self._objects[key] = self._made
                self._add(event, self._made, shift)
            else:
                origin = self._origin(event.object, run.unit, shift)
                if origin not in self._objects:
                    raise ValueError(f"layers aren't alike: {event} frees what no layer has made")
                self._add(event, self._objects.pop(origin), shift)

    def _add(self, event: Event, number: int, shift: int) -> None:
        unit = None if event.unit is None else event.unit + shift
        place = event.place
        if place.unit is not None:
            place = place._replace(unit=place.unit + shift)
        if isinstance(event, Free):
            self._events.append(Free(number, place, unit))
        else:
            size = event.bytes + event.growth * self._more
            self._events.append(event._replace(object=number, bytes=size, place=place, unit=unit, growth=0))

    def _origin(self, number: int, unit: int | None, shift: int) -> object:
        """Where that comes from what a free of this object means, `shift` units further."""
        key = self._keys.get(number)
        if key is None:
            if unit == REPEATED:
                raise ValueError("layers aren't alike: one frees what was made outside of layers")
            return number
        maker, visit, made = key
        stand_in = self._stand_in(maker + shift), visit, made
        if self._sizes.get(stand_in) != self._sizes[key]:
            raise ValueError(f"layers aren't alike: {stand_in} isn't of {self._sizes[key]} bytes")
        return maker + shift, visit, made

    def _stand_in(self, unit: int) -> int:
        """Which traced unit a unit of the whole model is like."""
        return unit if unit <= REPEATED else max(REPEATED, unit - self._more)
