"""Activation checkpointing in every layout follows one process without it: same bounds as the matrix of layouts."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.distributed.test_matrix import RING, Layout, follow, relative, schedule
from tests.distributed.world import Worlds

FULL = ("mode=full",)
EVERY_SECOND = ("mode=selective", "selective_ac_option=2")
OP = ("mode=selective",)
BUDGET = ("mode=memory_budget", "memory_budget=0.3")
OFFLOAD = ("offload",)


class Case(NamedTuple):
    layout: Layout
    checkpointing: tuple[str, ...]
    compiled: bool = False

    @property
    def arguments(self) -> list[str]:
        compile_it = ["--compile.enable", "--compile.backend=aot_eager"] if self.compiled else []
        checkpointing = [f"--activation_checkpoint.{argument}" for argument in self.checkpointing]
        return [*self.layout.arguments, *checkpointing, *compile_it]

    def __str__(self) -> str:
        return f"{self.layout}, {' '.join(self.checkpointing)}{', compiled' if self.compiled else ''}"


INTERLEAVED = schedule("Interleaved1F1B")
CASES = [
    Case(Layout(dp=2), OP),
    Case(Layout(tp=2), (*OP, *OFFLOAD)),
    Case(Layout(cp=2, extra=RING), OP),
    Case(Layout(pp=2, extra=INTERLEAVED), (*FULL, *OFFLOAD)),
    Case(Layout(pp=2, extra=schedule("ZBVZeroBubble")), OP),
    pytest.param(Case(Layout(pp=2, extra=INTERLEAVED), OP, compiled=True), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def one_process(worlds: Worlds) -> dict[str, dict[str, Any]]:
    return {flavor: worlds(1).run(follow, Layout(special=flavor).arguments)[0] for flavor in ("untied", "deep")}


def check(worlds: Worlds, case: Case, expected: dict[str, Any]) -> None:
    found = worlds(case.layout.ranks).run(follow, case.arguments, timeout=280)[0]
    assert found["initial"].keys() == expected["initial"].keys()  # no name has changed
    assert relative(found["losses"], expected["losses"]) < 1e-5
    assert relative(found["norms"], expected["norms"]) < 1e-5
    assert max((found["after"][name] - w).abs().max().item() for name, w in expected["after"].items()) < 1e-6


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ac_compile_and_ac_offload_follow_one_process(
    worlds: Worlds, one_process: dict[str, dict[str, Any]], case: Case
) -> None:
    check(worlds, case, one_process[case.layout.flavor])


def product() -> list[Case]:
    """Every mode in every layout, eager and compiled, with and without offloading."""
    layouts = [
        Layout(),
        Layout(dp=2),
        Layout(tp=2),
        Layout(tp=2, extra=("no_enable_sequence_parallel",)),
        Layout(cp=2),
        Layout(cp=2, extra=RING),
        Layout(pp=2),
        Layout(pp=2, extra=INTERLEAVED),
        Layout(pp=2, tp=2),
        Layout(dp=2, cp=2, tp=2),
    ]
    return [
        *(
            Case(layout, (*mode, *offload), compiled)
            for layout in layouts
            for compiled in (False, True)
            for mode in (FULL, EVERY_SECOND, OP, *([BUDGET] if compiled and layout.tp == 1 else []))
            for offload in ((), OFFLOAD)
        ),
        *(
            Case(Layout(pp=2, extra=schedule(name)), mode)
            for name in ("GPipe", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
            for mode in (FULL, EVERY_SECOND, OP, (*OP, *OFFLOAD))
        ),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", product(), ids=str)
def test_the_full_product_follows_one_process(
    worlds: Worlds, one_process: dict[str, dict[str, Any]], case: Case
) -> None:
    check(worlds, case, one_process[case.layout.flavor])
