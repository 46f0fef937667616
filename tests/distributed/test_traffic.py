"""Collective traffic of a step, counted, equals the closed forms of docs/parallelisms.md."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tests.distributed.runs import SmallRun
from tests.distributed.test_matrix import ROWS, SEQ_LEN, Layout, random_batch
from tests.distributed.tiny_models import SPEC
from tests.distributed.traffic import Traffic
from tests.distributed.world import Worlds
from titan.models.layers.head import IGNORED

SIZES = SPEC.flavors["deep"]  # of every layout here
LAYERS, DIM, FP32 = SIZES.n_layers, SIZES.dim, 4


def measure(arguments: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    run = SmallRun(*arguments)
    run.step(1, *random_batch(1))  # lets everything be set up that is set up once
    with Traffic() as traffic:
        run.step(2, *random_batch(2))
    return dict(traffic.calls), dict(traffic.bytes)


def groups() -> list[list[torch.Size]]:
    """Shapes of the weights that are gathered together: embedding, each block, norm and head."""
    with torch.device("meta"):
        model = SPEC.build(SIZES)
    modules = [[model.tok_embeddings], *[[block] for block in model.layers.values()], [model.norm, model.output]]
    return [[p.shape for module in group for p in module.parameters()] for group in modules]


def shard_bytes(shapes: list[torch.Size], ranks: int) -> int:
    """A rank's part of some weights, with the padding of those whose rows don't divide."""
    return sum(FP32 * math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes)


def fsdp(ranks: int, microbatches: int) -> dict[str, tuple[int, int]]:
    """Every group is gathered in the forward pass, and again in the backward one, but for the last."""
    shards = [shard_bytes(shapes, ranks) for shapes in groups()]
    gathered = 2 * sum(shards) - shards[-1]
    return {
        "all_gather": (microbatches * (2 * len(shards) - 1), microbatches * gathered),
        "reduce_scatter": (microbatches * len(shards), microbatches * ranks * sum(shards)),
    }


def expect(worlds: Worlds, layout: Layout, expected: Mapping[str, tuple[int, int]], rank: int = 0) -> None:
    calls, size = worlds(layout.ranks).run(measure, layout.arguments)[rank]
    assert calls == {kind: count for kind, (count, _) in expected.items() if count}
    assert size == {kind: total for kind, (count, total) in expected.items() if count}


def test_fsdp(worlds: Worlds) -> None:
    expect(worlds, Layout(special="deep", dp=4), fsdp(4, 1))
    expect(worlds, Layout(special="deep", dp=2, accumulate=2), fsdp(2, 2))


def test_hsdp_sums_over_replicas_once_a_step(worlds: Worlds) -> None:
    shards = [shard_bytes(shapes, 2) for shapes in groups()]
    over_replicas = {"all_reduce": (len(shards), sum(shards))}
    expect(worlds, Layout(special="deep", dp=2, replicate=2), fsdp(2, 1) | over_replicas)
    expect(worlds, Layout(special="deep", dp=2, replicate=2, accumulate=2), fsdp(2, 2) | over_replicas)


def loss_traffic() -> tuple[int, int]:
    """Bytes of three numbers per valid label, and the chunks (of eight, over all rows) that the valid ones fill."""
    valid = int((random_batch(2)[1] != IGNORED).sum())
    return 3 * FP32 * valid, math.ceil(valid / (ROWS * SEQ_LEN / 8))


def test_tensor_and_sequence_parallel(worlds: Worlds) -> None:
    """Two gathers and two reduce-scatters of the stream per layer and direction; one each for embedding and head."""
    for tp in (2, 4):
        stream = FP32 * ROWS * SEQ_LEN * DIM
        exchanges = 2 * (2 * LAYERS + 1)
        norms = 2 * LAYERS + 1  # gradients of the gains, each rank having seen its part of the sequence
        loss, chunks = loss_traffic()
        expect(
            worlds,
            Layout(special="deep", tp=tp),
            {
                "all_gather": (exchanges, exchanges * stream // tp),
                "reduce_scatter": (exchanges, exchanges * stream),
                "all_reduce": (norms + 2 * chunks, norms * FP32 * DIM + loss),
            },
        )


def test_tensor_parallel_without_sequence_parallel(worlds: Worlds) -> None:
    """An all-reduce after each row product forward and before each block's columns backward; embedding; head."""
    stream, (loss, chunks) = FP32 * ROWS * SEQ_LEN * DIM, loss_traffic()
    exchanges = 2 * 2 * LAYERS + 2
    expect(
        worlds,
        Layout(special="deep", tp=2, extra=("no_enable_sequence_parallel",)),
        {"all_reduce": (exchanges + 2 * chunks, exchanges * stream + loss)},
    )


def test_pipeline(worlds: Worlds) -> None:
    """Each microbatch's stream crosses each border once in each direction."""
    microbatch = FP32 * SEQ_LEN * DIM
    crossings = {"send": (ROWS, ROWS * microbatch), "recv": (ROWS, ROWS * microbatch)}
    for rank in (0, 1):
        expect(worlds, Layout(special="deep", pp=2), crossings, rank)
    crossings = {kind: (3 * count, 3 * size) for kind, (count, size) in crossings.items()}
    expect(worlds, Layout(special="deep", pp=2, extra=("pipeline_parallel_schedule=Interleaved1F1B",)), crossings)


def test_context_parallel(worlds: Worlds) -> None:
    """Keys and values of all ranks, and back their gradients; besides, weights are sharded over cp."""
    keys_values = 2 * FP32 * ROWS * SIZES.n_kv_heads * (SEQ_LEN // 2) * SIZES.head_dim
    weights = fsdp(2, 1)
    gathers, scatters = weights["all_gather"], weights["reduce_scatter"]
    expect(
        worlds,
        Layout(special="deep", cp=2),
        {
            "all_gather": (gathers[0] + LAYERS, gathers[1] + LAYERS * keys_values),
            "reduce_scatter": (scatters[0] + LAYERS, scatters[1] + LAYERS * 2 * keys_values),
        },
    )
    hops = 3 * LAYERS  # keys and values forward, the same backward, and their gradients
    expect(
        worlds,
        Layout(special="deep", cp=2, extra=("context_parallel_rotate_method=alltoall",)),
        weights | {"send": (hops, hops * keys_values), "recv": (hops, hops * keys_values)},
    )
