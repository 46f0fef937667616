"""Pipeline schedules from a file, in the format of torch's `_load_csv`: a row per rank, a cell per point in time.

A cell is empty (the rank waits) or an action: stage, kind, microbatch, such as `1F0`. Kinds are F (forward), B
(backward), or B's two halves I (gradients of inputs) and W (of weights). `(0F5;3B1)OVERLAP_F_B` runs two of them at
once. Sends and receives aren't written: torch adds them. This file imports no torch, so that a config can be checked
without it.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*")


class Action(NamedTuple):
    """What a rank does with one microbatch in one stage; `kind` is F, B, I or W."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Schedule(NamedTuple):
    """Actions of every rank, in order."""

    ranks: list[list[Action]]

    @property
    def stages(self) -> int:
        return 1 + max((action.stage for actions in self.ranks for action in actions), default=-1)

    @property
    def microbatches(self) -> int:
        return 1 + max((action.microbatch for actions in self.ranks for action in actions), default=-1)

    def stages_of_rank(self, rank: int) -> list[int]:
        """The numbers of the stages that a rank has actions of."""
        return sorted({action.stage for action in self.ranks[rank]})


def read_schedule(path: str) -> Schedule:
    """The schedule that a file holds.

    Raises:
        OSError: the file can't be read.
        ValueError: a cell is no action. Names the row and the cell, counted from 1.
    """
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    return Schedule([_row(cells, number) for number, cells in enumerate(rows, 1)])


def _row(cells: list[str], row: int) -> list[Action]:
    actions: list[Action] = []
    for column, cell in enumerate(cells, 1):
        try:
            actions += _parse(cell.strip())
        except ValueError as error:
            raise ValueError(f"row {row}, cell {column}: {error}") from None
    return actions


def _parse(cell: str) -> list[Action]:
    if not cell:
        return []
    if both := _OVERLAP.fullmatch(cell):
        return [action for part in both[1].split(";") for action in _parse(part.strip())]
    if match := _ACTION.fullmatch(cell):
        return [Action(int(match[1]), match[2], int(match[3]))]
    if _COMMUNICATION.fullmatch(cell):
        raise ValueError(f'"{cell}" is communication, which torch adds by itself; leave only F, B, I and W')
    raise ValueError(f'"{cell}" is no action; write stage, F, B, I or W, and microbatch, such as 2F0')


def find_fault(schedule: Schedule) -> str | None:
    """Why a schedule can't run: an action that is missing, there twice, or that its rank would wait for forever."""
    times = Counter(action for actions in schedule.ranks for action in actions)
    for action, count in times.items():
        if count > 1:
            return f"{action} is there {count} times"
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            kinds = "".join(kind for kind in "FBIW" if (stage, kind, microbatch) in times)
            if kinds not in ("FB", "FIW"):
                has = " and ".join(kinds) or "nothing"
                return f"stage {stage} has {has} of microbatch {microbatch}; each needs F and B, or F, I and W"
    return _find_deadlock(schedule, set(times))


def _find_deadlock(schedule: Schedule, everything: set[Action]) -> str | None:
    """The first rank that waits when no rank can go on."""
    done: set[Action] = set()
    ahead = [list(reversed(actions)) for actions in schedule.ranks]
    moved = True
    while moved:
        moved = False
        for actions in ahead:
            while actions and _missing(actions[-1], everything, done) is None:
                done.add(actions.pop())
                moved = True
    for rank, actions in enumerate(ahead):
        if actions:
            missing = _missing(actions[-1], everything, done)
            return f"row {rank + 1} waits forever at {actions[-1]} for {missing}, which comes later or waits itself"
    return None


def _missing(action: Action, everything: set[Action], done: set[Action]) -> Action | None:
    """The first action that has to be done before this one and isn't."""
    stage, kind, microbatch = action
    if kind == "W":
        needed = [Action(stage, "I", microbatch)]
    elif kind == "F":
        needed = [Action(stage - 1, "F", microbatch)]
    else:
        needed = [Action(stage, "F", microbatch), *(Action(stage + 1, half, microbatch) for half in "BI")]
    return next((before for before in needed if before in everything and before not in done), None)
