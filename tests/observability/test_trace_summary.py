"""titan/observability/trace_summary.py on events made by hand, as the profiler would write them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from titan.observability.trace_summary import common, innermost, merged, summarize

Event = dict[str, Any]
MAIN, BACKWARD, STREAM, NCCL = 1, 2, 7, 20  # threads of the host, streams of the device


def event(category: str, name: str, start: float, end: float, thread: int = MAIN) -> Event:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "tid": thread}


def op(name: str, start: float, end: float, thread: int = MAIN) -> Event:
    return event("cpu_op", name, start, end, thread)


def named(name: str, start: float, end: float, thread: int = MAIN) -> Event:
    return event("user_annotation", name, start, end, thread)


def kernel(name: str, start: float, end: float, stream: int = STREAM) -> Event:
    return event("kernel", name, start, end, stream)


def test_an_accelerators_time() -> None:
    """Two steps of 1000 µs; sums by hand."""
    summary = summarize(
        [
            {"ph": "M", "name": "thread_name", "tid": MAIN},
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 5, "tid": MAIN},
            named("step 9", 0, 1000),
            named("step 10", 1000, 2000),
            event("gpu_user_annotation", "step 10", 1100, 2100, STREAM),  # the same region as the device saw it
            named("data", 0, 50),
            op("aten::mm", 50, 80),
            op("aten::mm", 100, 120, BACKWARD),
            kernel("gemm", 100, 400),
            kernel("gemm", 600, 800),
            kernel("softmax", 700, 900, STREAM + 1),  # two streams compute at once
            kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 300, 650, NCCL),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1000, 1100),
            kernel("adam", 1950, 2100),  # the host is ahead
            kernel("late", 2050, 2100, STREAM + 1),
        ]
    )
    assert summary.on_device and summary.steps == (9, 10)
    assert summary.total == pytest.approx(2100e-6)
    assert summary.computing == pytest.approx((300 + 300 + 100 + 150) * 1e-6)
    assert summary.communicating == pytest.approx(350e-6)
    assert summary.overlapped == pytest.approx((100 + 50) * 1e-6)
    assert summary.exposed == pytest.approx(200e-6)
    assert summary.idle == pytest.approx((2100 - 850 - 200) * 1e-6)
    assert summary.waiting == pytest.approx(50e-6)
    (gemm, softmax, *_), (gather,) = summary.operators, summary.collectives
    assert (gemm.name, gemm.calls, gemm.seconds) == ("gemm", 2, pytest.approx(500e-6))
    assert softmax.name == "softmax" and gather.calls == 1 and gather.name.startswith("ncclDevKernel_AllGather")


def test_a_cpus_time() -> None:
    summary = summarize(
        [
            op("aten::before", -500, -100),
            named("step 4", 0, 1000),
            named("data", 10, 60),
            op("aten::linear", 100, 300),
            op("aten::mm", 120, 280),
            op("autograd::engine::evaluate_function: MmBackward0", 300, 700),
            op("MmBackward0", 310, 400),
            op("aten::mm", 320, 390),
            named("FSDP::pre_backward (layers.0)", 400, 690),  # waits
            op("c10d::_allgather_base_", 410, 420),
            op("_c10d_functional::wait_tensor", 800, 900),
            named("gloo:all_gather", 350, 600, thread=30),
            named("gloo:all_reduce", 550, 610, thread=31),
            named("gloo:all_reduce", 990, 1200, thread=31),
        ]
    )
    assert not summary.on_device
    assert summary.total == pytest.approx(1000e-6)
    assert summary.computing == pytest.approx((200 + 90) * 1e-6)
    assert summary.communicating == pytest.approx((260 + 10) * 1e-6)
    assert summary.overlapped == pytest.approx(50e-6)
    assert summary.idle == pytest.approx((1000 - 290 - 270 + 50) * 1e-6)
    assert summary.waiting == pytest.approx(50e-6)
    assert {(cost.name, cost.calls, round(cost.seconds * 1e6)) for cost in summary.operators} == {
        ("aten::mm", 2, 230),
        ("aten::linear", 1, 40),
        ("MmBackward0", 1, 20),
    }
    assert [(cost.name, cost.calls, round(cost.seconds * 1e6)) for cost in summary.collectives] == [
        ("gloo:all_gather", 1, 250),
        ("gloo:all_reduce", 2, 70),
    ]


def test_text_is_per_step_and_lists_the_dearest() -> None:
    steps = [named("step 3", 0, 50_000), named("step 4", 50_000, 100_000)]
    text = summarize([*steps, *(op(f"aten::op{n}", 1000 * n, 1000 * n + 10 * n) for n in range(1, 31))]).text()
    lines = text.splitlines()
    assert lines[0] == "the main thread in a step, mean of 3 to 4"
    assert lines[1].split() == ["50.000", "ms", "100.0%", "total"]
    assert "collectives" not in lines  # there are none
    operators = lines[lines.index("operators by self time") + 1 :]
    assert operators[0].split() == ["0.150", "ms", "0.3%", "0.5", "×", "aten::op30"]
    assert len(operators) == 21 and operators[-1].strip() == "and 10 more"


def test_what_lies_between_steps_does_not_count() -> None:
    events = [named("step 3", 0, 100), named("step 4", 900, 1000), op("aten::validation", 200, 800)]
    summary = summarize([*events, op("aten::mm", 50, 150), op("aten::mm", 920, 990)])
    assert (summary.total, summary.computing) == (pytest.approx(200e-6), pytest.approx((50 + 70) * 1e-6))
    assert [cost.name for cost in summary.operators] == ["aten::mm"]


def test_a_trace_without_steps() -> None:
    with pytest.raises(ValueError, match="no region of a step"):
        summarize([op("aten::mm", 0, 1), named("Optimizer.step#AdamW.step", 0, 1)])


def test_intervals_are_those_of_counting_point_by_point() -> None:
    """Unions, what they have in common, and pieces of nested events, beside sets of whole microseconds."""
    draw = random.Random(0)

    def intervals() -> list[tuple[float, float]]:
        starts = (draw.randrange(100) for _ in range(draw.randrange(12)))
        return [(start, start + draw.randrange(15)) for start in starts]

    def points(some: list[tuple[float, float]]) -> set[int]:
        return {point for start, end in some for point in range(int(start), int(end))}

    def nested(start: int, end: int, depth: int) -> list[Event]:
        inner = sorted(draw.sample(range(start, end + 1), min(4, end - start + 1)) if end > start else [])
        found = [op(f"{depth}:{start}", start, end)]
        for first, last in zip(inner[::2], inner[1::2], strict=False):
            found += nested(first, last, depth + 1) if depth < 4 else []
        return found

    for _ in range(200):
        a, b = intervals(), intervals()
        assert points(merged(a)) == points(a)
        assert points(common(merged(a), merged(b))) == points(a) & points(b)
        events = nested(0, 60, 0)
        owner: dict[int, str] = {}
        for piece in innermost(events):
            for point in range(int(piece.start), int(piece.end)):
                assert point not in owner
                owner[point] = piece.event["name"]
        assert set(owner) == set(range(60))
        for point, name in owner.items():
            around = [e for e in events if e["ts"] <= point < e["ts"] + e["dur"]]
            assert int(name.partition(":")[0]) == max(int(e["name"].partition(":")[0]) for e in around)
