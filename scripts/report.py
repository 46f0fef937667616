"""One HTML page of a run, or of several side by side, that needs no other file and no network.

    python scripts/report.py outputs/                            writes outputs/report.html
    python scripts/report.py outputs/one outputs/two --output both.html
    python scripts/report.py outputs/metrics.1.jsonl             an earlier run in the same folder

The run may still be going on. No torch is needed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from titan.config.errors import UserError, refused_by_system
from titan.config.startup import exit_on_mistake
from titan.observability.run_folder import read_run
from titan.observability.run_page import MOST_RUNS, run_page


def main(arguments: list[str] | None = None) -> None:
    """Write the page, and say where.

    Raises:
        SystemExit: status 2 after a mistake was printed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a dump folder, or a file of metrics in it")
    parser.add_argument("--output", metavar="FILE", type=Path, help="unset: report.html beside the first run's metrics")
    args = parser.parse_args(arguments)
    with exit_on_mistake():
        if len(args.runs) > MOST_RUNS:
            raise UserError(f"{len(args.runs)} runs: one page shows {MOST_RUNS} at most")
        text = run_page([read_run(path) for path in args.runs])
        first: Path = args.runs[0]
        target: Path = args.output or (first if first.is_dir() else first.parent) / "report.html"
        with refused_by_system(f"--output {target}"):
            target.write_text(text, encoding="utf-8")
        print(f"written to {target}")


if __name__ == "__main__":
    main()
