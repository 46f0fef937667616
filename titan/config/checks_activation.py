"""Rules of activation checkpointing and offloading, and what deserves a warning of them."""

from __future__ import annotations

from collections.abc import Iterator

from titan.config.derived import model_sizes
from titan.config.job_config import JobConfig
from titan.config.machine import machine
from titan.config.rules import MODEL_KEYS, Mistakes, Rule

_MODE = "activation_checkpoint.mode"
_OPTION = "activation_checkpoint.selective_ac_option"
_OFFLOAD = "activation_checkpoint.offload"


def _option(config: JobConfig, world_size: int) -> Mistakes:
    option, layers = config.activation_checkpoint.selective_ac_option, model_sizes(config).n_layers
    if config.activation_checkpoint.mode != "selective" or option == "op":
        return
    if not option.isdecimal() or not 1 <= int(option) <= layers:
        yield (
            f'{_OPTION} = "{option}": expected "op", or a number N from 1 to {layers}, the layers of '
            f"{config.model.name} {config.model.flavor}, of which every N-th is checkpointed"
        )


def _memory_budget(config: JobConfig, world_size: int) -> Mistakes:
    if config.activation_checkpoint.mode == "memory_budget" and not config.compile.enable:
        yield (
            f'{_MODE} = "memory_budget" needs compile.enable = true, since it is torch.compile that chooses what to '
            'keep (it is false); without it choose "selective"'
        )


def _memory_budget_with_tensor_parallel(config: JobConfig, world_size: int) -> Mistakes:
    degree = config.parallelism.tensor_parallel_degree
    if config.activation_checkpoint.mode == "memory_budget" and degree > 1:
        yield (
            f'{_MODE} = "memory_budget": torch.compile can\'t weigh what blocks keep beside tensor parallelism '
            f'(parallelism.tensor_parallel_degree = {degree}; torch 2.13); choose "selective" or "full"'
        )


def _offload(config: JobConfig, world_size: int) -> Mistakes:
    if config.activation_checkpoint.offload and config.activation_checkpoint.mode == "none":
        yield (
            f'{_OFFLOAD} = true moves what checkpointed blocks keep, but {_MODE} = "none" checkpoints none; '
            f"choose selective or full, or leave {_OFFLOAD} at false"
        )


RULES = (
    Rule(_option, (*MODEL_KEYS, _MODE, _OPTION), (_OPTION,)),
    Rule(_memory_budget, (_MODE, "compile.enable")),
    Rule(_memory_budget_with_tensor_parallel, (_MODE, "parallelism.tensor_parallel_degree")),
    Rule(_offload, (_MODE, _OFFLOAD)),
)


def warnings(config: JobConfig) -> Iterator[str]:
    """What gains nothing."""
    if config.activation_checkpoint.offload and not machine().accelerates:
        yield f"{_OFFLOAD} = true: a CPU's memory is the host's, so tensors are copied and no memory is saved"
