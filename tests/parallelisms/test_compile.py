"""Compiled blocks. Their layouts are in tests/distributed/test_composed.py."""

from __future__ import annotations

import re

import pytest
import torch

from tests.parallelisms.test_activation_checkpoint import llama
from titan.config.job_config import Compile
from titan.parallelisms.compile import apply_compile, describe_compilation


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_ac_rope_compile_in_bf16(backend: str) -> None:
    """Rotary angles stay float32: with angles in bf16 the outputs would differ by as much as they are large."""
    torch._dynamo.reset()
    model = llama("untied")
    block, tables = model.layers["0"].to(torch.bfloat16), model.rotary(128)
    x = torch.randn(2, 128, 48, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    attention = block.attention
    with torch.no_grad():
        for weight in (attention.wq.weight, attention.wk.weight):
            weight.mul_(20)  # scores that depend on positions
        eager = attention(x, *tables)
        apply_compile([attention], Compile(enable=True, backend=backend))
        compiled = attention(x, *tables)
    assert (compiled - eager).abs().max() < 2**-7 * eager.abs().max()


def test_what_was_compiled_is_told() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert describe_compilation().startswith("0 graph(s)")
    linears = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 5)]
    apply_compile(linears, Compile(enable=True, backend="aot_eager"))
    for linear in linears:
        linear(torch.ones(2, 3))
    assert re.fullmatch(r"2 graph\(s\) compiled in [0-9.]+ s, 0 taken from the cache on disk", describe_compilation())
