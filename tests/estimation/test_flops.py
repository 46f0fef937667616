"""FLOPs in closed form equal those that torch counts in a real step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from tests.distributed.runs import TINY
from titan.config.loader import load_and_check
from titan.estimation.flops import ATTENTION_BACKWARD, block_passes, hardware_flops
from titan.estimation.from_config import layout_of
from titan.models.layers.head import Labels
from titan.models.spec import model_families
from titan.parallelisms.activation_checkpoint import checkpoint_whole_blocks, checkpoint_within_blocks
from titan.parallelisms.parallel_dims import ParallelDims
from titan.training.loss import set_loss

ATEN = torch.ops.aten


def attention(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
    return sdpa_flop_count(query, key, value)


def attention_backward(grad: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def added_product(result: Any, first: Any, second: Any, *rest: Any, **named: Any) -> int:
    return 2 * first[0] * first[1] * second[1]


# What torch's counter leaves out: the CPU's kernels, and a product that is added in place.
LEFT_OUT = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: attention,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    ATEN.addmm_: added_product,
}


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_flops_are_those_that_torch_counts(mode: str) -> None:
    arguments = [*TINY, "--model.flavor=deep", "--training.local_batch_size=2", f"--activation_checkpoint.mode={mode}"]
    config = load_and_check(arguments, 1).config
    layout = layout_of(config, 1)
    family = model_families()["tiny"]
    model = family.build(family.flavors["deep"])
    checkpoint_within_blocks(model.layers, config.activation_checkpoint)
    checkpoint_whole_blocks(model.layers, config.activation_checkpoint)
    set_loss([model], config, ParallelDims.from_config(config.parallelism, 1))
    model.init_buffers(torch.device("cpu"))
    tokens = torch.randint(99, (2, 32))
    with FlopCounterMode(display=False, custom_mapping=LEFT_OUT) as counter:
        model(tokens, labels=Labels(tokens)).backward()
    assert counter.get_total_flops() == pytest.approx(hardware_flops(layout, 0), rel=1e-3)
    assert block_passes(layout).attention_backward >= ATTENTION_BACKWARD * block_passes(layout).attention_forward
