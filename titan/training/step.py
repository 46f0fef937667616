"""One optimizer step: microbatches → gradients of one exact loss → clip → update."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from titan.config.derived import model_sizes
from titan.config.errors import UserError
from titan.config.job_config import JobConfig
from titan.data.microbatch import Microbatch
from titan.models.batch import Batch
from titan.models.layers.head import IGNORED, Labels
from titan.models.spec import model_families
from titan.observability.logging import logger
from titan.observability.regions import region
from titan.parallelisms.context import SequenceShards
from titan.parallelisms.float8 import precompute_scales, precomputes_scales, refuse_unconverted
from titan.parallelisms.fsdp import reduce_over_replicas
from titan.parallelisms.parallel_dims import ParallelDims
from titan.training.gradients import clip_gradients, gradient_norm
from titan.training.initialize import set_weight_dtype
from titan.training.layer_norms import LayerNorms
from titan.training.loss import set_loss
from titan.training.optimizer import Optimizer, OptimizerInBackward


class TrainingDiverged(UserError):
    """The loss or the gradient is not finite, and the config says to stop. Nothing of such a step may be saved."""


@dataclass(frozen=True)
class StepOutcome:
    """Numbers of one step, the same on every rank.

    Attributes:
        loss: mean of −log p over all valid labels of the global batch, in nats.
        grad_norm: 2-norm of its gradient over the whole model, before clipping.
        updated: False when the step was left out because a number wasn't finite.
        layer_norms: by name, of `LayerNorms`, where they were asked for.
        synced: this rank's `time.perf_counter` when it had the numbers, which took all ranks.
    """

    loss: float
    grad_norm: float
    updated: bool
    layer_norms: Mapping[str, float] = field(default_factory=dict)
    synced: float = field(default=0.0, compare=False)


class Agreement(NamedTuple):
    """What all ranks know before a step, the same on each.

    Attributes:
        valid_tokens: valid labels of the global batch.
        data_ended: some rank's data has ended, so that nobody can go on.
        stop: some rank was asked to end.
    """

    valid_tokens: int
    data_ended: bool
    stop: bool


def agree_on_step(microbatches: Sequence[Microbatch] | None, ranks_per_row: int, *, stop: bool) -> Agreement:
    """Sum over all ranks of the job, in one message. Collective, of all of them.

    Summed as int64 on the CPU, so that the accelerator's queue needn't be drained to know the number.

    Args:
        microbatches: this rank's part of the step, whole rows; None at the end of its data.
        ranks_per_row: how many ranks hold the same rows (those that differ only in tp, cp or pp), and count them.
        stop: whether this rank was asked to end.
    """
    valid = sum(int((batch.labels != IGNORED).sum()) for batch in microbatches or [])
    sums = torch.tensor([valid, microbatches is None, stop], dtype=torch.int64)
    dist.all_reduce(sums)
    counted, ended, stops = sums.tolist()
    return Agreement(counted // ranks_per_row, ended > 0, stops > 0)


class Stages(Protocol):
    """What runs a batch forward and backward: a whole model, or a pipeline's share of one.

    Attributes:
        parts: the modules whose parameters this rank trains.
    """

    parts: list[nn.Module]

    def forward_backward(self, batch: Batch, valid_tokens: int, last: bool) -> torch.Tensor:
        """Add the gradients of the loss over a batch.

        Args:
            valid_tokens: what the sum over this batch's labels is divided by.
            last: the optimizer's step comes next, so gradients must be reduced over all ranks.

        Returns:
            The loss, a scalar; zero on ranks that don't see it.
        """

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """The sum of the losses of a batch, without gradients; zero on ranks that don't see it."""


class Share:
    """This rank's part of the sequences of its rows, on the device."""

    def __init__(self, config: JobConfig, dims: ParallelDims, device: torch.device) -> None:
        self._device = device
        self._numbered = dims.pp > 1  # later stages see no tokens to count
        self._shards = None
        if dims.cp > 1:
            balanced = config.parallelism.context_parallel_load_balancer == "headtail"
            self._shards = SequenceShards(dims.world.get_local_rank("cp"), dims.cp, balanced)

    def __call__(self, batch: Microbatch) -> Batch:
        rows, seq_len = batch.tokens.shape
        positions = batch.positions
        if positions is None and (self._shards is not None or self._numbered):
            positions = torch.arange(seq_len).expand(rows, -1)
        return Batch(
            self._moved(batch.tokens),
            Labels(batch.labels if self._shards is None else self._shards.take(batch.labels)),
            None if positions is None else self._moved(positions),
            None if batch.documents is None else self._moved(batch.documents),
        )

    def _moved(self, x: torch.Tensor) -> torch.Tensor:
        part = x if self._shards is None else self._shards.take(x)
        return part.to(self._device, non_blocking=True)


class WholeModel:
    """A model that isn't cut into stages."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = [model]

    def forward_backward(self, batch: Batch, valid_tokens: int, last: bool) -> torch.Tensor:
        """See `Stages`."""
        model = self.parts[0]
        reduce_over_replicas(model, enabled=last)
        with region("forward"):
            loss = model(batch.tokens, **batch.keywords) / valid_tokens
        with region("backward"):
            loss.backward()
        return loss.detach()

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """See `Stages`."""
        loss: torch.Tensor = self.parts[0](batch.tokens, **batch.keywords)
        return loss


def build_model(config: JobConfig, sizes: Any = None) -> nn.Module:
    """The model of a config on the meta device, its weights of training.dtype.

    Args:
        sizes: others than the config's.
    """
    with torch.device("meta"):
        model = model_families()[config.model.name].build(sizes or model_sizes(config))
    set_weight_dtype(model, getattr(torch, config.training.dtype))
    return model


def count_parameters(config: JobConfig) -> int:
    """Of the whole model; a tied weight counts once."""
    return sum(parameter.numel() for parameter in build_model(config).parameters())


def build_stages(model: nn.Module, config: JobConfig, dims: ParallelDims, device: torch.device) -> Stages:
    """Spread a model of `build_model` over the ranks, before its weights have memory."""
    family = model_families()[config.model.name]
    if dims.pp > 1:
        assert family.pipeline is not None  # config/checks_pipeline.py
        return family.pipeline(model, dims.world, dims, config, device)
    family.parallelize(model, dims.world, dims, config)
    return WholeModel(model)


class TrainStep:
    """Runs steps and keeps what must be remembered between them: how many in a row were left out."""

    def __init__(
        self,
        stages: Stages,
        optimizer: Optimizer,
        config: JobConfig,
        dims: ParallelDims,
        device: torch.device,
    ) -> None:
        self._stages = stages
        self._parameters = [parameter for part in stages.parts for parameter in part.parameters()]
        self._optimizer = optimizer
        self._settings = config.training
        self._device = device
        set_loss(stages.parts, config, dims)
        self._loss_group = dims.loss.get_group()
        self._pipeline_group = dims.world.get_group("pp") if dims.pp > 1 else None
        self._share = Share(config, dims, device)
        if config.float8.enable_float8_linear:
            refuse_unconverted(stages.parts, config.float8, dims)
        self._precomputes_scales = precomputes_scales(config.float8, dims)
        if self._precomputes_scales:
            precompute_scales(stages.parts)
        self._layer_norms = LayerNorms(stages.parts, dims) if config.metrics.layer_norms else None
        self._skipped_in_a_row = 0

    def run(
        self, step: int, microbatches: Sequence[Microbatch], valid_tokens: int, *, logged: bool = False
    ) -> StepOutcome:
        """One optimizer step, at the learning rate that the optimizer holds.

        Args:
            microbatches: this rank's rows of the global batch.
            valid_tokens: labels of the global batch that aren't IGNORED.
            logged: the outcome has the norms of layers, if metrics.layer_norms wants them.

        Raises:
            TrainingDiverged: a number isn't finite and the policy is to stop. All ranks raise at the same step.
        """
        local_loss = self._forward_backward(microbatches, max(1, valid_tokens))
        if isinstance(self._optimizer, OptimizerInBackward):
            norm = self._optimizer.take_gradient_norm()
        else:
            with region("gradient norm"):
                norm = gradient_norm(self._parameters, self._pipeline_group)
        layer_norms = self._layer_norms.take() if self._layer_norms and logged else {}
        total_loss = local_loss.clone()
        dist.all_reduce(total_loss, group=self._loss_group)
        if self._pipeline_group is not None:
            dist.all_reduce(total_loss, group=self._pipeline_group)
        # The one point of a step where the host waits for the device. Both numbers are sums over all ranks, so that
        # every rank takes the same decision without asking the others.
        loss_value, norm_value = torch.stack([total_loss, norm.to(total_loss)]).tolist()
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        outcome = StepOutcome(loss_value, norm_value, finite, layer_norms, time.perf_counter())
        if outcome.updated:
            self._skipped_in_a_row = 0
            if self._settings.max_norm > 0:
                clip_gradients(self._parameters, norm, self._settings.max_norm)
            with region("optimizer"):
                self._optimizer.step()
            if self._precomputes_scales:
                precompute_scales(self._stages.parts)
        self._optimizer.zero_grad()
        if not outcome.updated:
            self._on_nonfinite(step, outcome, local_loss)
        return outcome

    def _forward_backward(self, microbatches: Sequence[Microbatch], valid_tokens: int) -> torch.Tensor:
        """Sum the gradients of all microbatches; returns this rank's part of the loss, fp32."""
        loss = torch.zeros((), device=self._device)
        for number, batch in enumerate(microbatches, start=1):
            last = number == len(microbatches)
            with region(f"microbatch {number}"):
                loss += self._stages.forward_backward(self._share(batch), valid_tokens, last)
        return loss

    def _on_nonfinite(self, step: int, outcome: StepOutcome, local_loss: torch.Tensor) -> None:
        finite: list[bool] = [True] * dist.get_world_size()
        dist.all_gather_object(finite, bool(local_loss.isfinite()))
        ranks = [str(rank) for rank, ok in enumerate(finite) if not ok]
        where = f"the loss of rank {', '.join(ranks)}" if ranks else "a gradient, while all losses are finite"
        what = f"step {step}: loss {outcome.loss}, gradient norm {outcome.grad_norm}; not finite: {where}"
        if self._settings.nonfinite == "stop":
            if isinstance(self._optimizer, OptimizerInBackward):
                raise TrainingDiverged(f"{what}. The weights have changed already, and aren't saved")
            raise TrainingDiverged(
                f"{what}. The weights are still those of step {step - 1}. "
                f"training.nonfinite = 'skip' would leave out such steps"
            )
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row > self._settings.nonfinite_skip_limit:
            raise TrainingDiverged(
                f"{what}. This is more than training.nonfinite_skip_limit = {self._settings.nonfinite_skip_limit} "
                f"steps in a row"
            )
        logger.warning(f"{what}; step left out ({self._skipped_in_a_row} in a row)")
