"""A pipeline with fewer layers and fewer microbatches, which stand for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import schedules

from titan.config.derived import model_stages, pipeline_microbatches
from titan.config.job_config import JobConfig
from titan.estimation.events import Trace
from titan.estimation.tracer import Tracer
from titan.models.batch import Batch
from titan.parallelisms import pipeline
from titan.parallelisms.pipeline import Pipeline

_STEADY = 3  # microbatches beyond those that fill the pipeline: of these, one is like all that are left out


def traced_microbatches(job: JobConfig, rank: int) -> int:
    """How many microbatches a rank of the pipeline must run to have done all that it ever does.

    The first ones fill the pipeline; from then on each backward pass makes room for a forward pass. Schedules that go
    through all forward passes first need all microbatches.
    """
    settings, microbatches = job.parallelism, pipeline_microbatches(job)
    ranks = settings.pipeline_parallel_degree
    if settings.pipeline_parallel_schedule_csv is not None:
        return microbatches
    match settings.pipeline_parallel_schedule:
        case "1F1B":  # which takes as many as there are ranks, or more
            return min(microbatches, max(ranks, ranks - rank + _STEADY))
        case "Interleaved1F1B" if microbatches % ranks == 0:  # in rounds of as many as there are ranks
            return min(microbatches, _STEADY * ranks)
        case _:
            return microbatches


@contextmanager
def shortened(job: JobConfig, layers: int, microbatches: int, tracer: Tracer) -> Iterator[None]:
    """Build pipelines whose stages have no more than some of their layers, and which run some of the microbatches.

    A stage has the memory that it receives into for all of them. What the second one computes and sends is counted for
    all that are left out, but for what goes from stage to stage (`count_all_sent`).
    """
    module: Any = pipeline
    cut, build, number = module.cut, module._Stage, module.pipeline_microbatches
    stages, total = model_stages(job), pipeline_microbatches(job)
    names = set() if stages is None else set(stages.layers)

    def shorter(model: nn.Module, kept: Sequence[str]) -> nn.Module:
        whole = [name for name in kept if name in names]
        return cast(nn.Module, cut(model, [name for name in kept if name not in whole[layers:]]))

    class Stage(build):  # type: ignore[valid-type,misc]
        def _prepare_forward_infra(self, _: int, *args: Any, **kwargs: Any) -> Any:
            return super()._prepare_forward_infra(total, *args, **kwargs)

        def _prepare_backward_infra(self, _: int, *args: Any, **kwargs: Any) -> Any:
            return super()._prepare_backward_infra(total, *args, **kwargs)

        def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
            with tracer.counted(1 + (total - microbatches) * (chunk == 1)):
                return super().forward_one_chunk(chunk, *args, **kwargs)

        def backward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
            with tracer.counted(1 + (total - microbatches) * (chunk == 1)):
                return super().backward_one_chunk(chunk, *args, **kwargs)

    module.cut, module._Stage, module.pipeline_microbatches = shorter, Stage, lambda _: microbatches
    try:
        yield
    finally:
        module.cut, module._Stage, module.pipeline_microbatches = cut, build, number


def run_each_stage(stages: Pipeline, batch: Batch) -> None:
    """Take a microbatch forward and backward through each stage by itself: it is compiled then, and has gradients."""
    for part, number in zip(stages.parts, stages._numbers, strict=True):
        stream = stages._stream
        incoming = torch.empty(stream.shape, dtype=stream.dtype, device=batch.tokens.device, requires_grad=True)
        out = part(incoming if number > 0 else batch.tokens, **batch.keywords)
        out.backward(torch.empty_like(out))


class _Sending(dist.Work):
    """A tensor on its way. The transfer holds it until it is waited for, which most schedules do at their end."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, *_: Any) -> bool:
        """It has arrived."""
        self._tensors = ()
        return True


@contextmanager
def holding_what_is_sent(job: JobConfig, microbatches: int) -> Iterator[None]:
    """Let transfers between stages hold their tensors, as those of real process groups do.

    Args:
        microbatches: that are run. What is sent of those that are left out is held as well.
    """
    exchange, total = schedules._batch_p2p, pipeline_microbatches(job)
    if job.estimation.compat is not None:  # torch's schedules of then waited after each action
        yield
        return
    waits_soon = job.parallelism.pipeline_parallel_schedule in ("GPipe", "1F1B")

    def hold(tensor: torch.Tensor) -> _Sending:
        if waits_soon or microbatches == total:
            return _Sending(tensor)
        left_out = tensor.numel() * (total - microbatches) // microbatches
        return _Sending(tensor, torch.empty(left_out, dtype=tensor.dtype, device=tensor.device))

    def exchanged(operations: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
        works = exchange(operations, desc)
        return works + [hold(operation.tensor) for operation in operations if operation.op is dist.isend]

    schedules._batch_p2p = exchanged  # type: ignore[assignment]
    try:
        yield
    finally:
        schedules._batch_p2p = exchange


def count_all_sent(trace: Trace, microbatches: int, total: int) -> None:
    """Stages send each other as much for each of all microbatches as for each of those that were run."""
    for messages in trace.messages.values():
        for message in messages:
            if message.dim == "pp" and message.collective in ("send", "recv"):
                messages[message] = messages[message] * total // microbatches
