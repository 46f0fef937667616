"""titan/observability/health.py."""

import json
import math
import random

import pytest

from titan.observability.health import LossSpikes, SlowRanks


def noisy(steps: int, level: float = 3.0, spread: float = 0.05) -> list[float]:
    """Losses that fall slowly, with noise as batches have it."""
    generator = random.Random(0)
    return [level - 0.001 * step + generator.gauss(0, spread) for step in range(steps)]


def warned(spikes: LossSpikes, losses: list[float], first: int = 1) -> list[int]:
    return [step for step, loss in enumerate(losses, first) if spikes.add(step, loss)]


def test_a_spike_is_told_once_with_its_step_and_sizes() -> None:
    spikes = LossSpikes()
    assert warned(spikes, noisy(500)) == []
    warning = spikes.add(501, 4.5)
    assert warning is not None
    assert warning.startswith("loss spike at step 501: 4.5000; the median of the 64 steps before is 2.5")
    assert warned(spikes, [4.4, 4.3, 2.5, 2.5, 4.4], 502) == [506]  # the same spike goes on; then comes another one


def test_what_is_not_finite_does_not_poison_it() -> None:
    spikes = LossSpikes()
    assert warned(spikes, noisy(100)) == []
    assert warned(spikes, [math.nan, math.inf, -math.inf] * 30, 101) == []
    assert warned(spikes, [2.9, 4.0], 191) == [192]


def test_a_lasting_jump_becomes_the_new_level() -> None:
    spikes = LossSpikes()
    assert warned(spikes, noisy(100)) == []
    assert warned(spikes, noisy(100, level=4.0), 101) == [101]
    assert warned(spikes, [5.0], 201) == [201]


def test_a_quick_start_and_equal_losses_are_no_spikes() -> None:
    assert warned(LossSpikes(), [3 + 7 * math.exp(-step / 5) for step in range(100)]) == []
    spikes = LossSpikes()
    assert warned(spikes, [1.0] * 50 + [1.01] * 50) == []  # the deviation is 0, and 1 % isn't worth a word
    assert warned(spikes, [1.2], 101) == [101]
    assert warned(LossSpikes(), [1.0, 2.0, 9.0]) == []  # too few to know


def test_a_resume_forgets_nothing() -> None:
    losses = [*noisy(60), 4.0, 4.0, *noisy(20), 4.5]
    straight = LossSpikes()
    expected = warned(straight, losses)
    assert expected == [61, 83]
    for cut in (10, 61, 62, 80):
        before, after = LossSpikes(), LossSpikes()
        found = warned(before, losses[:cut])
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert found + warned(after, losses[cut:], cut + 1) == expected


QUICK = [0.01, 0.012, 0.011, 0.009]


def test_a_slow_rank_is_told_when_it_stays_slow() -> None:
    ranks = SlowRanks()
    slow = [*QUICK[:2], 0.5, QUICK[3]]
    assert [ranks.add(slow, [0.0, 0.0, 0.4, 0.0], 1.0) for _ in range(2)] == [[], []]
    (warning,) = ranks.add(slow, [0.0, 0.0, 0.4, 0.0], 1.0)
    assert warning == (
        "rank 2 holds the others up in each step of 1.000 s: its own work takes 0.500 s (0.400 s for data), "
        "the median rank's 0.010 s; so it was in the last 3 logs"
    )
    assert ranks.add(slow, QUICK, 1.0) == []  # told already
    assert ranks.add(QUICK, QUICK, 1.0) == []
    assert [len(ranks.add(slow, QUICK, 1.0)) for _ in range(4)] == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("own", "step_seconds"),
    [
        ([*QUICK, 0.05], 1.0),  # five times the median, but 4 % of a step
        ([0.5, 0.5, 0.9], 1.0),  # not twice the median
        ([0.4] * 8, 1.0),
    ],
)
def test_ranks_that_cost_little_are_not_slow(own: list[float], step_seconds: float) -> None:
    ranks = SlowRanks()
    assert [ranks.add(own, own, step_seconds) for _ in range(5)] == [[]] * 5


def test_the_slower_of_two_ranks_is_found() -> None:
    ranks = SlowRanks()
    assert [len(ranks.add([0.01, 0.4], [0.0, 0.0], 0.5)) for _ in range(3)] == [0, 0, 1]


def test_ranks_that_take_turns_are_not_slow() -> None:
    ranks = SlowRanks()
    assert [ranks.add([0.5 if rank == log % 4 else 0.01 for rank in range(4)], QUICK, 1.0) for log in range(12)] == (
        [[]] * 12
    )
