import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.distributed.world import Worlds
from titan.config.job_config import Parallelism
from titan.parallelisms.parallel_dims import ParallelDims
from titan.parallelisms.process_group import set_timeout


def test_the_shard_degree_takes_what_is_left() -> None:
    dims = ParallelDims.from_config(Parallelism(data_parallel_replicate_degree=2), 8)
    assert list(dims.degrees().items()) == [("pp", 1), ("dp_replicate", 2), ("dp_shard", 4), ("cp", 1), ("tp", 1)]
    assert dims.world_size == 8 and dims.batch_degree == 8


def views() -> dict[str, list[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # slicing a flattened dimension from the root mesh is deprecated
        dims = ParallelDims(pp=1, dp_replicate=2, dp_shard=2, cp=2, tp=1)
        dims.build()
        meshes = {"batch": dims.batch, "fsdp": dims.fsdp, "loss": dims.loss}
    ranks = {name: dist.get_process_group_ranks(mesh.get_group()) for name, mesh in meshes.items()}
    assert dims.weights.mesh_dim_names == ("dp_replicate", "fsdp") and dims.weights.shape == (2, 4)
    assert dims.world.shape == (1, 2, 2, 2, 1)
    return ranks


def test_views_of_the_world_mesh(worlds: Worlds) -> None:
    """Ranks number (dp_replicate, dp_shard, cp) in that order, cp fastest."""
    results = worlds(8).run(views)
    assert results[0] == {"batch": [0, 2, 4, 6], "fsdp": [0, 1, 2, 3], "loss": list(range(8))}
    assert results[5] == {"batch": [1, 3, 5, 7], "fsdp": [4, 5, 6, 7], "loss": list(range(8))}


def wait_for_a_late_rank() -> tuple[str, float]:
    own, other = dist.new_group(group_desc="checkpoint"), dist.new_group()  # a group that timed out is of no more use
    set_timeout(1)
    late = dist.get_rank() == 1
    start = time.monotonic()
    if late:
        time.sleep(3)
    try:
        dist.all_reduce(torch.zeros(1), group=own)  # keeps its own limit
        if late:
            time.sleep(3)
        dist.all_reduce(torch.zeros(1), group=other)
    except Exception as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_la_timeouts_hold_for_every_group_but_that_of_checkpoints(worlds: Worlds) -> None:
    error, seconds = worlds(2).run(wait_for_a_late_rank)[0]
    assert "imed out" in error or "timeout" in error.lower()
    assert 3.5 < seconds < 5.5
