"""Which source the next window of a mixture comes from: no drawing of lots, whole numbers only.

R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980): after every window each of m sources was
chosen as often as its share says, give or take 1 − 1 / (2m − 2) windows. Of the sources that lag behind enough, that
one is next which would be the first to lag behind too far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from titan.data.shuffle import derive_key

_BOUND = 2  # windows that a source may be ahead of its share, or behind it


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the same proportions, with no common divisor: `[0.7, 0.3]` are `[7, 3]`, by their decimals."""
    exact = [Fraction(repr(weight)) for weight in weights]
    unit = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * unit) for weight in exact]
    divisor = math.gcd(*whole) or 1
    return [weight // divisor for weight in whole]


class Shares:
    """Gives windows to sources in the proportions of their weights.

    Args:
        weights: whole numbers of at least 0, not all 0.
        counts: how many windows each source was given since these weights hold; none when None.
    """

    def __init__(self, weights: Sequence[int], counts: Sequence[int] | None = None) -> None:
        self.weights = list(weights)
        self.counts = [0] * len(self.weights) if counts is None else list(counts)
        self._total = sum(self.weights)
        self._rivals = [source for source, weight in enumerate(self.weights) if weight]
        given = sum(self.counts)
        self._behind = [
            weight * given - self._total * count for weight, count in zip(self.weights, self.counts, strict=True)
        ]

    def next(self) -> int:
        """The source of the next window; of several that are as urgent the first. Asking gives nothing yet."""
        if len(self._rivals) == 1:
            return self._rivals[0]
        unit = 2 * len(self._rivals) - 2
        best, best_slack = -1, 0
        for source in self._rivals:
            weight = self.weights[source]
            behind = unit * (self._behind[source] + weight)
            if behind < self._total:
                continue
            slack = (unit - 1) * self._total - behind  # over `weight`: windows until it lags too far
            if best < 0 or slack * self.weights[best] < best_slack * weight:
                best, best_slack = source, slack
        return best

    def give(self, source: int) -> None:
        """Give the next window to a source."""
        self.counts[source] += 1
        for rival in self._rivals:
            self._behind[rival] += self.weights[rival]
        self._behind[source] -= self._total

    def turned(self, given: Sequence[int]) -> list[int]:
        """The same windows, begun at another place of them and continued at their start. For shares as before them.

        With 8 windows a step and weights that are equal, a row of the batch would have the same source in every step,
        and data streams that belong to rows would read some of a source again and again, and the rest of it never. So
        the start is drawn by a hash of the windows given so far: a row has each source as often as its share says, in
        expectation. Where this made a source run ahead of its share, or lag behind it, by more than two windows, the
        next start is tried, up to the one that changes nothing.
        """
        length = len(given)
        first = derive_key(0, "mixture", sum(self.counts)) % length
        for start in range(first, length):
            candidate = [*given[start:], *given[:start]]
            if self._within_bound(candidate):
                return candidate
        return list(given)

    def _within_bound(self, given: Sequence[int]) -> bool:
        """No source is ever too far from its share while these windows are given."""
        most = _BOUND * self._total
        behind = list(self._behind)
        for source in given:
            for rival in self._rivals:
                behind[rival] += self.weights[rival]
            behind[source] -= self._total
            if behind[source] < -most or max(behind) > most:
                return False
        return True
