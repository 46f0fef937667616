"""Five traced layers, the middle one repeated, give what tracing all layers gives, to the byte."""

from __future__ import annotations

import pytest

import tests.distributed.tiny_models  # noqa: F401  (registers the tokenizer)
from tests.estimation.traced_models import ARGUMENTS
from titan.config.loader import load_and_check
from titan.estimation.events import Allocation, Free, Place, Trace
from titan.estimation.replay import replay
from titan.estimation.trace import trace_layout

LAYOUTS = {
    "fsdp": (4, []),
    "tp2": (2, ["parallelism.tensor_parallel_degree=2"]),
    "cp2": (2, ["parallelism.context_parallel_degree=2"]),
    "every second layer": (2, ["activation_checkpoint.selective_ac_option=2"]),
}
SWEEP = {
    "fsdp2 tp2": (4, ["parallelism.tensor_parallel_degree=2"]),
    "compiled": (2, ["compile.enable=true"]),
    "every third of eleven layers": (
        2,
        ["activation_checkpoint.selective_ac_option=3", "model.flavor=eleven", "training.seq_len=64"],
    ),
    "pp2": (
        2,
        [
            "parallelism.pipeline_parallel_degree=2",
            "parallelism.pipeline_parallel_schedule=1F1B",
            "model.flavor=sixteen",
            "training.seq_len=64",
        ],
    ),
    "hsdp accumulating": (4, ["parallelism.data_parallel_replicate_degree=2", "training.global_batch_size=24"]),
    **{f"checkpointing {mode}": (2, [f"activation_checkpoint.mode={mode}"]) for mode in ("none", "full")},
    "whole logits": (2, ["loss.name=cross_entropy"]),
    "foreach": (2, ["optimizer.implementation=foreach"]),
    "for-loop": (2, ["optimizer.implementation=for-loop"]),
    "in backward": (2, ["optimizer.early_step_in_backward=true", "training.max_norm=0"]),
    "muon": (2, ["optimizer.name=Muon"]),
    "one process": (1, []),
    "replicas": (4, ["parallelism.data_parallel_replicate_degree=4"]),
    "no sequence parallelism": (
        2,
        ["parallelism.tensor_parallel_degree=2", "parallelism.enable_sequence_parallel=false"],
    ),
    **{
        f"compiled, checkpointing {mode}": (
            4,
            ["compile.enable=true", "parallelism.tensor_parallel_degree=2", f"activation_checkpoint.mode={mode}"],
        )
        for mode in ("none", "full")
    },
    "interleaved": (
        2,
        ["parallelism.pipeline_parallel_degree=2", "parallelism.pipeline_parallel_schedule=Interleaved1F1B"],
    ),
    "all dimensions": (
        8,
        ["parallelism.tensor_parallel_degree=2", "parallelism.context_parallel_degree=2"],
    ),
}


def compare(ranks: int, settings: list[str]) -> None:
    job = load_and_check([*ARGUMENTS, *(f"--{setting}" for setting in settings)], ranks).config
    assert trace_layout(job, ranks) == trace_layout(job, ranks, replayed=False)


@pytest.mark.parametrize(
    "name", [name if name in ("fsdp", "cp2") else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_replay_equals_the_whole_trace(name: str) -> None:
    compare(*LAYOUTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEP)
def test_replay_equals_the_whole_trace_in_more_layouts(name: str) -> None:
    compare(*SWEEP[name])


def toy(*, odd: bool = False) -> Trace:
    """Layers that each make 100 bytes in the forward pass, and free those of the next layer in the backward pass."""
    trace = Trace()
    for layer in range(5):
        size = 101 if odd and layer == 3 else 100
        trace.events.append(Allocation(layer, size, 0, Place("forward", layer), layer, "op"))
        trace.flops[layer] = 10**layer
    for layer in reversed(range(5)):
        place = Place("backward", layer, 1)
        if layer < 4:
            trace.events.append(Free(layer + 1, place, layer))
    trace.events.append(Free(0, Place("optimizer", None), 0))
    return trace


def test_what_the_next_layer_made_is_freed() -> None:
    trace = replay(toy(), 7)
    made = {event.object: event.unit for event in trace.events if isinstance(event, Allocation)}
    assert list(made.values()) == [0, 1, 2, 3, 4, 5, 6]
    freed = [(event.unit, made[event.object]) for event in trace.events if isinstance(event, Free)]
    assert freed == [(5, 6), (4, 5), (3, 4), (2, 3), (1, 2), (0, 1), (0, 0)]
    assert sum(trace.flops.values()) == 1 + 10 + 3 * 100 + 1000 + 10000


def test_layers_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="aren't alike"):
        replay(toy(odd=True), 7)
