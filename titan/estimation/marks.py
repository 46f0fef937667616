"""Tells a tracer where in the step it is: its phases, and the layers that they go through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from titan.config.derived import model_stages
from titan.config.job_config import JobConfig
from titan.estimation.tracer import Tracer
from titan.models.batch import Batch
from titan.models.layers.head import Head
from titan.training.gradients import local_part
from titan.training.step import Stages

MICROBATCHES = 3  # traced at most: the first, which finds no gradients, one like all others, and the last


def number_layers(parts: Sequence[nn.Module], job: JobConfig, layers: int, period: int) -> dict[nn.Module, int]:
    """The unit of each layer of a rank's stages. What doesn't fill a unit belongs to the last one.

    Args:
        layers: that are traced.
        period: layers of a unit.
    """
    if (stages := model_stages(job)) is None:
        return {}
    names = set(stages.layers)
    held = [module for part in parts for name, module in part.named_modules() if name in names]
    last = max(0, layers // period - 1)
    return {module: min(last, number // period) for number, module in enumerate(held)}


def mark(part: nn.Module, numbering: dict[nn.Module, int], tracer: Tracer) -> None:
    """Let the tracer know when a layer's forward and backward passes begin, and when the layers' end."""
    blocks = [(module, numbering[module]) for module in part.modules() if module in numbering]
    has_head = any(isinstance(module, Head) for module in part.modules())
    for number, (block, unit) in enumerate(blocks):
        after = None if number + 1 < len(blocks) else "loss" if has_head else "forward"
        _mark_block(block, unit, tracer, first=number == 0, after=after)


def _mark_block(block: nn.Module, unit: int, tracer: Tracer, *, first: bool, after: str | None) -> None:
    inner: Callable[..., torch.Tensor] = block.forward

    def forward(stream: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        tracer.enter("forward", unit)
        if first and stream.requires_grad:
            stream.register_hook(lambda _: tracer.enter("backward", None))
        out = inner(stream, *args, **kwargs)
        out.register_hook(lambda _: tracer.enter("backward", unit))
        if after is not None:
            tracer.enter(after, None)
        return out

    block.forward = forward


class MarkedStages:
    """Stages that tell the tracer of their phases."""

    def __init__(self, stages: Stages, tracer: Tracer, rows: int | None) -> None:
        """
        Args:
            rows: of each batch that are run; None for all.
        """
        self.parts, self._stages, self._tracer, self._rows = stages.parts, stages, tracer, slice(rows)
        self.start(1)

    def start(self, microbatches: int) -> None:
        """A step of this many microbatches begins, of which fewer may be run."""
        self._done, self.total = 0, microbatches

    def forward_backward(self, batch: Batch, valid_tokens: int, last: bool) -> torch.Tensor:
        """See `titan.training.step.Stages`."""
        self._done += 1
        times = self.total - MICROBATCHES + 1 if self._done == 2 and self.total > MICROBATCHES else 1
        self._tracer.enter("forward", None)
        with self._tracer.counted(times):
            loss = self._stages.forward_backward(batch.rows(self._rows), valid_tokens, last)
        self._tracer.enter("optimizer", None)
        for part in self.parts if last else []:
            for parameter in part.parameters():
                if parameter.grad is not None:
                    self._tracer.know(local_part(parameter.grad), "gradients")
        return loss

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """See `titan.training.step.Stages`."""
        return self._stages.evaluate(batch)


def units_of_parameters(parts: Sequence[nn.Module], numbering: dict[nn.Module, int]) -> dict[nn.Parameter, int | None]:
    """The unit of layers of each parameter; None outside of layers."""
    units: dict[nn.Parameter, int | None] = {parameter: None for part in parts for parameter in part.parameters()}
    for block, unit in numbering.items():
        units |= dict.fromkeys(block.parameters(), unit)
    return units
