"""A few microbatches of a pipeline's rank → all of them.

A schedule is a list of actions: a stage's forward or backward pass of a microbatch, what it sends and receives, weights
that are gathered or freed. Of the microbatches most do the same with memory, so that few are run, in the order that
the whole plan has them in, and what one of those did is played wherever the plan has one that was left out.

Run are those that do what no other does: a stage's first use of weights that were just gathered, its first gradients,
its last ones, which are summed over ranks. And one to stand for the others. Where gradients of weights are a pass of
their own all are run: how such a pass finds the gradients depends on the microbatches around it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining.schedules import _Action, _ComputationType

from titan.estimation.events import Allocation, Event, Free, Trace
from titan.estimation.tracer import Tracer

_FORWARD = (
    _ComputationType.UNSHARD,
    _ComputationType.RECV_F,
    _ComputationType.FORWARD,
    _ComputationType.SEND_F,
)
_ADDS_GRADIENTS = (_ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Excerpt:
    """Which microbatches of a rank's plan are run.

    Attributes:
        plan: of the whole rank.
        kept: the microbatches that are run, ascending.
        stand_ins: for each one that is left out, the one that does the same.
    """

    plan: Sequence[_Action]
    kept: Sequence[int]
    stand_ins: Mapping[int, int]

    @property
    def actions(self) -> list[_Action]:
        """Those that are run, with microbatches numbered anew."""
        numbers = {microbatch: number for number, microbatch in enumerate(self.kept)}
        return [
            action if microbatch is None else action._replace(microbatch_index=numbers[microbatch])
            for action in self.plan
            if (microbatch := action.microbatch_index) is None or microbatch in numbers
        ]

    def times(self, number: int) -> int:
        """How many microbatches the one that is run as this number stands for, with itself."""
        return 1 + sum(stand_in == self.kept[number] for stand_in in self.stand_ins.values())


def one_by_one(plan: Sequence[_Action]) -> list[_Action]:
    """The actions of a plan, overlapped ones in the order in which torch runs them."""
    return [part for action in plan for part in action.sub_actions or (action,)]


def choose(plan: Sequence[_Action]) -> Excerpt:
    """The excerpt of a rank's plan.

    Args:
        plan: its actions one by one.
    """
    done: dict[int, set[tuple[int, str]]] = defaultdict(set)
    kept: set[int] = set()
    gathered: set[int] = set()  # stages that nobody has used since
    last: dict[int, int] = {}
    if any(action.computation_type == _ComputationType.BACKWARD_INPUT for action in plan):
        return Excerpt(plan, sorted({number for *_, number, _ in plan if number is not None}), {})
    for stage, kind, microbatch, *_ in plan:
        if kind == _ComputationType.UNSHARD:
            gathered.add(stage)
        if microbatch is None:
            continue
        done[microbatch].add((stage, kind.value))
        if stage in gathered and kind.value in ("F", "B", "I", "W"):
            gathered.remove(stage)
            kept.add(microbatch)
        if kind in _ADDS_GRADIENTS:
            if stage not in last:
                kept.add(microbatch)
            last[stage] = microbatch
    kept |= {*last.values()}
    stands_for: dict[frozenset[tuple[int, str]], int] = {}
    stand_ins = {}
    for microbatch in sorted(done.keys() - kept):
        stand_in = stands_for.setdefault(frozenset(done[microbatch]), microbatch)
        if stand_in != microbatch:
            stand_ins[microbatch] = stand_in
    return Excerpt(plan, sorted(kept | {*stands_for.values()}), stand_ins)


class WatchedActions(list[_Action]):
    """A rank's actions; whenever a step goes through them, the trace notes where each begins.

    Attributes:
        current: microbatch of the action under way; None if it is of none.
    """

    def __init__(self, actions: Sequence[_Action], tracer: Tracer) -> None:
        super().__init__(actions)
        self._tracer = tracer
        self.current: int | None = None

    def __iter__(self) -> Iterator[_Action]:
        starts: list[int] = []
        self._tracer.trace.action_starts.append(starts)
        for action in super().__iter__():
            starts.append(len(self._tracer.trace.events))
            self.current = action.microbatch_index
            # By the action alone, whichever come before it in an excerpt.
            self._tracer.enter("forward" if action.computation_type in _FORWARD else "backward", None)
            yield action
        starts.append(len(self._tracer.trace.events))


def play(trace: Trace, excerpt: Excerpt) -> None:
    """Put into a trace of an excerpt the events of the microbatches that were left out.

    Raises:
        ValueError: microbatches aren't alike, so that it can't be said what those that were left out would do.
    """
    trace.events = _Player(trace, excerpt).play()


class _Player:
    def __init__(self, trace: Trace, excerpt: Excerpt) -> None:
        self._trace, self._plan, self._stand_ins = trace, excerpt.plan, excerpt.stand_ins
        self._copied = {*excerpt.stand_ins.values()}
        self._run = [
            action
            for action in excerpt.plan
            if action.microbatch_index is None or action.microbatch_index not in excerpt.stand_ins
        ]
        self._events: list[Event] = []
        self._made = max((event.object for event in trace.events), default=0)
        self._visits = 1 + max((event.place.visit for event in trace.events), default=0)
        self._makers: dict[int, int] = {}  # by object that a stand-in has made, its microbatch
        self._copies: dict[int, dict[int, int]] = defaultdict(dict)  # by object: by microbatch, what is alive of them

    def play(self) -> list[Event]:
        end = 0
        for starts in self._trace.action_starts:
            self._play_outside(self._trace.events[end : starts[0]])
            self._play_pass(starts)
            end = starts[-1]
        self._play_outside(self._trace.events[end:])
        return self._events

    def _play_pass(self, starts: Sequence[int]) -> None:
        """Once through the plan."""
        pieces: dict[tuple[Any, ...], list[Event]] = {}
        for number, action in enumerate(self._run):
            pieces[action[:3]] = piece = self._trace.events[starts[number] : starts[number + 1]]
            if action.microbatch_index in self._copied:
                made = (event.object for event in piece if isinstance(event, Allocation))
                self._makers |= dict.fromkeys(made, action.microbatch_index)
        number = 0  # of the next action that was run
        for stage, kind, microbatch, *_ in self._plan:
            if microbatch is not None and microbatch in self._stand_ins:
                self._copy(pieces[stage, kind, self._stand_ins[microbatch]], microbatch)
                continue
            piece = self._trace.events[starts[number] : starts[number + 1]]
            number += 1
            if microbatch is None:
                self._play_outside(piece)
                continue
            if any(self._makers.get(event.object, microbatch) != microbatch for event in piece):
                raise ValueError(f"microbatches aren't alike: {microbatch} frees what another has made")
            self._events += piece

    def _play_outside(self, piece: Sequence[Event]) -> None:
        """Of no microbatch: what is freed here of one is freed of all that it stands for."""
        for event in piece:
            self._events.append(event)
            if isinstance(event, Free) and event.object in self._copies:
                copies = self._copies.pop(event.object).values()
                self._events += [event._replace(object=copy) for copy in copies]

    def _copy(self, piece: Sequence[Event], microbatch: int) -> None:
        """The events of an action once more, as those of a microbatch that was left out."""
        categories, shift = self._trace.categories, (1 + microbatch) * self._visits
        before = None
        for event in piece:
            if event.place is not before:
                before = event.place
                place = before._replace(visit=before.visit + shift)
            if isinstance(event, Allocation):
                self._made += 1
                self._copies[event.object][microbatch] = self._made
                if (category := categories.get(event.object)) is not None:
                    categories[self._made] = category
                self._events.append(event._replace(object=self._made, place=place))
            else:
                copies = self._copies.get(event.object)
                if copies is None or microbatch not in copies:
                    raise ValueError(f"microbatches aren't alike: {microbatch} frees what it hasn't made, {event}")
                self._events.append(Free(copies.pop(microbatch), place, event.unit))
