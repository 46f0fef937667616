"""Every parallelism, alone and composed, follows one process.

A layout starts from the same weights bit for bit, and with SGD, which doesn't forgive a wrong scale as Adam does, has
the losses, gradient norms and weights of one process. Labels are unequal on purpose: rows with 3 and 13 valid labels,
full rows, and rows with none, so that whole ranks have nothing to learn from. The vocabulary is 101.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.distributed.conftest import DeviationTable
from tests.distributed.runs import SmallRun
from tests.distributed.world import Worlds

ROWS, SEQ_LEN, STEPS = 8, 32, 5


@dataclass(frozen=True)
class Layout:
    """Degrees, the windows of a microbatch (fewer than the rank's rows: accumulation), and further arguments."""

    dp: int = 1
    replicate: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    accumulate: int = 1
    special: str = ""  # a flavor of the tiny model
    extra: tuple[str, ...] = ()

    @property
    def flavor(self) -> str:
        """Two layers where they suffice; four for several stages per rank, and heads enough for four tp ranks."""
        several = any("pipeline_parallel_schedule=" in argument for argument in self.extra)
        return self.special or ("deep" if several or self.tp == 4 or self.pp == 4 else "untied")

    @property
    def ranks(self) -> int:
        return self.dp * self.replicate * self.cp * self.tp * self.pp

    @property
    def arguments(self) -> list[str]:
        local = ROWS // (self.dp * self.replicate * self.accumulate)
        return [
            f"--model.flavor={self.flavor}",
            f"--training.seq_len={SEQ_LEN}",
            "--training.max_norm=0",
            f"--training.local_batch_size={local}",
            f"--training.global_batch_size={ROWS}",
            f"--parallelism.data_parallel_shard_degree={self.dp}",
            f"--parallelism.data_parallel_replicate_degree={self.replicate}",
            f"--parallelism.context_parallel_degree={self.cp}",
            f"--parallelism.tensor_parallel_degree={self.tp}",
            f"--parallelism.pipeline_parallel_degree={self.pp}",
            f"--parallelism.pipeline_parallel_microbatch_size={self._microbatch(local)}",
            *(f"--{'' if '.' in argument.partition('=')[0] else 'parallelism.'}{argument}" for argument in self.extra),
        ]

    def _microbatch(self, local: int) -> int:
        """DTensor costs milliseconds a product on a CPU: fewer, larger microbatches where tp meets pp and it may be."""
        many = "pipeline_parallel_schedule=DualPipeV" in self.extra  # one microbatch per stage at least
        return 2 if self.tp > 1 and self.pp > 1 and local >= 4 and not many else 1

    def __str__(self) -> str:
        degrees = {"pp": self.pp, "replicate": self.replicate, "shard": self.dp, "cp": self.cp, "tp": self.tp}
        parts = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
        parts += [f"accumulate{self.accumulate}"] if self.accumulate > 1 else []
        parts += ["by-name" if "[" in argument else argument.rpartition("=")[2] for argument in self.extra]
        parts += [self.special] if self.special else []
        return "·".join(parts) or "one process"


def schedule(name: str, *more: str) -> tuple[str, ...]:
    return (f"pipeline_parallel_schedule={name}", *more)


RING = ("context_parallel_rotate_method=alltoall",)
WHOLE_LOGITS = ("loss.name=cross_entropy",)  # in place of the chunked loss
NO_SP = ("no_enable_sequence_parallel",)
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]

BY_NAME = [["tok_embeddings"], ["layers.0", "layers.1", "norm", "output"]]

ALONE = [
    Layout(accumulate=4),
    Layout(dp=2),
    Layout(replicate=2),
    Layout(tp=2),
    Layout(tp=4),
    Layout(tp=2, extra=NO_SP),
    Layout(tp=2, extra=(*NO_SP, *WHOLE_LOGITS, "disable_loss_parallel")),
    Layout(tp=2, extra=WHOLE_LOGITS),
    Layout(tp=4, special="tied_deep"),
    Layout(tp=2, special="layernorm"),
    Layout(cp=2),
    Layout(cp=4),
    Layout(cp=2, extra=("context_parallel_load_balancer=none",)),
    Layout(cp=4, extra=RING),
    Layout(cp=2, extra=(*RING, "context_parallel_load_balancer=none")),
    Layout(pp=4),
    *[Layout(pp=2, extra=schedule(name)) for name in SCHEDULES],
    Layout(pp=2, extra=("pipeline_parallel_microbatch_size=2", *WHOLE_LOGITS)),
    Layout(pp=2, extra=("module_fqns_per_model_part=" + json.dumps(BY_NAME),)),
]
PAIRS = [
    Layout(dp=2, replicate=2),
    Layout(dp=2, replicate=2, accumulate=2),
    Layout(dp=2, tp=2, accumulate=2),
    Layout(replicate=2, tp=2, extra=NO_SP),
    Layout(dp=2, tp=2, special="tied_deep"),
    Layout(dp=2, cp=2),
    Layout(dp=2, cp=2, accumulate=2, extra=RING),
    Layout(replicate=2, cp=2),
    Layout(pp=2, dp=2),
    Layout(pp=2, dp=2, accumulate=2),
    Layout(pp=2, replicate=2, extra=schedule("ZBVZeroBubble")),
    Layout(tp=2, cp=2),
    Layout(tp=2, cp=2, extra=RING),
    Layout(pp=2, tp=2, accumulate=2, extra=schedule("Interleaved1F1B")),
    Layout(pp=2, cp=2),
    Layout(pp=2, cp=2, extra=(*schedule("DualPipeV"), *RING)),
]
COMPOSED = [
    Layout(pp=2, tp=2, dp=2),
    Layout(pp=2, cp=2, dp=2),
    Layout(tp=2, cp=2, dp=2, accumulate=2),
    Layout(replicate=2, dp=2, tp=2),
    Layout(pp=2, cp=2, tp=2, extra=RING),
]


def random_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels `[ROWS, SEQ_LEN]`; of the labels, whole rows and parts of rows count for nothing."""
    tokens = torch.randint(0, 101, (ROWS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))
    labels = tokens[:, 1:].contiguous()
    labels[0, 3:] = labels[1, 13:] = labels[4:] = -100
    return tokens[:, :-1].contiguous(), labels


def follow(arguments: list[str]) -> dict[str, Any]:
    """Five steps of SGD; weights at the start and after three of them."""
    run = SmallRun(*arguments)
    weights, outcomes = [run.weights()], []
    for step in range(1, STEPS + 1):
        outcomes.append(run.step(step, *random_batch(step)))
        if step == 3:
            weights.append(run.weights())
    losses, norms = [o.loss for o in outcomes], [o.grad_norm for o in outcomes]
    return {"initial": weights[0], "after": weights[1], "losses": losses, "norms": norms}


@pytest.fixture(scope="module")
def one_process(worlds: Worlds) -> dict[str, dict[str, Any]]:
    """By flavor; with whole logits, which the chunked loss must equal."""
    flavors = ("untied", "deep", "tied_deep", "layernorm")
    layouts = {flavor: Layout(special=flavor, extra=WHOLE_LOGITS) for flavor in flavors}
    return {flavor: worlds(1).run(follow, layout.arguments)[0] for flavor, layout in layouts.items()}


def relative(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def check(worlds: Worlds, layout: Layout, expected: dict[str, Any], table: DeviationTable) -> None:
    results = worlds(layout.ranks).run(follow, layout.arguments)
    found = results[0]
    assert all(result["losses"] == found["losses"] for result in results)  # every rank logs the same numbers
    assert all(result["norms"] == found["norms"] for result in results)
    assert found["initial"].keys() == expected["initial"].keys()
    for name, weight in expected["initial"].items():
        assert torch.equal(found["initial"][name], weight), f"initial {name}"
    deviations = {
        "loss": relative(found["losses"], expected["losses"]),
        "norm": relative(found["norms"], expected["norms"]),
        "weights": max((found["after"][name] - w).abs().max().item() for name, w in expected["after"].items()),
    }
    table.add(str(layout), layout.ranks, deviations)
    assert deviations["loss"] < 1e-5 and deviations["norm"] < 1e-5 and deviations["weights"] < 1e-6, deviations


# DTensor's dispatch makes these the dearest; what they compose, the others have too.
DEAR = [
    Layout(tp=2, cp=2, dp=2, accumulate=2),
    Layout(replicate=2, dp=2, tp=2),
    Layout(pp=2, tp=2, accumulate=2, extra=schedule("Interleaved1F1B")),
    Layout(pp=2, tp=2, dp=2),
    Layout(tp=4, special="tied_deep"),
    Layout(replicate=2, tp=2, extra=NO_SP),
    Layout(dp=2, tp=2, accumulate=2),
    Layout(dp=2, tp=2, special="tied_deep"),
    Layout(tp=2, cp=2, extra=RING),
    Layout(pp=2, cp=2, extra=(*schedule("DualPipeV"), *RING)),
    Layout(pp=2, cp=2, dp=2),
]


def marked(layout: Layout) -> Any:
    return pytest.param(layout, marks=pytest.mark.slow) if layout in DEAR else layout


@pytest.mark.parametrize("layout", [*map(marked, [*ALONE, *PAIRS, *COMPOSED])], ids=str)
def test_a_layout_follows_one_process(
    worlds: Worlds, one_process: dict[str, dict[str, Any]], deviations: DeviationTable, layout: Layout
) -> None:
    check(worlds, layout, one_process[layout.flavor], deviations)


def product() -> list[Layout]:
    """Every combination of techniques on up to eight ranks."""
    found = []
    for dp, replicate, cp, tp, pp in itertools.product((1, 2), repeat=5):
        if dp * replicate * cp * tp * pp > 8:
            continue
        for accumulate, name, ring, sequence in itertools.product(
            (1, 2),
            SCHEDULES if pp > 1 else SCHEDULES[:1],
            ((), RING) if cp > 1 else ((),),
            ((), NO_SP) if tp > 1 else ((),),
        ):
            layout = Layout(dp, replicate, cp, tp, pp, accumulate, extra=(*schedule(name), *ring, *sequence))
            microbatches = ROWS // (dp * replicate * accumulate)
            if pp == 1 or microbatches >= (2 * pp if name == "DualPipeV" else pp):
                found.append(layout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", product(), ids=str)
def test_the_full_product_follows_one_process(
    worlds: Worlds, one_process: dict[str, dict[str, Any]], deviations: DeviationTable, layout: Layout
) -> None:
    check(worlds, layout, one_process[layout.flavor], deviations)
