"""What the closed form says is sent equals, to the byte, what real worlds send."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.distributed.runs import TINY, SmallRun
from tests.distributed.test_matrix import ROWS, SEQ_LEN, Layout
from tests.distributed.traffic import Traffic
from tests.distributed.world import Worlds
from titan.config.loader import load_and_check
from titan.estimation.communication import traffic_of_rank
from titan.estimation.from_config import layout_of


def measure(arguments: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Calls and bytes sent in a step all of whose labels count."""
    run = SmallRun(*arguments)
    tokens = torch.randint(99, (ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    run.step(1, tokens, tokens)  # lets everything be set up that is set up once
    with Traffic() as traffic:
        run.step(2, tokens, tokens)
    return dict(traffic.calls), dict(traffic.sent)


FULL, SELECTIVE = "activation_checkpoint.mode=full", "activation_checkpoint.mode=selective"
LAYOUTS = [
    Layout(special="deep", dp=2),
    Layout(special="deep", dp=2, replicate=2),
    Layout(special="deep", tp=2),
    Layout(special="deep", tp=2, extra=(SELECTIVE,)),
    Layout(special="deep", cp=2),
    Layout(special="deep", pp=2),
    Layout(special="deep", pp=2, extra=("pipeline_parallel_schedule=Interleaved1F1B",)),
]
MORE = [
    Layout(special="deep", dp=2, accumulate=2),
    Layout(special="tied", dp=2),
    Layout(special="layernorm", dp=2, extra=("fsdp_reshard_after_forward=always",)),
    Layout(special="deep", dp=2, extra=("fsdp_reshard_after_forward=never",)),
    Layout(special="deep", tp=2, extra=("no_enable_sequence_parallel",)),
    Layout(special="deep", tp=2, extra=(FULL,)),
    Layout(special="deep", tp=2, extra=(FULL, "activation_checkpoint.early_stop=true")),
    Layout(special="deep", tp=2, extra=("loss.name=cross_entropy",)),
    Layout(special="deep", cp=2, extra=("context_parallel_rotate_method=alltoall",)),
    Layout(special="deep", cp=2, extra=(FULL,)),
    Layout(special="deep", cp=2, extra=(SELECTIVE,)),
    Layout(special="deep", pp=2, extra=("pipeline_parallel_schedule=ZBVZeroBubble",)),
    Layout(special="deep", dp=2, pp=2),
    Layout(special="deep", dp=2, tp=2),
]


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in MORE)], ids=str
)
def test_traffic_is_that_of_a_real_world(worlds: Worlds, layout: Layout) -> None:
    config = load_and_check([*TINY, *layout.arguments], layout.ranks).config
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for row in traffic_of_rank(layout_of(config, layout.ranks), 0):
        calls[row.collective] += row.calls
        sent[row.collective] += row.bytes
    measured_calls, measured = worlds(layout.ranks).run(measure, layout.arguments)[0]
    measured_calls.pop("recv", None), measured.pop("recv", None)
    assert (measured_calls, measured) == (+calls, +sent)
