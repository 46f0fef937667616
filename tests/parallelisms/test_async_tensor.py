"""Async tensor parallelism: what can be shown of it without a GPU.

Shown: in the graph that torch.compile makes of a block with titan's plan, PyTorch's pass replaces every gather that
feeds products, and every product that feeds a reduce-scatter, by its overlapping operator. Not shown: that these
operators run, are right, and are faster; they need GPUs with symmetric memory.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._functorch.aot_autograd import aot_module_simplified
from torch.distributed.device_mesh import init_device_mesh

import tests.distributed.tiny_models as tiny
from tests.distributed.runs import TINY
from tests.distributed.world import Worlds
from titan.config.errors import ConfigError
from titan.config.loader import load_and_check
from titan.models.llama.parallelize import TENSOR_PLAN
from titan.parallelisms.tensor import apply_tensor_parallel
from titan.training.initialize import initialize_weights, materialize


def operators(graph: torch.fx.Graph) -> Counter[str]:
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return Counter(name.split(".")[1] for name in names if name.startswith(("symm_mem.", "_c10d_functional.")))


def fused_operators(sequence_parallel: bool) -> dict[str, tuple[Counter[str], Counter[str]]]:
    """Collectives of a compiled block's forward and backward graphs, before and after the pass."""
    from functorch.compile import make_boxed_func
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch.distributed._symmetric_memory import _test_mode

    found: dict[str, tuple[Counter[str], Counter[str]]] = {}

    def looking_at(name: str) -> Any:
        def compiler(module: torch.fx.GraphModule, inputs: Any) -> Any:
            after = copy.deepcopy(module)
            view_to_reshape(after)  # as inductor does before the pass
            # The pass looks for NCCL, and for groups with symmetric memory.
            with patch("torch.distributed.is_nccl_available", return_value=True), _test_mode():
                micro_pipeline_tp_pass(after.graph)
            found[name] = operators(module.graph), operators(after.graph)
            return make_boxed_func(module.forward)

        return compiler

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        table = select_decomp_table()
        compilers = {"fw_compiler": looking_at("forward"), "bw_compiler": looking_at("backward")}
        return aot_module_simplified(module, inputs, decompositions=table, **compilers)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    with torch.device("meta"):
        model = tiny.SPEC.build(tiny.SPEC.flavors["deep"])
    apply_tensor_parallel(model, mesh, TENSOR_PLAN, sequence_parallel=sequence_parallel)
    materialize(model, torch.device("cpu"))
    initialize_weights(model, 0)
    block = model.layers["0"]
    block.compile(backend=backend, fullgraph=True)
    stream = torch.randn(2, 16 if sequence_parallel else 32, 48, requires_grad=True)
    block(stream, *model.rotary(32)).sum().backward()
    return found


def test_tp_async_pass_fuses_every_gather_and_reduce_scatter_it_can(worlds: Worlds) -> None:
    for found in worlds(2).run(fused_operators, True):
        before, after = found["forward"]
        assert (before["all_gather_into_tensor"], before["reduce_scatter_tensor"]) == (2, 2)
        assert (after["all_gather_into_tensor"], after["reduce_scatter_tensor"]) == (0, 0)
        assert (after["fused_all_gather_matmul"], after["fused_matmul_reduce_scatter"]) == (2, 2)
        before, after = found["backward"]
        assert (before["all_gather_into_tensor"], before["reduce_scatter_tensor"]) == (2, 2)
        # A block's columns each give a part of the gradient: their sum, not one product, is what is scattered.
        assert (after["fused_all_gather_matmul"], after["fused_matmul_reduce_scatter"]) == (2, 0)


@pytest.mark.slow
def test_without_sequence_parallel_there_is_nothing_to_fuse(worlds: Worlds) -> None:
    for found in worlds(2).run(fused_operators, False):
        for _, after in found.values():
            assert after["fused_all_gather_matmul"] == after["fused_matmul_reduce_scatter"] == 0


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        ([], ["tensor_parallel_degree > 1 (it is 1)", "compile.enable = true", "GPUs with symmetric memory"]),
        (["--parallelism.tensor_parallel_degree=2"], ["compile.enable = true", "GPUs with symmetric memory"]),
        (["--parallelism.tensor_parallel_degree=2", "--compile.enable"], ["GPUs with symmetric memory"]),
    ],
)
def test_tp_async_is_refused_with_all_its_reasons(arguments: list[str], reasons: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_and_check([*TINY, "--parallelism.enable_async_tensor_parallel", *arguments], 2)
    for reason in reasons:
        assert reason in str(error.value)
    assert len(error.value.mistakes) == 1
