"""Totals of every shipped train config, by closed form and by trace, as they stand in golden/totals/.

`python -m tests.estimation.golden_totals` writes them anew. A change of them is a change of what the run takes, or of
how well that is known: look at it before it is committed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from titan.config.loader import load_and_check
from titan.estimation.methods import METHODS

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "golden" / "totals"

# Ranks of each, and what else makes it a run that somebody could want.
RUNS: dict[str, tuple[int, list[str]]] = {
    "debug": (2, []),
    "llama2_7b": (8, []),
    "llama2_13b": (16, []),
    "llama2_70b": (128, []),
    "llama3_8b": (8, []),
    "llama3_70b": (256, ["--parallelism.tensor_parallel_degree=8", "--training.local_batch_size=16"]),
    "llama3_405b": (2048, ["--parallelism.tensor_parallel_degree=8", "--parallelism.context_parallel_degree=2"]),
}


def totals(name: str) -> str:
    """As JSON: of each kind of rank the peaks in bytes and where they are, FLOPs, and bytes sent by mesh dimension."""
    ranks, settings = RUNS[name]
    config = load_and_check([f"--job.config_file={name}.toml", *settings], ranks).config
    found: dict[str, object] = {"ranks": ranks, "settings": settings}
    for method in ("analytic", "trace"):
        found[method] = [
            {
                "rank": rank.name,
                "parameters": rank.parameters,
                "peak_active_bytes": rank.peak_active_bytes,
                "peak_reserved_bytes": rank.peak_reserved_bytes,
                "peak_at": rank.peak_at,
                "hardware_flops": rank.hardware_flops,
                "sent_bytes": {f"{row.collective} over {row.dim}": row.bytes for row in rank.traffic},
            }
            for rank in METHODS[method].ranks(config, ranks)
        ]
    return json.dumps(found, indent=2) + "\n"


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or RUNS:
        (FOLDER / f"{name}.json").write_text(totals(name), encoding="utf-8")


if __name__ == "__main__":
    main()
