"""The table of deviations that the matrix of layouts ends with."""

from __future__ import annotations

import pytest


class DeviationTable:
    """How far each layout was from one process: relative for losses and norms, absolute for weights."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def add(self, layout: str, ranks: int, deviations: dict[str, float]) -> None:
        numbers = "".join(f"{deviations[key]:10.1e}" for key in ("loss", "norm", "weights"))
        self.rows.append(f"{layout:<72}{ranks:>6}{numbers}")


_table = DeviationTable()


@pytest.fixture(scope="session")
def deviations() -> DeviationTable:
    return _table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _table.rows:
        terminalreporter.section(f"largest deviation from one process, {len(_table.rows)} layouts")
        terminalreporter.write_line(f"{'layout':<72}{'ranks':>6}{'loss':>10}{'norm':>10}{'weights':>10}")
        for row in _table.rows:
            terminalreporter.write_line(row)
