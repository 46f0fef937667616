"""What each way of titan to need less memory is worth: the trace of a step with all of them, and with one undone.

`pytest -s tests/estimation/test_wins.py` prints the table of docs/estimation.md, which this test compares it with.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

from tests.estimation.traced_models import ARGUMENTS, SMALL
from titan.config.loader import load_and_check
from titan.estimation.dry_step import trace_step
from titan.estimation.events import Allocation
from titan.estimation.trace import trace_layout
from titan.models.llama import parallelize
from titan.parallelisms import activation_checkpoint, fsdp, tensor

ROOT = Path(__file__).parents[2]
GIB = 2**30
Patch = Callable[[pytest.MonkeyPatch], None]

LLAMA_8B = ["--job.config_file=llama3_8b.toml"]
LLAMA_70B = ["--job.config_file=llama3_70b.toml", "--parallelism.tensor_parallel_degree=8"]
LLAMA_405B = ["--job.config_file=llama3_405b.toml", "--parallelism.tensor_parallel_degree=8"]


def nothing(_: pytest.MonkeyPatch) -> None:
    """Leave all as it is."""


def sums_in_their_own_pool(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fsdp, "keeps_reduced_gradients", lambda *_: False)


def ends_in_the_root(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parallelize, "fsdp_groups", lambda model: [[block] for block in model.layers.values()])


def keep_the_last_product(patch: pytest.MonkeyPatch) -> None:
    choice = activation_checkpoint._Choice.__init__

    def keep_all(self: Any, products: int) -> None:
        choice(self, products + 1)

    patch.setattr(activation_checkpoint._Choice, "__init__", keep_all)


def embedding_of_dtensor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        tensor,
        "_VocabularyEmbedding",
        lambda stream: RowwiseParallel(input_layouts=Replicate(), output_layouts=stream, use_local_output=True),
    )


def reserved(arguments: list[str], ranks: int, undo: Patch = nothing, *, expandable: bool = True) -> float:
    """GiB of the rank that reserves most."""
    with pytest.MonkeyPatch.context() as patch:
        undo(patch)
        job = load_and_check(arguments, ranks).config
        return max(rank.peak_reserved_bytes for rank in trace_layout(job, ranks, expandable_segments=expandable)) / GIB


WHOLE_LOGITS = "--loss.name=cross_entropy"
# As the table has them: what is undone, for which run.
WINS: dict[str, tuple[list[str], int, Callable[[list[str], int], float]]] = {
    "sums of gradients lie in a pool of FSDP's": (
        LLAMA_8B,
        8,
        lambda run, ranks: reserved(run, ranks, sums_in_their_own_pool),
    ),
    "embedding and head are gathered with FSDP's root": (
        LLAMA_8B,
        8,
        lambda run, ranks: reserved(run, ranks, ends_in_the_root),
    ),
    "whole logits": (LLAMA_8B, 8, lambda run, ranks: reserved([*run, WHOLE_LOGITS], ranks)),
    "segments don't grow": (LLAMA_8B, 8, lambda run, ranks: reserved(run, ranks, expandable=False)),
    "blocks keep w2's result too": (LLAMA_8B, 8, lambda run, ranks: reserved(run, ranks, keep_the_last_product)),
    "logits aren't split over tp": (
        LLAMA_70B,
        64,
        lambda run, ranks: reserved([*run, WHOLE_LOGITS, "--parallelism.disable_loss_parallel"], ranks),
    ),
    "the embedding is DTensor's": (
        LLAMA_405B,
        512,
        lambda run, ranks: reserved(run, ranks, embedding_of_dtensor),
    ),
}


def table() -> list[str]:
    lines = []
    base: dict[str, float] = {}
    for undone, (run, ranks, without) in WINS.items():
        key = " ".join(run)
        if key not in base:
            base[key] = reserved(run, ranks)
        name = re.findall(r"_(\d+b)", run[0])[0].upper()
        layout = f"{name}, FSDP {ranks // 8} × TP 8" if "tensor" in key else f"{name}, FSDP {ranks}"
        value = without(run, ranks)
        lines.append(f"| {undone} | {layout} | {base[key]:.1f} | {value:.1f} | {value - base[key]:+.1f} |")
    return lines


def test_the_embeddings_gradient_is_that_of_a_ranks_rows() -> None:
    job = load_and_check([*ARGUMENTS, "--model.flavor=two", "--parallelism.tensor_parallel_degree=2"], 2).config
    events = trace_step(job, 2, 2, 1).trace.events
    made = [event for event in events if isinstance(event, Allocation)]
    sizes = {event.bytes for event in made if event.operator == "aten::embedding_dense_backward"}
    assert sizes == {2 * SMALL.vocab_size * SMALL.dim // 2}


@pytest.mark.slow
def test_the_table_of_the_documentation() -> None:
    lines = table()
    print("\n".join(["", *lines]))
    text = (ROOT / "docs" / "estimation.md").read_text(encoding="utf-8")
    assert [line for line in lines if line not in text] == []
