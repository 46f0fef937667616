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
from titan.estimation.excerpt import Excerpt, WatchedActions, choose, one_by_one, play
from titan.estimation.tracer import Tracer
from titan.models.batch import Batch
from titan.parallelisms import pipeline
from titan.parallelisms.pipeline import Pipeline

_STEADY = 3  # microbatches beyond those that fill the pipeline: of these, one is like all that are left out


def planned_microbatches(job: JobConfig, rank: int) -> int:
    """For how many microbatches a schedule must be made so that a rank of it does all that it ever does.

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
        case "Interleaved1F1B" | "InterleavedZeroBubble" if microbatches % ranks == 0:  # in rounds of that many
            return min(microbatches, _STEADY * ranks)
        case "ZBVZeroBubble" | "DualPipeV":  # which are filled by two for each rank
            return min(microbatches, (2 + _STEADY) * ranks)
        case _:
            return microbatches


class Shortened:
    """What of a pipeline is run.

    Attributes:
        total: microbatches of the real pipeline.
        planned: those that the schedule is made for. What is left out is like any in the middle.
        excerpt: of the rank's plan; None where all of it is run.
        actions: that are run; None where a schedule has no list of them.
    """

    def __init__(self, total: int, planned: int) -> None:
        self.total, self.planned = total, planned
        self.excerpt: Excerpt | None = None
        self.actions: WatchedActions | None = None

    @property
    def run(self) -> int:
        """How many microbatches are run."""
        return self.planned if self.excerpt is None else len(self.excerpt.kept)

    def times(self, number: int) -> int:
        """How many microbatches of the real pipeline the one that is run as this number stands for."""
        if self.excerpt is None:
            return 1 + (self.total - self.planned) * (number == 1)
        steady = max(range(self.run), key=self.excerpt.times)
        return self.excerpt.times(number) + (self.total - self.planned) * (number == steady)

    def finish(self, trace: Trace) -> None:
        """Let the trace of what was run say what the whole pipeline does, as far as it is planned.

        Raises:
            ValueError: microbatches aren't alike.
        """
        if self.excerpt is not None:
            play(trace, self.excerpt)
        for messages in trace.messages.values():
            for message in messages:  # which stages send each other as often for each microbatch
                if message.dim == "pp" and message.collective in ("send", "recv"):
                    messages[message] = messages[message] * self.total // self.run


@contextmanager
def shortened(job: JobConfig, layers: int, rank: int, tracer: Tracer, *, whole: bool) -> Iterator[Shortened]:
    """Build pipelines whose stages have no more than so many layers, and which run some of the microbatches.

    A stage has the memory that it receives into for all of them.

    Args:
        rank: of the pipeline.
        whole: run all microbatches that the schedule is made for.
    """
    module: Any = pipeline
    cut, build, number, schedule_of = module.cut, module._Stage, module.pipeline_microbatches, module._build_schedule
    short = Shortened(pipeline_microbatches(job), planned_microbatches(job, rank))
    stages = model_stages(job)
    names = set() if stages is None else set(stages.layers)

    def shorter(model: nn.Module, kept: Sequence[str]) -> nn.Module:
        held = [name for name in kept if name in names]
        return cast(nn.Module, cut(model, [name for name in kept if name not in held[layers:]]))

    def excerpted(*args: Any) -> Any:
        schedule = schedule_of(*args)
        if isinstance(schedule, schedules._PipelineScheduleRuntime):
            plan = one_by_one(schedule.pipeline_order_with_comms[schedule.rank])
            if not whole:
                short.excerpt = choose(plan)
                plan, schedule._n_microbatches = short.excerpt.actions, short.run
            short.actions = WatchedActions(plan, tracer)
            schedule.pipeline_order_with_comms[schedule.rank] = short.actions
        return schedule

    class Stage(build):  # type: ignore[valid-type,misc]
        def _prepare_forward_infra(self, _: int, *args: Any, **kwargs: Any) -> Any:
            return super()._prepare_forward_infra(short.total, *args, **kwargs)

        def _prepare_backward_infra(self, _: int, *args: Any, **kwargs: Any) -> Any:
            return super()._prepare_backward_infra(short.total, *args, **kwargs)

        def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
            with tracer.counted(short.times(chunk)):
                return super().forward_one_chunk(chunk, *args, **kwargs)

        def backward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
            with tracer.counted(short.times(chunk)):
                return super().backward_one_chunk(chunk, *args, **kwargs)

        def backward_weight_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
            with tracer.counted(short.times(chunk)):
                return super().backward_weight_one_chunk(chunk, *args, **kwargs)

    module.cut, module._Stage, module._build_schedule = shorter, Stage, excerpted
    module.pipeline_microbatches = lambda _: short.planned
    try:
        yield short
    finally:
        module.cut, module._Stage, module._build_schedule = cut, build, schedule_of
        module.pipeline_microbatches = number


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
def holding_what_is_sent(job: JobConfig, short: Shortened) -> Iterator[None]:
    """Let transfers between stages hold their tensors, as those of real process groups do.

    What is sent of microbatches that aren't planned is held beside that of the first one: at the step's peak, when most
    has been sent, all of it is there.
    """
    exchange = schedules._batch_p2p
    if job.estimation.compat is not None:  # torch's schedules of then waited after each action
        yield
        return

    def hold(tensor: torch.Tensor) -> _Sending:
        first = short.actions is not None and short.actions.current == 0
        if not first or short.planned == short.total:
            return _Sending(tensor)
        return _Sending(tensor, tensor.new_empty(short.total - short.planned, *tensor.shape))

    def exchanged(operations: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
        works = exchange(operations, desc)
        return works + [hold(operation.tensor) for operation in operations if operation.op is dist.isend]

    schedules._batch_p2p = exchanged  # type: ignore[assignment]
    try:
        yield
    finally:
        schedules._batch_p2p = exchange
