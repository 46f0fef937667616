"""The proportions of a mixture hold at every window, whatever the weights and the global batch."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from titan.data.shares import Shares, integer_weights

VECTORS: list[tuple[list[float], int]] = [  # weights, global batch
    ([1.0], 8),
    ([1.0, 1.0], 8),
    ([0.7, 0.3], 64),
    ([0.999, 0.001], 7),
    ([1.0, 0.0, 1.0, 1.0], 12),
    ([50.0, 20.0, 15.0, 10.0, 5.0], 1),
    ([997.0, 991.0, 983.0, 101.0, 3.0], 512),
    ([1.0] * 8, 100),
]


def random_vectors(count: int) -> list[tuple[list[float], int]]:
    draw = random.Random(5)
    return [
        ([draw.choice([draw.random(), 10.0 ** -draw.randrange(5)]) for _ in range(draw.randrange(2, 10))], 2**power)
        for power in (draw.randrange(9) for _ in range(count))
    ]


def steps_of(weights: Sequence[int], global_batch: int, count: int) -> list[tuple[list[int], list[int]]]:
    """Of each step its windows in the order in which they were given, and in that of its rows."""
    shares, found = Shares(weights), []
    for _ in range(count):
        before, given = Shares(weights, shares.counts), []
        for _ in range(global_batch):
            given.append(shares.next())
            shares.give(given[-1])
        found.append((given, before.turned(given)))
    return found


def furthest(windows: list[int], weights: Sequence[float]) -> float:
    """How far any source was from its share after any window."""
    given = np.cumsum(np.eye(len(weights))[windows], axis=0)
    wanted = np.outer(np.arange(1, len(windows) + 1), np.array(weights) / sum(weights))
    return float(np.abs(given - wanted).max())


def check_proportions(given: list[float], global_batch: int) -> None:
    weights = integer_weights(given)
    steps = steps_of(weights, global_batch, -(-100_000 // global_batch))
    rivals = sum(weight > 0 for weight in weights)
    in_order = [source for step, _ in steps for source in step]
    assert furthest(in_order, given) < (1 - 1 / (2 * rivals - 2) if rivals > 1 else 0) + 1e-6  # as Tijdeman proved
    assert furthest([source for _, rows in steps for source in rows], given) < 2 + 1e-6
    assert all(sorted(step) == sorted(rows) for step, rows in steps)


@pytest.mark.parametrize(("weights", "global_batch"), VECTORS)
def test_each_prefix_has_the_proportions_within_two_windows(weights: list[float], global_batch: int) -> None:
    check_proportions(weights, global_batch)


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "global_batch"), random_vectors(60))
def test_any_weights_have_their_proportions(weights: list[float], global_batch: int) -> None:
    check_proportions(weights, global_batch)


@pytest.mark.parametrize(("weights", "batch"), [([1, 1], 8), ([1, 7], 7), ([5, 3], 8), ([3, 1, 2], 16)])
def test_each_row_of_the_batch_has_every_source_as_often_as_its_share_says(weights: list[int], batch: int) -> None:
    """Also where the batch is a multiple of the pattern's length, and a row would always have the same source."""
    steps = 2000
    rows = np.array([rows for _, rows in steps_of(weights, batch, steps)])
    for source, weight in enumerate(weights):
        share = weight / sum(weights)
        found = (rows == source).mean(axis=0)
        assert np.abs(found - share).max() < 5 * (share * (1 - share) / steps) ** 0.5


def test_ties_go_by_the_order_of_the_sources_and_counts_resume() -> None:
    shares = Shares([1, 1, 1])
    for expected in (0, 1, 2, 0, 1, 2):
        assert shares.next() == expected
        shares.give(expected)
        shares = Shares([1, 1, 1], shares.counts)


def test_weights_are_taken_as_they_are_written() -> None:
    assert integer_weights([0.7, 0.3]) == [7, 3]
    assert integer_weights([0.1, 0.2, 0.0]) == [1, 2, 0]
    assert integer_weights([4.0, 1.0]) == integer_weights([0.8, 0.2]) == [4, 1]
    assert integer_weights([1.0, 1e-7]) == [10**7, 1]
    assert integer_weights([0.0, 0.0]) == [0, 0]
