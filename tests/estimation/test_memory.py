"""The closed form of what blocks keep, against what real blocks keep, to the byte.

Counted are the storages that were made in a block's forward pass and are alive after it, when only the graph is held.
Compiled blocks don't run under a mode that watches operators; of them, what they save for the backward pass is counted.
"""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.tiny_models import UNTIED
from tests.distributed.world import Worlds
from titan.config.job_config import ActivationCheckpoint, Compile
from titan.estimation.memory import BlockShape, saved_bytes
from titan.models.llama import LLAMA3_FLAVORS
from titan.models.llama.model import Llama
from titan.models.llama.parallelize import TENSOR_PLAN
from titan.parallelisms import context
from titan.parallelisms.activation_checkpoint import checkpoint_whole_blocks, checkpoint_within_blocks
from titan.parallelisms.compile import apply_compile
from titan.parallelisms.context import apply_context_parallel
from titan.parallelisms.tensor import apply_tensor_parallel
from titan.training.initialize import initialize_weights, materialize

ROWS, SEQ_LEN = 2, 32
SETTINGS = {
    "none": ActivationCheckpoint(mode="none"),
    "full": ActivationCheckpoint(mode="full"),
    "op": ActivationCheckpoint(),
}


class Alive(TorchDispatchMode):
    """Storages that operators made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first turns its operator into those of plain tensors
        out = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = getattr(tensor, "elem", tensor).untyped_storage()  # an AsyncCollectiveTensor's is its elem's
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def bytes(self, but: set[int]) -> int:
        return sum(size for ref, size in self.made.items() if not ref.expired() and ref.cdata not in but)


def storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def kept(block: Any, leaf: torch.Tensor, *tables: torch.Tensor) -> int:
    """Bytes that a block's graph holds after its forward pass, of what it made and got."""
    shared = {storage(tensor)._cdata for tensor in (*block.parameters(), *tables)}
    with Alive() as alive:
        x = leaf + 0  # held by nobody else
        graph = block(x, *tables).grad_fn
        del x
    assert graph is not None
    sizes = [alive.bytes(but=shared)]
    for _ in range(20):  # gloo's threads hold what a collective took for a moment after it is done
        time.sleep(0.005)
        sizes.append(alive.bytes(but=shared))
    return min(sizes)


def kept_compiled(block: Any, leaf: torch.Tensor, *tables: torch.Tensor) -> int:
    shared = {storage(tensor)._cdata for tensor in (*block.parameters(), *tables)}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[storage(tensor)._cdata] = storage(tensor).nbytes()
        return tensor

    x = leaf + 0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, *tables)
    return sum(size for address, size in sizes.items() if address not in shared)


def model_of(
    settings: ActivationCheckpoint,
    compiled: bool,
    mesh: DeviceMesh | None = None,
    *,
    ring: bool = False,
    sequence_parallel: bool = True,
) -> Llama:
    """What parallelize_llama makes of a model, without FSDP."""
    with torch.device("meta"):
        model = Llama(UNTIED)
    if mesh is not None and mesh["tp"].size() > 1:
        apply_tensor_parallel(model, mesh["tp"], TENSOR_PLAN, sequence_parallel=sequence_parallel)
    if mesh is not None:
        apply_context_parallel(model, mesh["cp"], "alltoall" if ring else "allgather", balanced=True)
    checkpoint_within_blocks(model.layers, settings)
    if compiled:
        apply_compile(model.layers.values(), Compile(enable=True, backend="aot_eager"))
    checkpoint_whole_blocks(model.layers, settings)
    materialize(model, torch.device("cpu"))
    initialize_weights(model, seed=0)
    return model


def measure(tp: int, cp: int, ring: bool, sequence_parallel: bool, compiled: bool) -> dict[tuple[str, int], int]:
    """What a block of a layout keeps, by mode and bytes of an element."""
    mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp")) if tp * cp > 1 else None
    length = SEQ_LEN // cp
    found = {}
    for mode, dtype in product(SETTINGS, (torch.float32, torch.bfloat16)):
        model = model_of(SETTINGS[mode], compiled, mesh, ring=ring, sequence_parallel=sequence_parallel)
        leaf = torch.randn(ROWS, length // tp if sequence_parallel else length, UNTIED.dim, dtype=dtype)
        leaf.requires_grad_()
        count = kept_compiled if compiled else kept
        found[mode, dtype.itemsize] = count(model.layers["0"].to(dtype), leaf, *model.rotary(length))
    return found


def expect(tp: int, cp: int, ring: bool, sequence_parallel: bool, compiled: bool) -> dict[tuple[str, int], int]:
    sizes = (UNTIED.dim, UNTIED.n_heads, UNTIED.n_kv_heads, UNTIED.head_dim, UNTIED.ffn_dim)
    return {
        (mode, element): saved_bytes(
            mode,  # type: ignore[arg-type]
            BlockShape(ROWS * SEQ_LEN // cp, *sizes, element, tp, sequence_parallel, cp, ring),
            compiled=compiled,
            fused_norm=False,
        )
        for mode, element in product(SETTINGS, (4, 2))
    }


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_process(compiled: bool) -> None:
    layout = (1, 1, False, True, compiled)
    assert measure(*layout) == expect(*layout)


@pytest.mark.slow
def test_a_memory_budget_lies_between_none_and_full() -> None:
    kept_with: dict[float, int] = {}
    for budget in (1.0, 0.5, 0.0):
        torch._dynamo.reset()
        model = model_of(ActivationCheckpoint(mode="memory_budget", memory_budget=budget), compiled=True)
        leaf = torch.randn(ROWS, SEQ_LEN, UNTIED.dim, requires_grad=True)
        kept_with[budget] = kept_compiled(model.layers["0"], leaf, *model.rotary(SEQ_LEN))
    bounds = expect(1, 1, False, True, compiled=True)
    assert (kept_with[1.0], kept_with[0.0]) == (bounds["none", 4], bounds["full", 4])
    assert kept_with[0.0] < kept_with[0.5] < 0.6 * kept_with[1.0]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tensor_parallel(worlds: Worlds, sequence_parallel: bool) -> None:
    layout = (2, 1, False, sequence_parallel, False)
    assert worlds(2).run(measure, *layout) == 2 * [expect(*layout)]


@pytest.mark.slow
def test_tensor_parallel_compiled(worlds: Worlds) -> None:
    layout = (2, 1, False, True, True)
    assert worlds(2).run(measure, *layout) == 2 * [expect(*layout)]


def measure_unmasked(*layout: Any) -> dict[tuple[str, int], int]:
    """With attention that needs no mask, as the kernels of accelerators don't. What it computes is wrong on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        attention = F.scaled_dot_product_attention
        patch.setattr(context, "attend", lambda q, k, v, documents: attention(q, k, v, is_causal=True, enable_gqa=True))
        return measure(*layout)


@pytest.mark.parametrize("ring", [True, False])
def test_context_parallel(worlds: Worlds, ring: bool) -> None:
    layout = (1, 2, ring, True, False)
    assert worlds(2).run(measure_unmasked, *layout) == 2 * [expect(*layout)]


def test_published_models() -> None:
    """KiB per token and layer, as the traces of an independent study found them."""

    def kib(mode: Any, flavor: str, **layout: Any) -> float:
        sizes = LLAMA3_FLAVORS[flavor]
        widths = (sizes.dim, sizes.n_heads, sizes.n_kv_heads, sizes.head_dim, sizes.ffn_dim)
        return round(saved_bytes(mode, BlockShape(1024, *widths, **layout)) / 1024**2, 1)

    assert (kib("full", "8B"), kib("op", "8B"), kib("op", "70B", tp=8)) == (8.0, 54.1, 15.3)
    assert kib("full", "70B", tp=8) == 2.0
