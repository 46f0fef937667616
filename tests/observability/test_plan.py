"""What a run says of itself before it starts."""

from __future__ import annotations

import pytest

from titan.config.loader import load_and_check
from titan.observability.device import Device
from titan.observability.plan import describe_layout, describe_run
from titan.parallelisms.parallel_dims import ParallelDims

PIPELINE = (
    "--parallelism.pipeline_parallel_degree=2",
    "--parallelism.tensor_parallel_degree=2",
    "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
    "--training.global_batch_size=32",
)


def layout(world_size: int, *arguments: str) -> list[str]:
    config = load_and_check(arguments, world_size).config
    return describe_layout(config, ParallelDims.from_config(config.parallelism, world_size))


def test_layout_of_a_pipeline() -> None:
    assert "\n".join(layout(8, *PIPELINE)) == (
        "ranks:\n"
        "  rank  pp  dp_replicate  dp_shard  cp  tp\n"
        "     0   0             0         0   0   0\n"
        "     1   0             0         0   0   1\n"
        "     2   0             0         1   0   0\n"
        "     3   0             0         1   0   1\n"
        "     4   1             0         0   0   0\n"
        "     5   1             0         0   0   1\n"
        "     6   1             0         1   0   0\n"
        "     7   1             0         1   0   1\n"
        "what is split:\n"
        "  weights: each over fsdp = dp_shard 2 × cp 1 = 2 rank(s), its matrices also over tp 2\n"
        "  batch: 32 windows over dp_replicate 1 × dp_shard 2 = 2 rank(s): 16 each, as 2 microbatch(es) of 8\n"
        "  sequence: 2048 tokens; between matrix products over tp 2: 1024 on a rank\n"
        "  vocabulary: 264 rows over tp 2: 132 on a rank at most; the loss is computed on the parts\n"
        "  tokens per step: 32 windows × 2048 = 65,536\n"
        "pipeline:\n"
        "  ZBVZeroBubble, 4 stages on 2 ranks, 8 microbatch(es) of 1 window(s)\n"
        "  stage 0 on pp 0: tok_embeddings, layers.0\n"
        "  stage 1 on pp 1: layers.1 … 2\n"
        "  stage 2 on pp 1: layers.3 … 4\n"
        "  stage 3 on pp 0: layers.5, norm, output"
    )


def test_layout_of_many_ranks() -> None:
    degrees = ("data_parallel_replicate_degree=2", "context_parallel_degree=4", "tensor_parallel_degree=2")
    arguments = [f"--parallelism.{degree}" for degree in degrees]
    found = layout(128, *arguments, "--training.local_batch_size=1", "--parallelism.disable_loss_parallel")
    assert "\n".join(found) == (
        "ranks:\n"
        "  rank  pp  dp_replicate  dp_shard  cp  tp\n"
        "     0   0             0         0   0   0\n"
        "     1   0             0         0   0   1\n"
        "     2   0             0         0   1   0\n"
        "     3   0             0         0   1   1\n"
        "     4   0             0         0   2   0\n"
        "     5   0             0         0   2   1\n"
        "     6   0             0         0   3   0\n"
        "     7   0             0         0   3   1\n"
        "  … 112 more\n"
        "   120   0             1         7   0   0\n"
        "   121   0             1         7   0   1\n"
        "   122   0             1         7   1   0\n"
        "   123   0             1         7   1   1\n"
        "   124   0             1         7   2   0\n"
        "   125   0             1         7   2   1\n"
        "   126   0             1         7   3   0\n"
        "   127   0             1         7   3   1\n"
        "what is split:\n"
        "  weights: each over fsdp = dp_shard 8 × cp 4 = 32 rank(s), its matrices also over tp 2; 2 copies "
        "(dp_replicate)\n"
        "  batch: 16 windows over dp_replicate 2 × dp_shard 8 = 16 rank(s): 1 each, as 1 microbatch(es) of 1\n"
        "  sequence: 2048 tokens over cp 4: 512 on a rank, in an early and a late chunk of 256; between matrix "
        "products over tp 2: 256 on a rank\n"
        "  vocabulary: 264 rows over tp 2: 132 on a rank at most; gathered for the loss\n"
        "  tokens per step: 16 windows × 2048 = 32,768"
    )


def test_layout_of_one_rank() -> None:
    assert layout(1)[1:] == [
        "  rank  pp  dp_replicate  dp_shard  cp  tp",
        "     0   0             0         0   0   0",
        "what is split:",
        "  weights: each over fsdp = dp_shard 1 × cp 1 = 1 rank(s)",
        "  batch: 8 windows over dp_replicate 1 × dp_shard 1 = 1 rank(s): 8 each, as 1 microbatch(es) of 8",
        "  sequence: 2048 tokens, whole on each rank",
        "  tokens per step: 8 windows × 2048 = 16,384",
    ]


def test_plain_chunks_and_no_sequence_parallelism() -> None:
    context = ("--parallelism.context_parallel_degree=2", "--parallelism.context_parallel_load_balancer=none")
    found = layout(4, *context, "--parallelism.tensor_parallel_degree=2", "--parallelism.no_enable_sequence_parallel")
    assert "  sequence: 2048 tokens over cp 2: 1024 on a rank" in found


def test_many_stages_are_cut_short() -> None:
    model = ("--model.flavor=8B", "--parallelism.pipeline_parallel_schedule=LoopedBFS")
    found = layout(
        8,
        *model,
        "--parallelism.pipeline_parallel_degree=8",
        "--parallelism.pipeline_parallel_layers_per_stage=1",
        "--parallelism.pipeline_parallel_first_stage_less_layers=0",
        "--parallelism.pipeline_parallel_last_stage_less_layers=0",
    )
    stages = found[found.index("pipeline:") + 1 :]
    assert stages[0] == "  LoopedBFS, 32 stages on 8 ranks, 8 microbatch(es) of 1 window(s)"
    assert stages[8:11] == ["  stage 7 on pp 7: layers.7", "  … 16 more", "  stage 24 on pp 0: layers.24"]
    assert len(stages) == 18


def test_ranks_are_where_the_mesh_puts_them() -> None:
    """Rank numbers go through the mesh with its last dimension fastest, as DeviceMesh counts them."""
    import torch

    degrees = {"data_parallel_replicate_degree": 2, "context_parallel_degree": 2, "pipeline_parallel_degree": 2}
    table = layout(16, *(f"--parallelism.{name}={degree}" for name, degree in degrees.items()))[2:18]
    mesh = torch.arange(16).view(2, 2, 2, 2, 1)
    for row in table:
        rank, *place = map(int, row.split())
        assert mesh[tuple(place)] == rank


def test_the_log_starts_with_the_layout_in_short(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROUP_WORLD_SIZE", raising=False)
    config = load_and_check(PIPELINE, 8).config
    lines = describe_run(config, ParallelDims.from_config(config.parallelism, 8), cpu)
    assert "8 process(es) on 1 node(s), cpu (a CPU)" in lines[0]
    assert lines[1:3] == [
        "mesh: pp 2 × dp_replicate 1 × dp_shard 2 × cp 1 × tp 2; batch ranks 2, weights sharded over 2",
        "pipeline: ZBVZeroBubble, 4 stages on 2 ranks, 8 microbatch(es) of 1 window(s)",
    ]
    assert lines[4].startswith(
        "step: 32 windows × 2048 tokens = 65,536 tokens, as 2 rank(s) × 2 microbatch(es) × 8 win"
    )
    config = load_and_check([], 8).config
    lines = describe_run(config, ParallelDims.from_config(config.parallelism, 8), cpu)
    assert not any(line.startswith("pipeline") for line in lines)
