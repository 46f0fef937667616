"""The two methods against each other: they were written down independently."""

from __future__ import annotations

from itertools import product

import pytest

from titan.config.loader import load_and_check_plan
from titan.estimation.closed_form import analytic_layout
from titan.estimation.hardware import find_hardware
from titan.estimation.trace import trace_layout

LAYOUTS = {
    "8B, FSDP": (8, ["training.local_batch_size=2"]),
    "8B, HSDP": (
        8,
        [
            "parallelism.data_parallel_replicate_degree=2",
            "training.local_batch_size=2",
            "training.global_batch_size=32",
        ],
    ),
    "8B, TP": (8, ["parallelism.tensor_parallel_degree=4", "training.local_batch_size=4"]),
    "8B, CP": (8, ["parallelism.context_parallel_degree=4", "training.local_batch_size=2"]),
    "8B, PP": (8, ["parallelism.pipeline_parallel_degree=4", "training.local_batch_size=8"]),
    "8B, interleaved": (
        8,
        [
            "parallelism.pipeline_parallel_degree=4",
            "parallelism.pipeline_parallel_schedule=Interleaved1F1B",
            "training.local_batch_size=16",
        ],
    ),
    "8B, ZBV": (
        8,
        [
            "parallelism.pipeline_parallel_degree=4",
            "parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
            "training.local_batch_size=16",
        ],
    ),
    "70B, TP": (256, ["model.flavor=70B", "parallelism.tensor_parallel_degree=8", "training.local_batch_size=4"]),
}
GRID = [
    (name, mode, compiled)
    for name, mode, compiled in product(LAYOUTS, ("selective", "full"), (False, True))
    if not (compiled and name == "8B, ZBV")  # whose backward pass is split, which torch.compile can't do
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode", "compiled"), GRID)
def test_methods_agree(name: str, mode: str, compiled: bool) -> None:
    gpus, settings = LAYOUTS[name]
    arguments = ["model.flavor=8B", "training.seq_len=8192", *settings, f"activation_checkpoint.mode={mode}"]
    arguments += ["compile.enable=true"] if compiled else []
    arguments += [f"estimation.gpus={gpus}", "estimation.hardware=h100"]
    loaded, ranks = load_and_check_plan(
        [f"--{argument}" for argument in arguments], 1, lambda hardware: find_hardware(hardware).machine
    )
    traced, analytic = (
        max(rank.peak_reserved_bytes for rank in method(loaded.config, ranks))
        for method in (trace_layout, analytic_layout)
    )
    assert analytic == pytest.approx(traced, rel=0.05)
