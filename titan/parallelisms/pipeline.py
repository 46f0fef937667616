"""Pipeline parallelism: a model cut into stages, run by torch's schedules.

Schedules: GPipe (arXiv 1811.06965), 1F1B (arXiv 1806.03377), interleaved 1F1B (arXiv 2104.04473), breadth-first
(arXiv 2211.05953), zero bubble and ZB-V (arXiv 2401.10241), DualPipe-V (arXiv 2412.19437). What each asks of a layout
is in schedules.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.utils.checkpoint import GraphExecGroup

from titan.config.derived import pipeline_microbatches
from titan.config.job_config import JobConfig, Parallelism
from titan.models.batch import Batch
from titan.models.spec import Sizes, Stages
from titan.observability.regions import region
from titan.parallelisms.parallel_dims import ParallelDims
from titan.parallelisms.schedules import SCHEDULES, split, stages_of_rank


def cut(model: nn.Module, kept: Sequence[str]) -> nn.Module:
    """A copy of a model on meta with only some of its modules; the names of what is left don't change.

    Args:
        kept: names such as "tok_embeddings" or "layers.3". Top-level modules that hold no weights are always kept.
    """
    part = copy.deepcopy(model)
    for name, child in list(part.named_children()):
        if isinstance(child, nn.ModuleDict):
            for key in list(child):
                if f"{name}.{key}" not in kept:
                    del child[key]
        elif name not in kept and next(child.parameters(), None) is not None:
            setattr(part, name, None)
    return part


class _Stage(PipelineStage):
    """What it does bears its name in traces: `stage 1 forward microbatch 0`.

    Where gradients of weights are a pass of their own, it computes a checkpointed block again once for all of them.
    Torch asks for one weight's gradient after the other, which by itself would compute the block again for each.
    """

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with region(f"stage {self.stage_index} forward microbatch {fwd_chunk_id}"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with region(f"stage {self.stage_index} backward microbatch {bwd_chunk_id}"):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with region(f"stage {self.stage_index} weights microbatch {bwd_chunk_id}"), GraphExecGroup():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


class Pipeline:
    """This rank's stages of a model and the schedule that runs them."""

    def __init__(
        self,
        model: nn.Module,
        modules: Stages,
        sizes: Sizes,
        dims: ParallelDims,
        config: JobConfig,
        *,
        device: torch.device,
        parallelize: Callable[[nn.Module], None],
    ) -> None:
        """
        Args:
            model: the whole model, on meta; it is copied, not changed.
            modules: how it may be cut.
            parallelize: spreads a stage over the ranks of the other dimensions, in place.
        """
        settings = config.parallelism
        names = split(settings, modules)
        last = len(names) - 1
        v_shaped = SCHEDULES[settings.pipeline_parallel_schedule].v_shaped
        numbers = stages_of_rank(dims.world.get_local_rank("pp"), dims.pp, len(names), v_shaped)
        tokens, stream, loss = _microbatch_shapes(sizes, dims, config)
        group = dims.world.get_group("pp")
        self.parts: list[nn.Module] = []
        stages: list[PipelineStage] = []
        for number in numbers:
            part = cut(model, names[number])
            parallelize(part)
            self.parts.append(part)
            stages.append(
                _Stage(
                    part,
                    number,
                    len(names),
                    device,
                    # With shapes given, torch needn't run a batch to find them.
                    input_args=tokens if number == 0 else stream,
                    output_args=loss if number == last else stream,
                    group=group,
                )
            )
        self._numbers, self._end = numbers, last
        self._owners = {
            number: dist.get_global_rank(group, rank)
            for rank in range(dims.pp)
            for number in stages_of_rank(rank, dims.pp, len(names), v_shaped)
        }
        self._group = group
        self._stream, self._seq_len = stream, tokens.shape[1]
        self._rows = settings.pipeline_parallel_microbatch_size
        self._first, self._last = 0 in numbers, last in numbers
        self._valid_tokens = 1  # of the step under way
        self._schedule = _build_schedule(settings, stages, pipeline_microbatches(config), self._loss)

    def _loss(self, loss_sum: torch.Tensor, _: object) -> torch.Tensor:
        """Of a microbatch. The labels went through the last stage already."""
        return loss_sum / self._valid_tokens

    def forward_backward(self, batch: Batch, valid_tokens: int, last: bool) -> torch.Tensor:
        """Add the gradients of the loss over a batch, which is run in microbatches, and sum them over ranks.

        Args:
            valid_tokens: what the sum over this batch's labels is divided by.
            last: whether the optimizer's step comes next; a schedule reduces its gradients in any case.

        Returns:
            The sum of the microbatches' losses where the last stage is, zero on the other ranks.
        """
        self._valid_tokens = valid_tokens
        losses: list[torch.Tensor] = []
        inputs = (batch.tokens,) if self._first else ()
        self._schedule.step(
            *inputs,
            **batch.keywords,
            target=batch.labels.tensor if self._last else None,
            losses=losses if self._last else None,
            return_outputs=False,
        )
        if not losses:
            return torch.zeros((), device=batch.tokens.device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """The sum of the losses of a batch, without gradients, where the last stage is; zero elsewhere.

        The schedules take batches of one shape only, so the microbatches go from stage to stage by hand: one after the
        other through all stages, in the same order on every rank.
        """
        total = torch.zeros((), device=batch.tokens.device)
        for start in range(0, len(batch.tokens), self._rows):
            part = batch.rows(slice(start, start + self._rows))
            stream = part.tokens
            for number, module in zip(self._numbers, self.parts, strict=True):
                if number > 0 and self._owners[number - 1] != dist.get_rank():
                    stream = self._received(part.tokens, self._owners[number - 1])
                stream = module(stream, **part.keywords)
                if number == self._end:
                    total += stream
                elif self._owners[number + 1] != dist.get_rank():
                    dist.send(stream.contiguous(), self._owners[number + 1], group=self._group)
        return total

    def _received(self, tokens: torch.Tensor, source: int) -> torch.Tensor:
        """The stream of these tokens `[B, S]`, or this rank's part of it, from another rank's stage."""
        length = tokens.shape[1] * self._stream.shape[1] // self._seq_len
        stream = torch.empty(len(tokens), length, self._stream.shape[2], dtype=self._stream.dtype, device=tokens.device)
        dist.recv(stream, source, group=self._group)
        return stream


def _microbatch_shapes(
    sizes: Sizes, dims: ParallelDims, config: JobConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, stream and loss of a microbatch as one rank has them, on meta."""
    settings = config.parallelism
    rows, seq_len = settings.pipeline_parallel_microbatch_size, config.training.seq_len // dims.cp
    stream_len = seq_len
    if dims.tp > 1 and settings.enable_sequence_parallel:
        stream_len //= dims.tp
    dtype = getattr(torch, config.training.mixed_precision_param)
    return (
        torch.empty(rows, seq_len, dtype=torch.int64, device="meta"),
        torch.empty(rows, stream_len, sizes.dim, dtype=dtype, device="meta", requires_grad=True),
        torch.empty((), device="meta", requires_grad=True),
    )


def _build_schedule(
    settings: Parallelism,
    stages: list[PipelineStage],
    microbatches: int,
    loss: Callable[[torch.Tensor, object], torch.Tensor],
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    # scale_grads: the loss is divided by the global number of tokens already.
    if settings.pipeline_parallel_schedule_csv is not None:
        schedule = _PipelineScheduleRuntime(stages, microbatches, loss_fn=loss, scale_grads=False)
        schedule._load_csv(settings.pipeline_parallel_schedule_csv)
        return schedule
    kind = get_schedule_class(settings.pipeline_parallel_schedule)
    if issubclass(kind, PipelineScheduleSingle):
        return kind(stages[0], microbatches, loss_fn=loss, scale_grads=False)
    return kind(stages, microbatches, loss_fn=loss, scale_grads=False)
