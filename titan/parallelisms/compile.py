"""torch.compile, block by block."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from titan.config.job_config import Compile


def apply_compile(blocks: Iterable[nn.Module], settings: Compile) -> None:
    """Compile each block's `forward` in place, as one graph without breaks; equal blocks share one compiled graph.

    A block at a time, not the whole model: FSDP's gathers lie between blocks, and compiling one of N equal blocks takes
    an N-th of the time. `forward` rather than the module: hooks, such as FSDP's, stay outside, and so does what wraps
    `forward` later. The modules' names don't change.
    """
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=settings.backend, fullgraph=True)


def describe_compilation() -> str:
    """What torch.compile has done in this process so far, for people."""
    # torch 2.13 has no public call for this.
    from torch._dynamo.utils import calculate_time_spent, counters

    seconds = calculate_time_spent().get("total_wall_time", 0.0)
    graphs = counters["stats"]["unique_graphs"]
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    return f"{graphs} graph(s) compiled in {seconds:.1f} s, {hits} taken from the cache on disk"
