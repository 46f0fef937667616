"""What the ranks of a job found out about themselves at its start, and what follows from it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan.config.job_config import Comm

_SLOW = 10.0  # times the median
_CLOCK_SECONDS = 1.0  # that clocks may differ by
_NAMED = 8  # ranks that a sentence names before it counts the rest
_FATAL = ("titan", "torch")  # whose versions must be equal


@dataclass(frozen=True)
class Report:
    """What a rank found out about itself.

    Attributes:
        host: its name.
        device: the product's name.
        versions: of what must be equal on all ranks, by name.
        variables: environment variables that libraries read, by name.
        matmul_seconds: of one matrix product.
        send_seconds: of sending 1 MiB to the next rank while the previous one sends as much.
        clock: Unix time in seconds, read by all ranks at the same moment.
        folder_error: why the dump folder can't be written to; empty when it can.
        shares_folder: sees what rank 0 wrote there.
        write_speed: to the dump folder, in bytes per second; measured on one rank of each host, else None.
        free_bytes: in the dump folder.
    """

    host: str
    device: str
    versions: Mapping[str, str]
    variables: Mapping[str, str]
    matmul_seconds: float
    send_seconds: float
    clock: float
    folder_error: str
    shares_folder: bool
    write_speed: float | None
    free_bytes: int


@dataclass(frozen=True)
class Findings:
    """What the reports of all ranks amount to.

    Attributes:
        lines: what was found, in three lines.
        warnings: what is suspicious.
        errors: what would ruin the run.
    """

    lines: list[str]
    warnings: list[str]
    errors: list[str]


def find(reports: Sequence[Report], folder: Path | None, limits: Comm, checkpoint_bytes: int) -> Findings:
    """What the reports of all ranks, by rank, amount to.

    Args:
        folder: the dump folder; None when nothing is going to be written.
        checkpoint_bytes: about what one checkpoint takes there; 0 when none is going to be saved in it.
    """
    differences = dict(_differences(reports))
    fatal = [text for name, text in differences.items() if name in _FATAL]
    suspicious = [text for name, text in differences.items() if name not in _FATAL]

    clocks = _Compared(reports, lambda report: report.clock)
    if (spread := max(clocks.values) - min(clocks.values)) > _CLOCK_SECONDS:
        farthest = max(range(len(reports)), key=lambda rank: abs(clocks.values[rank] - clocks.median))
        ahead = clocks.values[farthest] - clocks.median
        suspicious.append(f"clocks differ by {spread:.1f} s: {_ranks([farthest], reports)} is {ahead:+.1f} s off")

    multiplied = _Compared(reports, lambda report: report.matmul_seconds)
    sent = _Compared(reports, lambda report: report.send_seconds)
    for what, compared in (("a matrix product", multiplied), ("1 MiB to the next rank", sent)):
        for rank in compared.slow:
            took = f"took {_milliseconds(compared.values[rank])}, {compared.ratio(rank):.0f} × the median"
            suspicious.append(f"{what} {took} on {_ranks([rank], reports)}")

    if folder is not None:
        fatal += _unwritable(reports, folder)
        suspicious += _about_the_folder(reports, folder, checkpoint_bytes)
    suspicious += _about_limits(limits)
    hosts = len({report.host for report in reports})
    versions = ", ".join(f"{name} {value}" for name, value in reports[0].versions.items())
    alike = f"alike: {versions}" if not differences else f"that differ in {', '.join(differences)}"
    return Findings(
        [
            f"{len(reports)} ranks on {hosts} host(s), {alike}; clocks within {_milliseconds(spread)}",
            f"a matrix product {multiplied.describe(reports)}; 1 MiB to the next rank {sent.describe(reports)}",
            _describe_folder(reports, folder)
            + f"; time limits {limits.init_timeout_seconds} s and {limits.train_timeout_seconds} s",
        ],
        suspicious,
        fatal,
    )


class _Compared:
    """A number of each rank, and how it stands to the others."""

    def __init__(self, reports: Sequence[Report], number: Callable[[Report], float]) -> None:
        self.values = [number(report) for report in reports]
        self.median = statistics.median_low(self.values)
        self.slow = [rank for rank, value in enumerate(self.values) if value > _SLOW * self.median]

    def ratio(self, rank: int) -> float:
        return self.values[rank] / self.median if self.median else 1.0

    def describe(self, reports: Sequence[Report]) -> str:
        """Such as `1.02 ms, at most 1.3 × that (rank 5 on node7)`."""
        last = max(range(len(self.values)), key=self.values.__getitem__)
        return f"{_milliseconds(self.median)}, at most {self.ratio(last):.1f} × that ({_ranks([last], reports)})"


def _differences(reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    """What isn't equal on all ranks: its name, and who has what."""
    facts = [{"device": report.device, **report.versions, **report.variables} for report in reports]
    for name in sorted({name for of_rank in facts for name in of_rank}):
        values = [of_rank.get(name, "unset") for of_rank in facts]
        (usual, count), *others = Counter(values).most_common()
        if others:
            who = ", ".join(
                f"{value} on {_ranks([rank for rank, its in enumerate(values) if its == value], reports)}"
                for value, _ in others
            )
            yield name, f"{name} isn't equal on all ranks: {usual} on {count} rank(s), {who}"


def _unwritable(reports: Sequence[Report], folder: Path) -> Iterator[str]:
    for error, _ in Counter(report.folder_error for report in reports if report.folder_error).most_common():
        ranks = [rank for rank, report in enumerate(reports) if report.folder_error == error]
        yield f"job.dump_folder = {folder}: {_ranks(ranks, reports)} can't write there: {error}"


def _about_the_folder(reports: Sequence[Report], folder: Path, checkpoint_bytes: int) -> Iterator[str]:
    apart = [rank for rank, report in enumerate(reports) if not report.shares_folder]
    if apart and checkpoint_bytes:
        yield (
            f"job.dump_folder = {folder}: {_ranks(apart, reports)} doesn't see what rank 0 wrote there; "
            f"checkpoints need a folder that all hosts share"
        )
    free = min(report.free_bytes for report in reports)
    if free < checkpoint_bytes:
        yield f"{folder} has {_size(free)} free, and a checkpoint takes about {_size(checkpoint_bytes)}"


def _about_limits(limits: Comm) -> Iterator[str]:
    if limits.init_timeout_seconds < limits.train_timeout_seconds:
        yield (
            f"comm.init_timeout_seconds = {limits.init_timeout_seconds} is less than comm.train_timeout_seconds = "
            f"{limits.train_timeout_seconds}, though the first step takes longer than the others"
        )


def _describe_folder(reports: Sequence[Report], folder: Path | None) -> str:
    if folder is None:
        return "nothing is going to be written"
    speeds = [report.write_speed for report in reports if report.write_speed is not None]
    speed = f", {_size(min(speeds))}/s" if speeds else ""
    return f"{folder} can be written to{speed}, {_size(min(report.free_bytes for report in reports))} free"


def _ranks(ranks: Sequence[int], reports: Sequence[Report]) -> str:
    """Such as `rank 3 on node7`, or `ranks 0, 1 on node7`; of many the first, and how many more."""
    named = ", ".join(map(str, ranks[:_NAMED])) + (f" and {len(ranks) - _NAMED} more" if ranks[_NAMED:] else "")
    hosts = list(dict.fromkeys(reports[rank].host for rank in ranks[:_NAMED]))
    return f"rank{'s' if ranks[1:] else ''} {named} on {', '.join(hosts)}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds:.1f} s"


def _size(count: float) -> str:
    return f"{count / 1e9:,.0f} GB" if count >= 1e10 else f"{count / 1e6:,.0f} MB"
