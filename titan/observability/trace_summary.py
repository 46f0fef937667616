"""What a trace says, as a page of text: where the time of its steps went, and which operators took it.

Reads events as torch's profiler writes them (the Chrome trace format): objects with a category `cat`, a `name`, a
thread `tid`, a start `ts` and a duration `dur`, both in microseconds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from titan.observability.device import is_collective_kernel

Event = dict[str, Any]
Interval = tuple[float, float]

_STEP = re.compile(r"step (\d+)")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # how the profiler calls what an accelerator does, of any make
_COLLECTIVE_ON_CPU = "gloo:"  # on its own threads, for as long as a collective takes
_NO_COMPUTING = re.compile(r"c10d|_c10d_functional|record_param_comms|autograd::engine")  # operators that send or wait
_MOST_LISTED = 20


class Piece(NamedTuple):
    """A stretch of an event in which it, and nothing that it called, was at work; microseconds."""

    event: Event
    start: float
    end: float


@dataclass(frozen=True)
class Cost:
    """Of all calls of one operator, kernel or collective.

    Attributes:
        calls: how often it ran.
        seconds: without what it called itself.
    """

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Summary:
    """Where the time of a rank's traced steps went: seconds, over all of them.

    Attributes:
        steps: their numbers.
        on_device: whether it is an accelerator's time; else the main thread's.
        total: of the steps.
        computing: operators or kernels were at work, other than collectives.
        communicating: collectives were.
        overlapped: both at once.
        waiting: the main thread waited for data.
        operators: what computed, the dearest first.
        collectives: what communicated, the dearest first.
    """

    steps: tuple[int, ...]
    on_device: bool
    total: float
    computing: float
    communicating: float
    overlapped: float
    waiting: float
    operators: tuple[Cost, ...]
    collectives: tuple[Cost, ...]

    @property
    def exposed(self) -> float:
        """Communicating, and nothing else."""
        return self.communicating - self.overlapped

    @property
    def idle(self) -> float:
        """Neither computing nor communicating."""
        return self.total - self.computing - self.exposed

    def text(self) -> str:
        """For people: milliseconds per step, and shares of a step."""
        first, last, number = self.steps[0], self.steps[-1], len(self.steps)
        whose = "the device" if self.on_device else "the main thread"
        parts = {
            "total": self.total,
            "computing": self.computing,
            "communicating": self.communicating,
            "  while computing": self.overlapped,
            "  exposed": self.exposed,
            "idle": self.idle,
            "waiting for data": self.waiting,
        }
        lines = [f"{whose} in {f'step {first}' if number == 1 else f'a step, mean of {first} to {last}'}"]
        lines += self._rows(parts.items())
        for title, costs in (("operators by self time", self.operators), ("collectives", self.collectives)):
            if costs:
                named = [(f"{cost.calls / number:6g} × {cost.name}", cost.seconds) for cost in costs[:_MOST_LISTED]]
                lines += ["", title, *self._rows(named)]
            if len(costs) > _MOST_LISTED:
                lines.append(f"  and {len(costs) - _MOST_LISTED} more")
        return "\n".join(lines) + "\n"

    def _rows(self, parts: Iterable[tuple[str, float]]) -> list[str]:
        return [
            f"  {1000 * seconds / len(self.steps):10.3f} ms {seconds / self.total:6.1%}  {label}"
            for label, seconds in parts
        ]


def summarize(events: Iterable[Event]) -> Summary:
    """What the events of a trace of whole steps say.

    An accelerator's work counts when it has done any; else that of the thread that ran the steps. What lies between
    steps, such as a validation, doesn't count.

    Raises:
        ValueError: no step is in the trace.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    steps = {int(match[1]): event for event in timed if (match := _STEP.fullmatch(event["name"])) and _is_named(event)}
    if not steps:
        raise ValueError("the trace has no region of a step")
    windows = merged(_span(event) for event in steps.values())
    thread = next(iter(steps.values()))["tid"]
    at_home = [event for event in timed if event["tid"] == thread and _is_call(event)]
    of_device = [Piece(event, *_span(event)) for event in timed if event.get("cat") in _ON_DEVICE]
    if of_device:
        # The last kernels run after the host has gone on.
        windows = merged([*windows, (windows[-1][0], max(piece.end for piece in of_device))])
        sent = [piece for piece in of_device if is_collective_kernel(piece.event["name"])]
        computed = [piece for piece in of_device if not is_collective_kernel(piece.event["name"])]
    else:
        sent = [Piece(event, *_span(event)) for event in timed if _is_collective_on_cpu(event)]
        computed = [piece for piece in innermost(at_home) if _computes(piece.event)]
    sent, computed = _within(sent, windows), _within(computed, windows)
    computing, communicating = (merged((piece.start, piece.end) for piece in pieces) for pieces in (computed, sent))
    waiting = merged(_span(event) for event in at_home if event["name"] == "data" and _is_named(event))
    return Summary(
        steps=tuple(sorted(steps)),
        on_device=bool(of_device),
        total=_seconds(windows),
        computing=_seconds(computing),
        communicating=_seconds(communicating),
        overlapped=_seconds(common(computing, communicating)),
        waiting=_seconds(common(waiting, windows)),
        operators=_costs(computed),
        collectives=_costs(sent),
    )


def innermost(events: Iterable[Event]) -> Iterator[Piece]:
    """The time of one thread, cut where events begin and end; each piece belongs to the event that was called last."""
    stack: list[Event] = []
    now = 0.0

    def leave(until: float) -> Iterator[Piece]:
        nonlocal now
        while stack and (end := _span(stack[-1])[1]) <= until:
            if end > now:
                yield Piece(stack[-1], now, end)
                now = end
            stack.pop()

    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        yield from leave(event["ts"])
        if stack and event["ts"] > now:
            yield Piece(stack[-1], now, event["ts"])
        now = max(now, event["ts"])
        stack.append(event)
    yield from leave(float("inf"))


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union as intervals that don't touch, in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((start, end))
    return union


def common(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """What two unions of intervals, both as `merged` gives them, have in common."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def _span(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _is_named(event: Event) -> bool:
    """Whether it is a region, on the host: accelerators' traces repeat them."""
    return event.get("cat") == "user_annotation"


def _is_collective_on_cpu(event: Event) -> bool:
    return _is_named(event) and event["name"].startswith(_COLLECTIVE_ON_CPU)


def _is_call(event: Event) -> bool:
    return event.get("cat") == "cpu_op" or (_is_named(event) and not _is_collective_on_cpu(event))


def _computes(event: Event) -> bool:
    return event["cat"] == "cpu_op" and not _NO_COMPUTING.match(event["name"])


def _within(pieces: Iterable[Piece], windows: Sequence[Interval]) -> list[Piece]:
    cut = ((piece.event, common([(piece.start, piece.end)], windows)) for piece in pieces)
    return [Piece(event, *interval) for event, intervals in cut for interval in intervals]


def _costs(pieces: Iterable[Piece]) -> tuple[Cost, ...]:
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, set[int]] = defaultdict(set)
    for event, start, end in pieces:
        seconds[event["name"]] += (end - start) / 1e6
        calls[event["name"]].add(id(event))
    costs = (Cost(name, len(calls[name]), spent) for name, spent in seconds.items())
    return tuple(sorted(costs, key=lambda cost: -cost.seconds))


def _seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals) / 1e6
