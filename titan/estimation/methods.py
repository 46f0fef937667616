"""The ways in which memory is estimated, by the names that estimation.method has."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from titan.config.job_config import JobConfig
from titan.estimation.closed_form import analytic_layout
from titan.estimation.estimate import RankEstimate


class Method(NamedTuple):
    """One of them.

    Attributes:
        description: for the head of a report, after "by".
        ranks: (a checked config, number of ranks) → an estimate for each kind of rank.
    """

    description: str
    ranks: Callable[[JobConfig, int], list[RankEstimate]]


def _traced(job: JobConfig, world_size: int) -> list[RankEstimate]:
    with _libraries_silent():
        from titan.estimation.trace import trace_layout  # the only one that needs torch

        return trace_layout(job, world_size)


@contextmanager
def _libraries_silent() -> Iterator[None]:
    """Leave out warnings, which are about a run that there isn't yet."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


METHODS = {
    "analytic": Method("closed form", analytic_layout),
    "trace": Method("tracing a step", _traced),
    "both": Method("tracing a step, with the closed form beside it", _traced),
}
