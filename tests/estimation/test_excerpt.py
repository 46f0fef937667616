"""Which microbatches stand for which, and what is played of them."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining.schedules import _Action

from titan.estimation.events import Allocation, Free, Place, Trace
from titan.estimation.excerpt import Excerpt, choose, play


def plan(text: str) -> list[_Action]:
    return [action for word in text.split() if (action := _Action.from_str(word)) is not None]


def words(excerpt: Excerpt) -> str:
    return " ".join(map(str, excerpt.actions))


def test_the_first_the_last_and_one_between_are_run() -> None:
    excerpt = choose(plan("0UNSHARD 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3 0RESHARD 0REDUCE_GRAD"))
    assert (excerpt.kept, excerpt.stand_ins) == ([0, 1, 3], {2: 1})
    assert words(excerpt) == "0UNSHARD 0F0 0F1 0B0 0B1 0F2 0B2 0RESHARD 0REDUCE_GRAD"
    assert [excerpt.times(number) for number in range(3)] == [1, 2, 1]


def test_with_backward_passes_in_two_parts_all_are_run() -> None:
    excerpt = choose(plan("0UNSHARD 0F0 0F1 0F2 0F3 0B0 0B1 0I2 0W2 0B3"))
    assert (excerpt.kept, excerpt.stand_ins) == ([0, 1, 2, 3], {})


def test_the_first_use_of_weights_that_were_gathered_is_run() -> None:
    again = "0RESHARD 1UNSHARD 1F0 1F1 1F2 1F3 1RESHARD 0UNSHARD"
    excerpt = choose(plan(f"0UNSHARD 0F0 0F1 0F2 0F3 {again} 0F4 0F5 0F6 0F7"))
    assert {0, 4} <= {*excerpt.kept}


def trace_of(excerpt: Excerpt, *, shared: bool = False) -> Trace:
    """Each action makes an object; a backward pass frees that of its forward pass, and the last free all others.

    Args:
        shared: a backward pass frees that of the forward pass of the microbatch before its own.
    """
    trace, made, visit = Trace(), {}, 0
    starts: list[int] = []
    for number, action in enumerate(excerpt.actions):
        starts.append(len(trace.events))
        _, kind, microbatch, *_ = action
        assert microbatch is not None
        place, visit = Place("forward" if kind.value == "F" else "backward", None, visit), visit + 1
        made[kind.value, microbatch] = number
        trace.events.append(Allocation(number, 10, 0, place, None, kind.value))
        trace.categories[number] = kind.value
        if kind.value == "B" and (gone := made.pop(("F", microbatch - shared), None)) is not None:
            trace.events.append(Free(gone, place, None))
    starts.append(len(trace.events))
    trace.action_starts.append(starts)
    trace.events += [Free(number, Place("optimizer", None, visit), None) for number in made.values()]
    return trace


def test_what_was_left_out_is_played() -> None:
    excerpt = choose(plan("0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"))
    trace = trace_of(excerpt)
    play(trace, excerpt)
    made = {event.object: event.operator for event in trace.events if isinstance(event, Allocation)}
    assert list(made.values()) == ["F", "F", "F", "B", "F", "B", "B", "B"]
    assert [trace.categories[number] for number in made] == list(made.values())
    freed = [event.object for event in trace.events if isinstance(event, Free)]
    assert sorted(freed) == sorted(made) and [made[number] for number in freed] == ["F"] * 4 + ["B"] * 4
    order = ["+" if isinstance(event, Allocation) else "-" for event in trace.events]
    assert "".join(order) == "++++-++-+-+-----"


def test_microbatches_that_need_each_other_are_refused() -> None:
    excerpt = choose(plan("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"))
    trace = trace_of(excerpt, shared=True)
    with pytest.raises(ValueError, match="aren't alike"):
        play(trace, excerpt)
