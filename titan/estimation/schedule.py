"""What a pipeline's schedule costs: microbatches that a rank keeps, and the share of a step that it idles.

The usual schedules have closed forms (arXiv 2104.04473); the others are run against a clock (pipeline_timeline.py),
which needs torch.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from titan.estimation.layout import Layout

if TYPE_CHECKING:
    from titan.estimation.pipeline_timeline import Timeline

_EVEN = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")


def microbatches_in_flight(layout: Layout, rank: int) -> Fraction:
    """The most microbatches whose activations a rank keeps at a time, counted in all of its stages."""
    if layout.pp == 1:
        return Fraction(1)
    microbatches, per_rank = layout.microbatches, layout.stages_per_rank()
    if layout.csv is None and layout.schedule in ("GPipe", "LoopedBFS"):
        return Fraction(microbatches)
    if layout.csv is None and layout.schedule == "1F1B":
        return Fraction(min(microbatches, layout.pp - rank))
    if layout.csv is None and layout.schedule == "Interleaved1F1B":
        ahead = 2 * (layout.pp - rank - 1) + (per_rank - 1) * layout.pp + 1
        return Fraction(min(microbatches * per_rank, ahead), per_rank)
    return timeline_of(layout).peak_of_rank(rank)


def bubble(layout: Layout) -> float:
    """The share of a step, 0 to 1, that ranks wait for each other's stages."""
    if layout.pp == 1:
        return 0.0
    if layout.csv is None and layout.schedule in _EVEN:
        waiting = layout.pp - 1
        return waiting / (layout.microbatches * layout.stages_per_rank() + waiting)
    return float(timeline_of(layout).bubble)


def timeline_of(layout: Layout) -> Timeline:
    """Who does what when, by torch's own plan of the schedule. It imports torch."""
    return _timeline(layout.schedule, layout.csv, layout.pp, layout.microbatches, layout.stages_per_rank())


@lru_cache(maxsize=8)
def _timeline(schedule: str, csv: str | None, ranks: int, microbatches: int, per_rank: int) -> Timeline:
    from titan.estimation.pipeline_timeline import timeline

    if csv is not None:
        return timeline(schedule, ranks, microbatches, csv=Path(csv))
    return timeline(schedule, ranks, microbatches, per_rank)
