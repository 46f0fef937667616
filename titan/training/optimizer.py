"""The optimizer over all parameters of a model, behind one interface, whatever it is made of.

Which parameter is updated how is decided in optimizer_groups.py, for the whole model; here are the optimizers over this
rank's parameters. Their state is found by parameter (checkpoint/state.py), so that it doesn't depend on how they are
divided among optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from titan.checkpoint.state import plain_name
from titan.config.derived import compiles, state_dtype
from titan.config.job_config import JobConfig
from titan.training.gradients import GradientNorm
from titan.training.optimizer_groups import Update


class Optimizer(Protocol):
    """What the rest of titan uses of an optimizer. torch's own have it too."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> Mapping[torch.Tensor, Any]: ...

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


class ModelOptimizer:
    """Several optimizers as one. Each has parameters of its own; those without a gradient are left as they are."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, the very dicts: what is set in them holds."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The state of every parameter that has one."""
        return {parameter: state for optimizer in self._optimizers for parameter, state in optimizer.state.items()}

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for optimizer in self._optimizers:
            if any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
                optimizer.step()

    def zero_grad(self) -> None:
        """Free all gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


class OptimizerInBackward(ModelOptimizer):
    """Updates each parameter during the backward pass, as soon as its gradient is complete, and frees the gradient.

    So gradients of one group of FSDP exist at a time, not of the whole model. FSDP calls the hooks of a parameter once
    its gradient is reduced over all ranks, copies included, on the stream that reduced it.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """
        Args:
            optimizers: one for each parameter.
        """
        super().__init__(optimizers)
        self._norm = GradientNorm()
        for optimizer in self._optimizers:
            ((parameter,),) = [group["params"] for group in optimizer.param_groups]
            parameter.register_post_accumulate_grad_hook(self._updates_by(optimizer))

    def _updates_by(self, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
        def update(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self._norm.add([parameter.grad])
            optimizer.step()
            parameter.grad = None

        return update

    def take_gradient_norm(self) -> torch.Tensor:
        """The norm of all gradients of the last backward pass, as `gradient_norm` gives it. Collective."""
        return self._norm.take()


def build_optimizer(config: JobConfig, plan: Mapping[str, Update], parts: Iterable[nn.Module]) -> ModelOptimizer:
    """The optimizer over the parameters of this rank's parts. The learning rate of a step is set by `set_lr` before it.

    Args:
        plan: how each parameter of the whole model is updated, of `plan_updates`.
    """
    members: dict[Update, list[nn.Parameter]] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.requires_grad:
                members.setdefault(plan[plain_name(name)], []).append(parameter)
    if config.optimizer.early_step_in_backward:
        return OptimizerInBackward(
            _build(config, update.algorithm, [_group(config, update, [parameter])])
            for update, parameters in members.items()
            for parameter in parameters
        )
    groups: dict[str, list[dict[str, Any]]] = {}
    for update, parameters in members.items():
        groups.setdefault(update.algorithm, []).append(_group(config, update, parameters))
    return ModelOptimizer(_build(config, algorithm, own) for algorithm, own in groups.items())


def _group(config: JobConfig, update: Update, parameters: list[nn.Parameter]) -> dict[str, Any]:
    return {
        "params": parameters,
        "lr": config.optimizer.lr * update.lr_factor,
        "lr_factor": update.lr_factor,
        "weight_decay": update.weight_decay,
    }


def _build(config: JobConfig, algorithm: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    settings, moments = config.optimizer, getattr(torch, state_dtype(config))
    if algorithm == "Muon":
        from titan.training.optimizer_muon import Muon

        return Muon(groups, settings.lr, state_dtype=moments)
    betas, compiled = (settings.beta1, settings.beta2), compiles(config, "optimizer")
    if compiled or state_dtype(config) != config.training.dtype:
        from titan.training.optimizer_adamw import AdamW

        return AdamW(
            groups,
            settings.lr,
            betas,
            settings.eps,
            decoupled=algorithm == "AdamW",
            state_dtype=moments,
            compile_backend=config.compile.backend if compiled else None,
        )
    kind = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[algorithm]
    return kind(
        groups,
        lr=settings.lr,
        betas=betas,
        eps=settings.eps,
        fused=settings.implementation == "fused",
        foreach=settings.implementation == "foreach",
    )


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Make the next step use this learning rate, times each group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
