"""Memory by tracing a step, against published peaks."""

from __future__ import annotations

import statistics
from functools import cache
from typing import Any

import pytest

from tests.estimation.published import ROWS, arguments_of_row, job_of_row
from titan.estimation.hardware import GIB
from titan.estimation.trace import trace_layout

CHEAP = ("tt2412_T1_0", "cm_1625")


def error_of(row: dict[str, Any]) -> float:
    """Of the memory of the rank that needs most, relative."""
    return reserved_gib(arguments_of_row(row), row["gpus"]) / row["mem_gib"] - 1


@cache
def reserved_gib(arguments: tuple[str, ...], gpus: int) -> float:
    return max(rank.peak_reserved_bytes for rank in trace_layout(job_of_row(arguments), gpus)) / GIB


@pytest.mark.parametrize("row", [row for row in ROWS if row["id"] in CHEAP], ids=CHEAP)
def test_published_peak(row: dict[str, Any]) -> None:
    assert abs(error_of(row)) < 0.05


@pytest.mark.slow
def test_published_peaks() -> None:
    fitting = []
    for row in ROWS:
        if row["memory_test"]:
            error, misfit = error_of(row), row.get("known_misfit", "")
            print(f"{row['id']:20} {row['mem_gib']:6.1f} {error:+7.1%}  {misfit}")
            if not misfit:
                fitting.append(abs(error))
    print(f"median {statistics.median(fitting):.1%}, max {max(fitting):.1%} of {len(fitting)}")
    assert len(fitting) >= 20
    assert statistics.median(fitting) <= 0.025
    assert max(fitting) <= 0.10
