"""Measure training runs side by side: speed, CPU time, memory, and how soon the first step comes.

    python scripts/benchmark.py --job.config_file debug.toml --training.local_batch_size 4
    python scripts/benchmark.py --table scripts/benchmarks/cpu.toml --only 'S/*' --rounds 3 --json speeds.json

Each run is train.py by its own command line, in a fresh process. What metrics.jsonl doesn't say is seen from outside,
while the process writes it. Rows can be other programs too, as long as their last line is a JSON object of figures with
the names in `COLUMNS`. With several rounds every row runs once a round and the medians count, and with `--turns` the
rows of a group share the machine second by second, so that its moods meet all rows alike. docs/benchmarks.md describes
the method and the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from importlib.metadata import version
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.01  # how exactly the end of a step is seen; a look costs some 50 µs of CPU

# What is measured, by its name in JSON: its name in the table, its unit's factor there, its decimals.
COLUMNS = {
    "tokens_per_second": ("tokens/s", 1.0, 0),
    "tokens_per_cpu_second": ("tokens per CPU-s", 1.0, 0),
    "cpu_seconds_per_token": ("CPU-ms per token", 1e3, 3),
    "mfu": ("MFU, %", 100.0, 1),
    "peak_bytes": ("peak memory, MB", 1e-6, 0),
    "page_faults_per_step": ("page faults per step", 1.0, 0),
    "seconds_to_first_step": ("first step, s", 1.0, 1),
    "loss": ("last loss", 1.0, 4),
}

Figures = dict[str, float]


class Failure(Exception):
    """A run that gave no figures; the text says why."""


class NotRun(Failure):
    """It was refused, or there was no time for it: the program did what it should."""


class Row(NamedTuple):
    """A run to measure.

    Attributes:
        group, name: what it is called; the ratios of a group refer to its first row.
        command: what is run, in titan's folder.
        of_titan: the command is train.py, whose metrics are read.
        warmup, steps: steps before those that are measured, and their number.
    """

    group: str
    name: str
    command: tuple[str, ...]
    of_titan: bool
    warmup: int
    steps: int


class Plan(NamedTuple):
    """What a command line asks for.

    Attributes:
        compare: the figure that ratios are of; more of it is better.
    """

    options: argparse.Namespace
    rows: list[Row]
    compare: str


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; write the figures if they are to be kept.

    Raises:
        SystemExit: status 2 for wrong arguments, 1 when a run failed. A refused one is no failure.
    """
    options, rows, compare = plan(argv)
    rounds: dict[Row, list[Figures]] = {row: [] for row in rows}
    failures: dict[Row, Failure] = {}
    deadline = time.monotonic() + options.limit
    for number in range(options.rounds):
        left = [row for row in rows if row not in failures]
        groups = {row.group: [other for other in left if other.group == row.group] for row in left}
        for together in groups.values() if options.turns else [[row] for row in left]:
            names = ", ".join(row.name for row in together)
            print(f"round {number + 1} of {options.rounds}: {together[0].group}: {names}", file=sys.stderr, flush=True)
            for row, outcome in measure(together, options.processes, deadline, options.turns).items():
                if isinstance(outcome, Failure):
                    failures[row] = outcome
                    print(f"  {row.name}: {outcome}", file=sys.stderr, flush=True)
                else:
                    rounds[row].append(outcome)
    medians = {row: medians_of(rounds[row]) for row in rows}
    print(markdown(medians, failures, compare))
    if options.json is not None:
        report = [
            {"group": row.group, "name": row.name, "command": shlex.join(row.command)}
            | {"median": medians[row], "rounds": rounds[row], "problem": str(failures.get(row, ""))}
            for row in rows
        ]
        options.json.write_text(json.dumps({"machine": machine(), "rows": report}, indent=2) + "\n")
    if any(not isinstance(failure, NotRun) for failure in failures.values()):
        raise SystemExit(1)


def plan(argv: Sequence[str] | None = None) -> Plan:
    """The rows that a command line asks for.

    Raises:
        SystemExit: status 2 after the mistake was printed.
    """
    parser = _parser()
    options, arguments = parser.parse_known_args(argv)
    if options.table is None and not arguments:
        parser.error("nothing to measure: give --table FILE, or the arguments of train.py")
    if options.turns and options.processes > 1:
        parser.error("--turns stops and continues single processes: leave out --processes")
    table = tomllib.loads(options.table.read_text()) if options.table else {"groups": [{"name": "run"}]}
    rows = [row for row in _rows(table, options, arguments) if fnmatch(f"{row.group}/{row.name}", options.only)]
    if not rows:
        parser.error(f"--only {options.only}: no GROUP/NAME is like that")
    return Plan(options, rows, table.get("compare", "tokens_per_second"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measure training runs side by side.",
        epilog="All else are arguments of train.py: alone they are the run to measure, with --table they are added to "
        "each of its runs of titan.",
        allow_abbrev=False,
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="rows to measure, as in scripts/benchmarks/")
    parser.add_argument("--only", default="*", metavar="GLOB", help="only rows whose GROUP/NAME is like that")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="run every row N times, in turns")
    parser.add_argument(
        "--turns", type=float, default=0, metavar="SECONDS", help="run a group's rows at once, each for SECONDS in turn"
    )
    parser.add_argument("--warmup", type=int, metavar="N", help="steps that aren't measured (the table's, or 5)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps that are (the table's, or 20)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes of each run of titan")
    parser.add_argument(
        "--compare", action="append", default=[], metavar="COMMAND", help="another program to run; may be repeated"
    )
    parser.add_argument("--limit", type=float, default=86_400, metavar="SECONDS", help="end after this time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser


def _rows(table: Mapping[str, Any], options: argparse.Namespace, arguments: list[str]) -> Iterator[Row]:
    """Every group with every row: the programs of --compare, then the table's rows."""
    others = [{"name": command, "command": command} for command in options.compare]
    for group in table["groups"]:
        warmup, steps = options.warmup or group.get("warmup", 5), options.steps or group.get("steps", 20)
        for row in [*others, *table.get("rows", [{"name": "titan"}])]:
            if "command" in row:
                words = shlex.split(row["command"].format(group=group["name"], warmup=warmup, steps=steps))
                command = [sys.executable if word == "python" else word for word in words]
            else:
                given = chain.from_iterable(part.get("arguments", []) for part in (table, group, row))
                command = [*_launcher(options.processes), "train.py", *given, *arguments]
                command += [f"--training.steps={warmup + steps}", f"--metrics.log_freq={warmup}"]
                command += ["--metrics.progress=none", "--checkpoint.enable=false"]
            yield Row(group["name"], row["name"], tuple(command), "command" not in row, warmup, steps)


def _launcher(processes: int) -> list[str]:
    if processes == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def measure(rows: Sequence[Row], processes: int, deadline: float, turn: float = 0) -> dict[Row, Figures | Failure]:
    """Run rows once, several of them at the same time.

    Args:
        processes: of each run of titan.
        deadline: when the runs must have ended, by the monotonic clock.
        turn: seconds that each row runs while the others are stopped; with it nothing is said of time by the clock.

    Returns:
        The figures of each row, or why it has none: it was refused, failed, or didn't end in time.
    """
    if time.monotonic() >= deadline:
        return {row: NotRun("left out: the time that --limit gives is over") for row in rows}
    with tempfile.TemporaryDirectory() as name:
        runs = [_Run(row, processes, Path(name) / str(number)) for number, row in enumerate(rows)]
        for run in runs[1:]:
            run.stop()
        while (live := [run for run in runs if run.is_alive]) and time.monotonic() < deadline:
            for run in live:
                run.go_on(min(time.monotonic() + (turn or deadline), deadline), stop=len(live) > 1)
        outcomes = {run.row: run.outcome() for run in runs}
    for figures in outcomes.values():
        if isinstance(figures, Failure):
            continue
        if "tokens_per_cpu_second" in figures:
            figures["cpu_seconds_per_token"] = 1 / figures["tokens_per_cpu_second"]
        for by_clock in ("tokens_per_second", "seconds_to_first_step", "mfu") if len(rows) > 1 else ():
            figures.pop(by_clock, None)
    return outcomes


class _Run:
    """A row's process, stopped between its turns."""

    def __init__(self, row: Row, processes: int, folder: Path) -> None:
        self.row = row
        self._folder = folder
        folder.mkdir()
        command = [*row.command, f"--job.dump_folder={folder}"] if row.of_titan else row.command
        with (folder / "output").open("w") as output, (folder / "errors").open("w") as errors:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=errors)
        self._watch = _Watch(self._process.pid, processes, folder / "metrics.jsonl")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def go_on(self, until: float, stop: bool) -> None:
        """Watch it run until then, or until it ends; stop it afterwards if others are to run."""
        self._process.send_signal(signal.SIGCONT)
        while self.is_alive and time.monotonic() < until:
            self._watch.look()
            time.sleep(POLL_SECONDS)
        if stop:
            self.stop()

    def stop(self) -> None:
        if self.is_alive:
            self._process.send_signal(signal.SIGSTOP)

    def outcome(self) -> Figures | Failure:
        """What was measured. Ends the process when it is still there."""
        if self.is_alive:
            self._process.kill()
            self._process.wait()
            return NotRun("stopped: the time that --limit gives is over")
        if self._process.returncode:
            return _failure(self._process.returncode, (self._folder / "errors").read_text())
        self._watch.look()
        try:
            return (
                self._watch.figures(self.row) if self.row.of_titan else _printed((self._folder / "output").read_text())
            )
        except Failure as failure:
            return failure


class _Usage(NamedTuple):
    """What processes have used since they started."""

    cpu_seconds: float
    page_faults: int


class _Watch:
    """What is seen of a run of titan while it writes its metrics."""

    def __init__(self, pid: int, processes: int, metrics: Path) -> None:
        self._pid, self._processes, self._metrics = pid, processes, metrics
        self._start = time.monotonic()
        self._usage: _Usage | None = None
        self._lines: list[tuple[float, _Usage | None, dict[str, Any]]] = []  # each with when it came

    def look(self) -> None:
        """Note what the run has used, for each line that it wrote since the last look."""
        self._usage = _usage(self._pid, self._processes) or self._usage  # the last known, when it has ended
        text = self._metrics.read_text() if self._metrics.exists() else ""
        whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        for line in whole[len(self._lines) :]:
            self._lines.append((time.monotonic() - self._start, self._usage, json.loads(line)))

    def figures(self, row: Row) -> Figures:
        """Those of the steps after the warm-up.

        Raises:
            Failure: the run had fewer steps.
        """
        measured = [line for line in self._lines if line[2]["step"] >= row.warmup]
        if not measured or measured[-1][2]["step"] < row.warmup + row.steps:
            raise Failure(f"ended before step {row.warmup + row.steps}")
        (_, usage, first), (_, last_usage, last) = measured[0], measured[-1]
        tokens = last["tokens_seen"] - first["tokens_seen"]
        windows = [(line, line["step"] - before["step"]) for (*_, before), (*_, line) in pairwise(measured)]
        seconds = sum(line["step_seconds"] * steps for line, steps in windows)
        figures = {
            "tokens_per_second": tokens / seconds,
            "peak_bytes": last["memory_peak_bytes"],
            "seconds_to_first_step": self._lines[0][0],
            "loss": float(last["loss"]),
        }
        if last["mfu"] is not None:
            figures["mfu"] = last["mfu"] / last["tokens_per_second"] * figures["tokens_per_second"]
        if usage and last_usage and last_usage.cpu_seconds > usage.cpu_seconds:  # the system counts in ticks of 10 ms
            figures["tokens_per_cpu_second"] = tokens / (last_usage.cpu_seconds - usage.cpu_seconds)
            figures["page_faults_per_step"] = (last_usage.page_faults - usage.page_faults) / row.steps
        return figures


def _usage(pid: int, processes: int) -> _Usage | None:
    """Of a process, or of those that a launcher started; None where the system doesn't say, or when it has ended."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if processes > 1 else [str(pid)]
        # proc(5): the fields after the command's name, which may hold spaces, start with the third.
        fields = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split() for child in children]
    except OSError:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return _Usage(sum(int(f[11]) + int(f[12]) for f in fields) / ticks, sum(int(f[7]) for f in fields))


def _failure(status: int, errors: str) -> Failure:
    """Why a run gave no figures: the mistakes in its config (status 2), or the last line that it wrote."""
    if status == 2:
        words = errors.rpartition("error: ")[2].split()
        return NotRun(f"refused: {' '.join(words)}")
    return Failure(f"failed with status {status}: {(errors.strip().splitlines() or ['no word of why'])[-1]}")


def _printed(output: str) -> Figures:
    """The last line of a program's output, of which only the columns are kept.

    Raises:
        Failure: it is no JSON object.
    """
    try:
        figures = json.loads(output.strip().splitlines()[-1])
        return {name: float(figures[name]) for name in COLUMNS if name in figures}
    except (IndexError, ValueError, TypeError) as error:
        raise Failure(f"its last line is no JSON object of figures ({error})") from None


def medians_of(rounds: Sequence[Figures]) -> Figures:
    """The median of each figure that all rounds have."""
    names = [name for name in COLUMNS if rounds and all(name in figures for figures in rounds)]
    return {name: statistics.median(figures[name] for figures in rounds) for name in names}


def markdown(medians: Mapping[Row, Figures], failures: Mapping[Row, Failure], compare: str) -> str:
    """A table for each group, and the reasons of the rows that have no figures.

    Args:
        compare: the figure that ratios are of; more of it is better.
    """
    lines = [machine()]
    for group in dict.fromkeys(row.group for row in medians):
        rows = {row: figures for row, figures in medians.items() if row.group == group}
        names = [name for name in COLUMNS if any(name in figures for figures in rows.values())]
        base = next(iter(rows.values())).get(compare)
        lines += ["", f"| {group} | {' | '.join(['ratio', *(COLUMNS[name][0] for name in names)])} |"]
        lines += [f"|---|{'---:|' * (len(names) + 1)}"]
        for row, figures in rows.items():
            ratio = f"{figures[compare] / base:.3f}" if base and compare in figures else "–"
            cells = [row.name, ratio, *(_cell(name, figures) for name in names)]
            lines += [f"| {' | '.join(cells)} |"]
    if failures:
        lines += ["", *(f"- {row.group}, {row.name}: {reason}" for row, reason in failures.items())]
    return "\n".join(lines)


def _cell(name: str, figures: Figures) -> str:
    _, factor, decimals = COLUMNS[name]
    return f"{figures[name] * factor:,.{decimals}f}" if name in figures else "–"


def machine() -> str:
    """Where the figures are from."""
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    numbers = f"torch {version('torch')}, Python {platform.python_version()}, {os.cpu_count()} CPUs"
    return f"{numbers}, OMP_NUM_THREADS {threads}"


if __name__ == "__main__":
    main()
