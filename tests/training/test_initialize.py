"""Initial weights: a function of the seed, the name and the place. (Equality over layouts: tests/distributed/.)"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.distributed.world import Worlds
from titan.models.spec import Constant, Normal
from titan.training import initialize
from titan.training.initialize import initialize_weights, materialize


class Weights(nn.Module):
    """Two parameters: one of several blocks of rows, with an odd last one, and a gain."""

    def __init__(self, rows: int = 37, columns: int = 6) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(rows, columns))
        self.gain = nn.Parameter(torch.zeros(rows))

    def parameter_init(self, name: str) -> Normal | Constant:
        return Normal(0.5) if name == "matrix" else Constant(1.0)

    def init_buffers(self, device: torch.device) -> None: ...

    def tie_weights(self) -> None: ...


def drawn(seed: int = 0, name: str = "matrix", **sizes: int) -> torch.Tensor:
    model = Weights(**sizes)
    initialize_weights(model, seed)
    return model.get_parameter(name).detach()


def test_values_depend_on_seed_and_name_only() -> None:
    torch.manual_seed(1)
    first = drawn()
    torch.manual_seed(2)
    assert torch.equal(drawn(), first)
    assert not torch.equal(drawn(seed=1), first)
    assert torch.equal(drawn(name="gain"), torch.ones(37))


def test_distribution_is_the_clipped_normal() -> None:
    values = drawn(rows=3000, columns=1000)  # three blocks
    assert values.std().item() == pytest.approx(0.5, rel=0.01)
    assert abs(values.mean().item()) < 0.001
    assert values.abs().max().item() == pytest.approx(1.5, abs=1e-6)
    rows = initialize._BLOCK_ELEMENTS // 1000
    assert not torch.equal(values[:100], values[rows : rows + 100])


def shards_equal_the_whole() -> None:
    whole = drawn()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    line = init_device_mesh("cpu", (4,))
    cases: list[tuple[object, list[Placement]]] = [
        (line, [Shard(0)]),
        (line, [Shard(1)]),  # six columns over four ranks: one has none
        (line, [Replicate()]),
        (grid, [Shard(0), Shard(1)]),
        (grid, [Replicate(), Shard(0)]),
        (grid, [Shard(0), Shard(0)]),
    ]
    for mesh, placements in cases:
        model = Weights()
        model.matrix = nn.Parameter(distribute_tensor(torch.zeros(37, 6), mesh, placements))  # type: ignore[arg-type]
        initialize_weights(model, 0)
        matrix = model.matrix
        assert isinstance(matrix, DTensor)
        assert torch.equal(matrix.full_tensor(), whole), placements
    dist.barrier()


def with_small_blocks() -> None:
    """Five rows a block; taken back, since other cases share the process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initialize, "_BLOCK_ELEMENTS", 30)
        shards_equal_the_whole()


def test_any_shard_holds_the_bits_of_the_whole(worlds: Worlds) -> None:
    worlds(4).run(with_small_blocks)


def test_what_is_left_without_memory_is_named() -> None:
    class Forgetful(Weights):
        def to_empty(self, **_: object) -> Forgetful:  # type: ignore[override]
            return self

    with torch.device("meta"):
        model = Forgetful()
    with pytest.raises(RuntimeError, match="matrix, gain"):
        materialize(model, torch.device("cpu"))
