"""Whose fault it is: what each rank reports of itself, and what follows from all reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_NAMED = 8  # ranks that a sentence names before it counts the rest


@dataclass(frozen=True)
class Report:
    """A rank's answer to: what are you doing?

    Attributes:
        where: what the rank is at, such as "step 3".
        waits_in: the collective that it waits in; empty when it is busy with work of its own.
        late: the time limit that it has exceeded, for people; empty when it has not.
        broken: how a collective failed for it; empty when none did.
        stacks: of its threads, as text; left out by ranks that wait.
    """

    where: str
    waits_in: str
    late: str
    broken: str
    stacks: str


@dataclass(frozen=True)
class Verdict:
    """The cause of a job's end.

    Attributes:
        text: what people are told.
        culprits: ranks that others waited for, or that failed.
        slow: collectives' records are of use, for it isn't a plain error.
    """

    text: str
    culprits: tuple[int, ...]
    slow: bool = True


def judge(reports: Mapping[int, Report], world_size: int) -> Verdict:
    """The cause, from the reports by rank; ranks without one did not answer.

    Raising ranks need no judge: they say themselves why the job ends.
    """
    silent = [rank for rank in range(world_size) if rank not in reports]
    waiting = {rank: report for rank, report in reports.items() if report.waits_in}
    busy = {rank: report for rank, report in reports.items() if not report.waits_in}
    late = next((report.late for report in reports.values() if report.late), "")
    if silent:
        text = (
            f"{_ranks(silent)} did not answer: the process is dead or stopped, or its host can't be reached"
            f"{_waits(waiting)}"
        )
        return Verdict(text, tuple(silent))
    if late and busy:
        first = min(busy)
        text = f"{_ranks(busy)} did not get past {busy[first].where} within {late}{_waits(waiting)}"
        stacks = "".join(f"\nstacks of rank {rank}:\n{busy[rank].stacks}" for rank in list(busy)[:_NAMED])
        return Verdict(text + stacks, tuple(busy))
    if late:
        calls = "".join(
            f"\n  rank {rank}: {report.where}, {report.waits_in}" for rank, report in sorted(waiting.items())[:_NAMED]
        )
        text = f"no rank got past its collective within {late}, and none is busy: they wait for each other{calls}"
        return Verdict(text, tuple(waiting))
    rank, report = next((rank, report) for rank, report in sorted(reports.items()) if report.broken)
    return Verdict(f"a connection of rank {rank} broke in {report.where}, and all ranks live: {report.broken}", (rank,))


def _ranks(ranks: Mapping[int, object] | list[int]) -> str:
    names = [str(rank) for rank in sorted(ranks)]
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names[:_NAMED])}{rest}"


def _waits(waiting: Mapping[int, Report]) -> str:
    if not waiting:
        return ""
    first = waiting[min(waiting)]
    verb = "wait" if len(waiting) > 1 else "waits"
    return f"; {_ranks(waiting)} {verb} in {first.where} ({first.waits_in})"
