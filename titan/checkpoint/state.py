"""What of a run is tensors: weights, persistent buffers and the optimizer's state, each under one name.

Names don't depend on the layout, nor on wrappers, nor on the order of the optimizer's groups; so what one layout saved,
any other can load. The tensors are the live ones (DTensors where the model is sharded): loading fills them in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from titan.config.errors import UserError
from titan.observability.logging import logger
from titan.parallelisms.float8 import unwrapped

if TYPE_CHECKING:
    from titan.training.optimizer import Optimizer

# How the names of weights and buffers begin.
MODEL_PREFIX = "model."

# Modules that torch.compile and activation checkpointing put around another one.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


class TensorInfo(NamedTuple):
    """What has to match between a stored tensor and a live one: the shape, of the whole tensor, not of a shard."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def training_tensors(model_parts: Sequence[nn.Module], optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """All tensors that a resume needs: `model.<name>` and `optimizer.<name>.<key>`, such as `….exp_avg`.

    A tied weight appears once, under its first name. State that the optimizer hasn't made yet is made.

    Raises:
        ValueError: two parts share a name, or the optimizer holds a parameter that no part has.
        TypeError: something that has to be saved isn't a tensor.
    """
    names = {id(tensor): name for name, tensor in _named_tensors(model_parts).items()}
    tensors = model_tensors(model_parts)
    make_optimizer_state(optimizer)
    state = optimizer.state
    for parameter in _parameters(optimizer):
        if id(parameter) not in names:
            raise ValueError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that no model part has"
            )
        for key, value in state.get(parameter, {}).items():
            name = f"optimizer.{names[id(parameter)]}.{key}"
            if value is not None:
                tensors[name] = _tensor(name, value).detach()
    return tensors


def model_tensors(model_parts: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """The weights and persistent buffers among them: `model.<name>`."""
    return {MODEL_PREFIX + name: unwrapped(tensor.detach()) for name, tensor in _named_tensors(model_parts).items()}


def _named_tensors(model_parts: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, the very objects that the optimizer and the modules hold."""
    named: dict[str, torch.Tensor] = {}
    for part in model_parts:
        seen: set[int] = set()
        # Not named_parameters: FSDP puts weights that a forward pass left gathered back into shards in state_dict.
        for wrapped_name, value in part.state_dict(keep_vars=True).items():
            name = plain_name(wrapped_name)
            tensor = _tensor(name, value)
            if id(tensor) in seen:
                continue
            if name in named:
                raise ValueError(f"two model parts have a tensor named {name}")
            seen.add(id(tensor))
            named[name] = tensor
    return named


def _tensor(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; a checkpoint holds tensors only")
    return value


def make_optimizer_state(optimizer: Optimizer) -> None:
    """Give each trained parameter without state the state that it has before its first step, all zeros for Adam.

    It is made by the optimizer itself, in a step that leaves every weight as it is, bit for bit, and every state that
    exists already.
    """
    parameters, state = _parameters(optimizer), optimizer.state
    fresh = [parameter for parameter in parameters if parameter.requires_grad and parameter not in state]
    if not fresh:
        return
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None  # a step skips parameters without a gradient
    for parameter in fresh:
        parameter.grad = torch.zeros_like(parameter)
    with _harmless(optimizer):
        optimizer.step()
    state = optimizer.state
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for parameter in fresh:
        for value in state.get(parameter, {}).values():
            if isinstance(value, torch.Tensor):
                value.zero_()  # the count of steps is 1 now


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def _harmless(optimizer: Optimizer) -> Iterator[None]:
    """Settings with which a step on zero gradients changes no weight; eps = 0 would divide zero by zero."""
    harmless = {"lr": 0.0, "weight_decay": 0.0, "eps": 1.0}
    saved = [{key: group[key] for key in harmless if key in group} for group in optimizer.param_groups]
    try:
        for group, own in zip(optimizer.param_groups, saved, strict=True):
            group.update({key: harmless[key] for key in own})
        yield
    finally:
        for group, own in zip(optimizer.param_groups, saved, strict=True):
            group.update(own)


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """Shapes (of the whole tensors) and dtypes."""
    return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def check_same_model(place: str, stored: Mapping[str, TensorInfo], ours: Mapping[str, TensorInfo]) -> None:
    """Refuse a checkpoint whose names or shapes aren't this run's. Other dtypes are cast, with a warning.

    Args:
        place: where the checkpoint is, for the message.

    Raises:
        UserError: naming the first few differences of each kind.
    """
    missing, unexpected, reshaped = compare(stored, ours)
    kinds = {"not in the checkpoint": missing, "only in the checkpoint": unexpected, "of another shape": reshaped}
    if found := described(kinds):
        raise UserError(
            f"{place} is a checkpoint of another model or optimizer:\n"
            + "\n".join(found)
            + "\nSet [model] and [optimizer] as they were (manifest.json holds the config that it was saved with), "
            "or start anew with another job.dump_folder."
        )
    cast = [f"{name} ({stored[name].dtype} to {info.dtype})" for name, info in ours.items() if stored[name] != info]
    if cast:
        logger.warning(f"casting what {place} holds in another dtype, {len(cast)} in all: {_first_few(cast)}")


class Differences(NamedTuple):
    """Names of tensors that aren't the same in two places; of `reshaped` ones with both shapes."""

    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]


def compare(stored: Mapping[str, TensorInfo], ours: Mapping[str, TensorInfo]) -> Differences:
    """What stored tensors lack of ours, what they have besides, and what has another shape; types may differ."""
    reshaped = [
        f"{name} (stored {list(stored[name].shape)}, here {list(info.shape)})"
        for name, info in ours.items()
        if name in stored and stored[name].shape != info.shape
    ]
    return Differences(
        [name for name in ours if name not in stored], [name for name in stored if name not in ours], reshaped
    )


def described(kinds: Mapping[str, Sequence[str]]) -> list[str]:
    """A line of a message for each kind of difference that there is, with its first few names."""
    return [f"  - {len(names)} {kind}: {_first_few(names)}" for kind, names in kinds.items() if names]


def _first_few(names: Sequence[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (", …" if len(names) > count else "")
