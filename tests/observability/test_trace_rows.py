"""titan/observability/trace_rows.py: what moves, and that then nothing overlaps."""

from __future__ import annotations

from typing import Any

from titan.observability.trace_rows import separate


def region(name: str, start: float, end: float, thread: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": end - start, "pid": 7, "tid": thread}


def test_what_overlaps_gets_rows_and_the_rest_stays() -> None:
    stays = [region("step 3", 0, 100), region("layers.0 forward", 5, 10), region("optimizer", 90, 99)]
    stays.append({"ph": "X", "cat": "cpu_op", "name": "gloo:no_region", "ts": 1, "dur": 2, "pid": 7, "tid": 7})
    layers = [region(f"layers.{n} backward", 40 - 10 * n, 50 - 10 * n) for n in (1, 0)]
    messages = [region("gloo:recv", 10, 60), region("gloo:send", 20, 30), region("gloo:send", 30, 40, thread=8)]
    events = [{"ph": "M", "name": "thread_name", "pid": 7, "tid": 7, "args": {"name": "python"}}]
    events += [*messages[::-1], *stays, *layers]
    separate(events, {"layers.0 backward", "layers.1 backward"})
    assert {event["tid"] for event in stays} == {7}
    row = layers[0]["tid"]
    assert [event["tid"] for event in layers] == [row, row] and row > 1 << 22
    assert [event["tid"] for event in messages] == [row + 1, row + 2, row + 2]
    titles = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert titles == {7: "python", row: "layers, backward", row + 1: "gloo", row + 2: "gloo"}


def test_a_trace_without_any() -> None:
    events = [region("step 3", 0, 100)]
    separate(events, {"layers.0 backward"})
    assert events == [region("step 3", 0, 100)]
