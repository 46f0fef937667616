"""Which parameter is updated how: by which algorithm, with which learning rate and weight decay.

Groups are made of the names and shapes of the whole model, before it is cut into stages or spread over ranks: so they
are the same in every layout, and a pattern that fits nothing is found on the first of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from titan.config.derived import model_stages
from titan.config.job_config import JobConfig, ParameterGroup

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Update:
    """How a parameter is updated.

    Attributes:
        algorithm: "Adam", "AdamW" or "Muon".
        lr_factor: its learning rate is the schedule's times this.
        pattern: of the group of [[optimizer.groups]] that it is in; None for those in none.
    """

    algorithm: str
    lr_factor: float
    weight_decay: float
    pattern: str | None


def plan_updates(config: JobConfig, model: nn.Module) -> dict[str, Update]:
    """How each parameter of the whole model is updated, by its name.

    Matrices decay; norm gains and biases, which have one dimension, don't unless `decay_norms_and_biases`. With Muon,
    matrices of the layers are its; what remains, such as the embedding, the head and the gains, is AdamW's.
    """
    settings = config.optimizer
    hidden = layer_prefixes(config) if settings.name == "Muon" else ()
    groups = assign_groups(settings.groups, (name for name, _ in model.named_parameters()))
    plan = {}
    for name, parameter in model.named_parameters():
        number = groups[name]
        group = None if number is None else settings.groups[number]
        decays = parameter.ndim > 1 or settings.decay_norms_and_biases
        decay = settings.weight_decay if decays else 0.0
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        plan[name] = Update(
            algorithm=_algorithm(settings.name, is_hidden_matrix=parameter.ndim == 2 and name.startswith(hidden)),
            lr_factor=1.0 if group is None else group.lr_factor,
            weight_decay=decay,
            pattern=None if group is None else group.pattern,
        )
    return plan


def _algorithm(name: str, *, is_hidden_matrix: bool) -> str:
    return "AdamW" if name == "Muon" and not is_hidden_matrix else name


def layer_prefixes(config: JobConfig) -> tuple[str, ...]:
    """What names of the layers' parameters begin with; empty when the family doesn't say which modules are layers."""
    stages = model_stages(config)
    return () if stages is None else tuple(f"{layer}." for layer in stages.layers)


def assign_groups(groups: Sequence[ParameterGroup], names: Iterable[str]) -> dict[str, int | None]:
    """The number of the first group whose pattern fits each name; None where none does."""
    return {
        name: next((number for number, group in enumerate(groups) if fnmatchcase(name, group.pattern)), None)
        for name in names
    }


def describe_updates(plan: Mapping[str, Update], model: nn.Module) -> list[str]:
    """A line for each way of updating: how many tensors and parameters of the whole model it has."""
    members: dict[Update, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        members.setdefault(plan[name], []).append(parameter)
    return [f"{_name(update)}: {_count(tensors)}, {_settings(update)}" for update, tensors in members.items()]


def _name(update: Update) -> str:
    return update.algorithm if update.pattern is None else f"{update.algorithm}, group {update.pattern}"


def _count(tensors: Sequence[torch.Tensor]) -> str:
    return f"{len(tensors)} tensors of {sum(tensor.numel() for tensor in tensors):,} parameters"


def _settings(update: Update) -> str:
    factor = "" if update.lr_factor == 1 else f", learning rate times {update.lr_factor:g}"
    return f"weight decay {update.weight_decay:g}{factor}"
