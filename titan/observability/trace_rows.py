"""Rows for what viewers couldn't show where torch's profiler puts it.

A viewer takes the events of one thread as calls, which lie within each other or one after the other, and leaves out
what does neither. A layer's backward pass begins within an operator and ends within another; a message that gloo waits
for outlives the call that asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

_FIRST_ROW = 1 << 24  # threads of Linux have smaller numbers


def separate(events: list[dict[str, Any]], layers: Collection[str]) -> None:
    """Move such events of a trace, in place, to rows `layers, backward` and `gloo` of their process.

    Args:
        events: in the Chrome trace format.
        layers: names of layers' backward passes.
    """
    titles: dict[str, Callable[[str], bool]] = {
        "layers, backward": lambda name: name in layers,
        "gloo": lambda name: name.startswith("gloo:"),
    }
    regions = [event for event in events if event.get("cat") == "user_annotation"]
    row = _FIRST_ROW
    for title, belongs in titles.items():
        ends: list[float] = []  # of the last event of each row
        for event in sorted(filter(lambda event: belongs(event["name"]), regions), key=lambda event: event["ts"]):
            lane = next((lane for lane, end in enumerate(ends) if end <= event["ts"]), len(ends))
            if lane == len(ends):
                ends.append(0.0)
                name = {"name": "thread_name", "args": {"name": title}}
                events.append({"ph": "M", "pid": event["pid"], "tid": row + lane, **name})
            ends[lane] = event["ts"] + event["dur"]
            event["tid"] = row + lane
        row += len(ends)
