"""Degrees of parallelism → one DeviceMesh of the whole world and its named views."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from titan.config.job_config import Parallelism

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ParallelDims:
    """How many ranks each dimension has; their product is the world size.

    Every dimension is part of the mesh, size 1 included, so that no code has to ask which ones exist. The order is
    that of cost: tp talks most and lies within a node, pp talks least and spans nodes.

    Views (made once, kept here, because slicing a flattened dimension from the root mesh is deprecated):
    - batch = dp_replicate × dp_shard: ranks that read different rows of the global batch
    - fsdp = dp_shard × cp: ranks that share one copy of the weights
    - loss = dp_replicate × dp_shard × cp: ranks over which sums over tokens are reduced
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    device_type: str = "cpu"

    @classmethod
    def from_config(cls, parallelism: Parallelism, world_size: int, device_type: str = "cpu") -> ParallelDims:
        """Fill in a dp_shard degree of -1 with the ranks that are left. The config was checked (config/checks.py)."""
        replicate = parallelism.data_parallel_replicate_degree
        shard = parallelism.data_parallel_shard_degree
        pp, cp = parallelism.pipeline_parallel_degree, parallelism.context_parallel_degree
        tp = parallelism.tensor_parallel_degree
        if shard == -1:
            shard = world_size // (pp * replicate * cp * tp)
        return cls(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, device_type=device_type)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def batch_degree(self) -> int:
        """Ranks that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks_per_row(self) -> int:
        """Ranks that read the same rows."""
        return self.pp * self.cp * self.tp

    @cached_property
    def world(self) -> DeviceMesh:
        """The mesh of all dimensions. Collective: every rank must come here first, before any view."""
        from torch.distributed.device_mesh import init_device_mesh

        sizes = {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
        }
        return init_device_mesh(self.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    @cached_property
    def batch(self) -> DeviceMesh:
        return self.world["dp_replicate", "dp_shard"]._flatten("batch")

    @cached_property
    def fsdp(self) -> DeviceMesh:
        return self.world["dp_shard", "cp"]._flatten("fsdp")

    @cached_property
    def loss(self) -> DeviceMesh:
        return self.world["dp_replicate", "dp_shard", "cp"]._flatten("loss")

    @cached_property
    def weights(self) -> DeviceMesh:
        """Where FSDP2 lays out weights: fsdp alone, or dp_replicate × fsdp (HSDP) when there are copies."""
        if self.dp_replicate == 1:
            return self.fsdp
        return self.world._concatenate([self.world["dp_replicate"], self.fsdp])

    def build(self) -> None:
        """Make the mesh and all views. Collective: creating groups needs every rank, in one order."""
        for mesh in (self.world, self.batch, self.fsdp, self.loss, self.weights):
            assert mesh.size() > 0

    def degrees(self) -> dict[str, int]:
        """Degree by name, in the order of the mesh."""
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
        }
