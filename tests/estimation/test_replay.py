"""Five traced layers, the middle one repeated, give what tracing all layers gives, to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import tests.distributed.tiny_models  # noqa: F401  (registers the tokenizer)
from tests.estimation.traced_models import ARGUMENTS
from titan.config.derived import pipeline_microbatches
from titan.config.job_config import JobConfig
from titan.config.loader import load_and_check, load_and_check_plan
from titan.estimation import dry_pipeline, trace
from titan.estimation.estimate import RankEstimate
from titan.estimation.events import Allocation, Free, Place, Trace
from titan.estimation.excerpt import Excerpt
from titan.estimation.hardware import find_hardware
from titan.estimation.replay import replay
from titan.estimation.trace import trace_layout

LAYOUTS = {
    "fsdp": (4, []),
    "tp2": (2, ["parallelism.tensor_parallel_degree=2"]),
    "cp2": (2, ["parallelism.context_parallel_degree=2"]),
    "every second layer": (2, ["activation_checkpoint.selective_ac_option=2"]),
}
SWEEP = {
    "float8": (2, ["float8.enable_float8_linear=true", "float8.enable_fsdp_float8_all_gather=true"]),
    "float8 compiled": (
        2,
        [
            "compile.enable=true",
            "float8.enable_float8_linear=true",
            "float8.enable_fsdp_float8_all_gather=true",
        ],
    ),
    "float8 tp2": (4, ["float8.enable_float8_linear=true", "parallelism.tensor_parallel_degree=2"]),
    **{
        f"ring, compile {compiled}": (
            2,
            [
                f"compile.enable={compiled}",
                "parallelism.context_parallel_degree=2",
                "parallelism.context_parallel_rotate_method=alltoall",
            ],
        )
        for compiled in ("false", "true")
    },
    "weights on the host": (2, ["training.enable_cpu_offload=true"]),
    "weights on the host, float8": (
        2,
        [
            "training.enable_cpu_offload=true",
            "float8.enable_float8_linear=true",
            "float8.enable_fsdp_float8_all_gather=true",
        ],
    ),
    "activations on the host": (2, ["activation_checkpoint.offload=true"]),
    "activations on the host, full, compiled": (
        2,
        ["activation_checkpoint.offload=true", "activation_checkpoint.mode=full", "compile.enable=true"],
    ),
    "documents": (2, ["model.attn_mask=document"]),
    "documents compiled": (2, ["model.attn_mask=document", "compile.enable=true"]),
    "documents cp2": (2, ["model.attn_mask=document", "parallelism.context_parallel_degree=2"]),
    "documents varlen": (2, ["model.attn_mask=document", "model.attn_backend=varlen"]),
    "fp32 cp2": (2, ["parallelism.context_parallel_degree=2", "training.mixed_precision_param=float32"]),
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
    "interleaved, stages of more layers": (
        2,
        [
            "parallelism.pipeline_parallel_degree=2",
            "parallelism.pipeline_parallel_schedule=Interleaved1F1B",
            "model.flavor=twenty-six",
            "training.seq_len=64",
        ],
    ),
    "all dimensions": (
        8,
        ["parallelism.tensor_parallel_degree=2", "parallelism.context_parallel_degree=2"],
    ),
}


def planned(ranks: int, settings: list[str]) -> JobConfig:
    arguments = [*ARGUMENTS, *(f"--{setting}" for setting in settings), f"--estimation.gpus={ranks}"]
    return load_and_check_plan(arguments, 1, lambda name: find_hardware(name).machine)[0].config


def figures(rank: RankEstimate) -> tuple[object, ...]:
    """Of an estimate all but what is alive for what away from the peak."""
    bytes_over_step = [(moment.at, moment.active_bytes, moment.reserved_bytes) for moment in rank.moments]
    return replace(rank, moments=()), bytes_over_step


def compare(ranks: int, settings: list[str]) -> None:
    job = planned(ranks, settings)
    assert trace_layout(job, ranks) == trace_layout(job, ranks, replayed=False)


@pytest.mark.parametrize(
    "name", [name if name == "fsdp" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_replay_equals_the_whole_trace(name: str) -> None:
    compare(*LAYOUTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEP)
def test_replay_equals_the_whole_trace_in_more_layouts(name: str) -> None:
    compare(*SWEEP[name])


TWELVE = [
    "parallelism.pipeline_parallel_degree=2",
    "training.local_batch_size=12",
    "training.seq_len=64",
]
EXCERPTS = {
    **{
        schedule: (4, [*TWELVE, f"parallelism.pipeline_parallel_schedule={schedule}"])
        for schedule in ("Interleaved1F1B", "LoopedBFS")
    },
    # Weights of no more than three stages stay gathered at a time.
    **{
        f"{schedule} of four stages": (
            2,
            [
                *TWELVE,
                f"parallelism.pipeline_parallel_schedule={schedule}",
                "parallelism.pipeline_parallel_layers_per_stage=1",
                "parallelism.pipeline_parallel_first_stage_less_layers=0",
                "parallelism.pipeline_parallel_last_stage_less_layers=0",
                *more,
            ],
        )
        for schedule, more in (("Interleaved1F1B", ["compile.enable=true"]), ("LoopedBFS", []))
    },
    "freed after each use": (
        4,
        [
            *TWELVE,
            "parallelism.pipeline_parallel_schedule=Interleaved1F1B",
            "parallelism.fsdp_reshard_after_forward=always",
        ],
    ),
    "accumulating": (
        4,
        [*TWELVE, "parallelism.pipeline_parallel_schedule=LoopedBFS", "training.global_batch_size=96"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXCERPTS)
def test_an_excerpt_of_a_schedule_equals_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of twelve microbatches are run, and give what running all of them gives."""
    monkeypatch.setattr(dry_pipeline, "planned_microbatches", lambda job, rank: pipeline_microbatches(job))
    run: list[int] = []
    choose = dry_pipeline.choose

    def chosen(plan: Sequence[Any]) -> Excerpt:
        excerpt = choose(plan)
        run.append(len(excerpt.kept))
        return excerpt

    monkeypatch.setattr(dry_pipeline, "choose", chosen)
    replayed: list[bool] = []
    estimate = trace._estimate

    def estimated(*args: Any, **kwargs: Any) -> RankEstimate:
        replayed.append(kwargs["replayed"])
        return estimate(*args, **kwargs)

    monkeypatch.setattr(trace, "_estimate", estimated)
    job = planned(*EXCERPTS[name])
    ranks = EXCERPTS[name][0]
    some, whole = trace_layout(job, ranks), trace_layout(job, ranks, replayed=False)
    assert [figures(rank) for rank in some] == [figures(rank) for rank in whole]
    assert run and max(run) < 12
    assert replayed.count(True) == replayed.count(False)  # nothing had to be traced as a whole


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_some_microbatches_stand_for_all(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["--parallelism.pipeline_parallel_degree=2", f"--parallelism.pipeline_parallel_schedule={schedule}"]
    job = load_and_check([*ARGUMENTS, *settings, "--training.seq_len=64", "--training.local_batch_size=12"], 4).config
    expected = {"1F1B": [5, 4], "Interleaved1F1B": [6, 6], "ZBVZeroBubble": [10, 10]}
    assert [dry_pipeline.planned_microbatches(job, rank) for rank in range(2)] == expected[schedule]
    some = trace_layout(job, 4)
    monkeypatch.setattr(dry_pipeline, "planned_microbatches", lambda job, rank: pipeline_microbatches(job))
    for few, whole in zip(some, trace_layout(job, 4), strict=True):
        assert (few.hardware_flops, few.traffic) == (whole.hardware_flops, whole.traffic)
        assert few.peak_reserved_bytes == whole.peak_reserved_bytes
        losses = 7 * 2 * 512  # the last stage keeps a number for each microbatch
        assert whole.peak_active_bytes - few.peak_active_bytes <= losses


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
