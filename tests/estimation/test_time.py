"""Predicted speed against published speed, with the tables held out in turn."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import pytest

from tests.estimation.published import ROWS, layout_of_row
from titan.estimation.hardware import PROFILES
from titan.estimation.layout import Layout
from titan.estimation.time import BAND, CONSTANTS, Constants, bandwidth, step_time

HARDWARE = PROFILES["h100-500w"]
FITTED = ("linear", "linear_float8", "attention", "memory", "link", "overlap", "eager", "pipeline", "exposed_async")
Measured = list[tuple[dict[str, Any], Layout]]

# Rows of H100s of 2024 with a speed; commit messages (cm_…) are single runs of code under work.
MEASURED: Measured = [
    (row, layout_of_row(row))
    for row in ROWS
    if row["tps_per_gpu"] and "2024-08" <= row["date"][:7] <= "2024-12" and "H100" in row["hardware"]
    if not row["id"].startswith("cm_")
]


def error(row: dict[str, Any], layout: Layout, constants: Constants) -> float:
    tokens = layout.windows_per_step * layout.seq_len / layout.world_size
    return tokens / step_time(layout, HARDWARE, constants).seconds / row["tps_per_gpu"] - 1


def cost(measured: Measured, constants: Constants) -> float:
    """Mean error, and how far the constants went."""
    errors = [abs(math.log1p(error(row, layout, constants))) for row, layout in measured]
    moved = [math.log(getattr(constants, name) / getattr(CONSTANTS, name)) ** 2 for name in FITTED]
    return statistics.mean(errors) + 0.02 * sum(moved)


def fitted(measured: Measured) -> Constants:
    """By one constant after the other, from those of the module."""
    constants, least = CONSTANTS, cost(measured, CONSTANTS)
    for step in (0.16, 0.08, 0.04):
        for name in FITTED * 3:
            for factor in (1 + step, 1 / (1 + step)):
                tried = dataclasses.replace(constants, **{name: getattr(constants, name) * factor})
                if (now := cost(measured, tried)) < least:
                    constants, least = tried, now
    return constants


def summary(errors: list[float]) -> tuple[float, float]:
    """Mean, and the ninth decile."""
    sizes = sorted(abs(error) for error in errors)
    print(f"mean {statistics.mean(sizes):.1%}, p90 {sizes[int(0.9 * len(sizes))]:.1%}, max {sizes[-1]:.1%}")
    return statistics.mean(sizes), sizes[int(0.9 * len(sizes))]


def test_published_speeds() -> None:
    assert len(MEASURED) == 22
    for row, layout in MEASURED:
        print(f"{row['id']:16}{row['tps_per_gpu']:8}{error(row, layout, CONSTANTS):+8.1%}")
    mean, decile = summary([error(row, layout, CONSTANTS) for row, layout in MEASURED])
    assert mean < 0.12 and decile < BAND


@pytest.mark.slow
def test_published_speeds_of_tables_held_out() -> None:
    errors = []
    for table in {(row["source"], row["ref"]) for row, _ in MEASURED}:
        held_out = [(row, layout) for row, layout in MEASURED if (row["source"], row["ref"]) == table]
        constants = fitted([pair for pair in MEASURED if pair not in held_out])
        errors += [error(row, layout, constants) for row, layout in held_out]
    mean, decile = summary(errors)
    assert mean < 0.12 and decile < 0.25


@pytest.mark.slow
def test_published_speeds_of_models_held_out() -> None:
    """Two publications measured the same configurations, so that tables alone aren't strangers."""
    errors = []
    for kind in {(row["model"], row["seq_len"]) for row, _ in MEASURED}:
        held_out = [(row, layout) for row, layout in MEASURED if (row["model"], row["seq_len"]) == kind]
        constants = fitted([pair for pair in MEASURED if pair not in held_out])
        errors += [error(row, layout, constants) for row, layout in held_out]
    mean, decile = summary(errors)
    assert mean < 0.15 and decile < BAND


def test_constants_are_shares() -> None:
    for name in ("linear", "linear_float8", "attention", "memory", "link", "network", "exposed_async"):
        assert 0 < getattr(CONSTANTS, name) < 1


def test_a_group_within_a_node_uses_links_and_one_beyond_its_share_of_adapters() -> None:
    base = dataclasses.replace(MEASURED[0][1], dp_shard=64, tp=1)
    network = CONSTANTS.network * HARDWARE.network_bandwidth
    assert bandwidth(dataclasses.replace(base, dp_shard=8), HARDWARE, "fsdp") == bandwidth(
        dataclasses.replace(base, tp=8), HARDWARE, "tp"
    )
    assert bandwidth(dataclasses.replace(base, tp=8), HARDWARE, "fsdp") == network
    assert bandwidth(dataclasses.replace(base, tp=2), HARDWARE, "fsdp") == 4 * network


def test_exposed_share_is_zero_while_compute_is_longer() -> None:
    (eight,) = [layout for row, layout in MEASURED if row["id"] == "tt2412_T1_0"]
    assert step_time(eight, HARDWARE).exposed["fsdp"] == 0
    starved = dataclasses.replace(eight, rows=1, seq_len=256, dp_shard=1024)
    time = step_time(starved, HARDWARE)
    assert time.exposed["fsdp"] > 0.5 and time.unsure
    assert time.scaled(2).seconds == 2 * time.seconds
