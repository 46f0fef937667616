"""Weights in bf16 (training.dtype), and weights in the CPU's memory (training.enable_cpu_offload)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.test_matrix import Layout
from tests.distributed.world import Worlds
from tests.training.optimizer_runs import OptimizerRun, straight, straight_and_resumed

BF16 = ["--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16"]
OFFLOAD = ["--training.enable_cpu_offload", "--training.max_norm=1"]


def in_bf16(arguments: list[str], folder: str) -> dict[str, Any]:
    run = OptimizerRun(arguments, folder)
    initial = run.weights()
    gradients: set[torch.dtype] = set()
    for parameter in run.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: gradients.add(p.grad.dtype))
    run.train(0, 4)
    buffers = {buffer.dtype for part in run.stages.parts for buffer in part.buffers()}
    return {"initial": initial, "gradients": gradients, "buffers": buffers, **run.outcome()}


def test_bf16_weights_start_as_the_rounded_draw_and_follow_float32(worlds: Worlds, tmp_path: object) -> None:
    exact = worlds(1).run(straight, Layout().arguments, f"{tmp_path}/exact")[0]
    first = worlds(1).run(in_bf16, Layout().arguments, f"{tmp_path}/float32")[0]
    for layout in (Layout(), Layout(dp=2), Layout(tp=2), Layout(pp=2)):
        found = worlds(layout.ranks).run(in_bf16, layout.arguments + BF16, f"{tmp_path}/{layout}")[0]
        for name, weight in first["initial"].items():
            assert torch.equal(found["initial"][name], weight.bfloat16()), name
        weights = {tensor.dtype for name, tensor in found["tensors"].items() if name.startswith("model.")}
        assert weights == found["gradients"] == {torch.bfloat16}
        assert found["buffers"] == {torch.float32}  # the rotary tables
        assert found["losses"] == pytest.approx(exact["losses"], rel=2e-3)
        assert found["norms"][:1] == pytest.approx(exact["norms"][:1], rel=1e-2)


def norm_of_bf16() -> float:
    from titan.training.gradients import gradient_norm

    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    parameter.grad = torch.full((1000,), 0.1, dtype=torch.bfloat16)
    return float(gradient_norm([parameter]))


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16(worlds: Worlds) -> None:
    value = float(torch.tensor(0.1, dtype=torch.bfloat16))
    assert worlds(1).run(norm_of_bf16)[0] == pytest.approx(value * 1000**0.5, rel=1e-6)


@pytest.mark.parametrize("extra", [BF16, OFFLOAD], ids=["bf16", "offload"])
def test_a_resume_is_exact(worlds: Worlds, extra: list[str], tmp_path: object) -> None:
    whole, rest = worlds(2).run(straight_and_resumed, Layout(dp=2).arguments + extra, str(tmp_path))[0]
    assert rest["losses"] == whole["losses"][2:] and rest["norms"] == whole["norms"][2:]
    for name, tensor in whole["tensors"].items():
        assert torch.equal(rest["tensors"][name], tensor), name


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, accumulate=2),
        Layout(tp=2),
        Layout(pp=2),
        pytest.param(Layout(), marks=pytest.mark.slow),
        pytest.param(Layout(replicate=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_offloading_changes_no_bit(worlds: Worlds, layout: Layout, tmp_path: object) -> None:
    clipped = [*layout.arguments, "--training.max_norm=1"]
    expected = worlds(layout.ranks).run(straight, clipped, f"{tmp_path}/device")[0]
    found = worlds(layout.ranks).run(straight, layout.arguments + OFFLOAD, f"{tmp_path}/cpu")[0]
    assert (found["losses"], found["norms"]) == (expected["losses"], expected["norms"])
    assert max(expected["norms"]) > 1  # some steps were clipped
    for name, tensor in expected["tensors"].items():
        assert torch.equal(found["tensors"][name], tensor), name


def offload_policies(arguments: list[str], folder: str) -> set[tuple[str, bool]]:
    run = OptimizerRun(arguments, folder)
    states = [
        module._get_fsdp_state() for part in run.stages.parts for module in part.modules() if hasattr(module, "unshard")
    ]
    groups = [group for state in states if (group := state._fsdp_param_group) is not None]
    dist.barrier()
    return {(type(group.offload_policy).__name__, group.offload_policy.pin_memory) for group in groups}


def test_nothing_is_pinned_without_an_accelerator(worlds: Worlds, tmp_path: object) -> None:
    assert worlds(1).run(offload_policies, Layout().arguments + OFFLOAD, str(tmp_path))[0] == {
        ("CPUOffloadPolicy", False)
    }
