"""Whether a run is well: spikes of its loss, and ranks that the others wait for."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

# A loss is a spike when it is above the median of the last losses by so many of their standard deviations, as the
# median distance from the median tells them, and by such a share of the median.
_LOSSES = 64
_FEWEST_LOSSES = 16
_DEVIATIONS = 6.0
_LEAST_SHARE = 0.02
_NORMAL = 1.4826  # standard deviations per median distance, of a normal distribution

# A rank is slow when, in so many logs in a row, its own work takes so many times the median rank's, and makes the step
# longer by such a share.
_LOGS = 3
_TIMES_MEDIAN = 2.0
_SHARE_OF_STEP = 0.1


class LossSpikes:
    """Finds spikes by the median of the last losses, which neither a spike nor a few of them move. What isn't finite is
    no part of it."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._high = False

    def add(self, step: int, loss: float) -> str | None:
        """The loss of a step; returns a warning at a spike's first step."""
        if not math.isfinite(loss):
            return None
        warning = None
        if len(self._losses) >= _FEWEST_LOSSES:
            median = statistics.median(self._losses)
            deviation = _NORMAL * statistics.median(abs(other - median) for other in self._losses)
            limit = median + max(_DEVIATIONS * deviation, _LEAST_SHARE * abs(median))
            if loss > limit and not self._high:
                warning = (
                    f"loss spike at step {step}: {loss:.4f}; the median of the {len(self._losses)} steps before is "
                    f"{median:.4f}, their standard deviation {deviation:.4f}, and above {limit:.4f} is a spike"
                )
            self._high = loss > limit
        self._losses.append(loss)
        return warning

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs, as JSON."""
        return {"losses": list(self._losses), "high": self._high}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._losses.extend(state["losses"])
        self._high = state["high"]


class SlowRanks:
    """Finds ranks whose own work, between two collectives that all ranks take part in, takes longer than that of the
    others, log after log."""

    def __init__(self) -> None:
        self._logs_in_a_row: dict[int, int] = {}

    def add(self, own_seconds: Sequence[float], data_seconds: Sequence[float], step_seconds: float) -> list[str]:
        """Count a log; returns a warning for each rank that is found slow now, and wasn't at the log before.

        Args:
            own_seconds: by rank, the mean time per step of its own work, with waiting for its data.
            data_seconds: the part of it that is the wait for data.
            step_seconds: mean time of a step.
        """
        median = statistics.median_low(own_seconds)  # of two ranks the quicker one
        least = max(_TIMES_MEDIAN * median, median + _SHARE_OF_STEP * step_seconds)
        slow = [rank for rank, seconds in enumerate(own_seconds) if seconds > least]
        self._logs_in_a_row = {rank: self._logs_in_a_row.get(rank, 0) + 1 for rank in slow}
        return [
            f"rank {rank} holds the others up in each step of {step_seconds:.3f} s: its own work takes "
            f"{own_seconds[rank]:.3f} s ({data_seconds[rank]:.3f} s for data), the median rank's {median:.3f} s; "
            f"so it was in the last {_LOGS} logs"
            for rank, logs in self._logs_in_a_row.items()
            if logs == _LOGS
        ]
