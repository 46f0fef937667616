"""What makes a run fit: changes of a config, the ones that cost the least speed first."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from titan.config import checks
from titan.config.derived import batch_degree, global_batch_size
from titan.config.fields import value_of
from titan.config.job_config import JobConfig
from titan.config.machine import planned_for
from titan.config.toml_text import shown
from titan.estimation.closed_form import reserved_bytes
from titan.estimation.from_config import layout_of
from titan.estimation.hardware import Hardware
from titan.estimation.time import step_time

Change = dict[str, Any]  # key → value
_MOST_RANKS = 100_000


@dataclass(frozen=True)
class Fitting:
    """A change that makes a run fit.

    Attributes:
        settings: what is changed, by key.
        reserved_bytes: of the rank that needs most, by the closed form.
        slower: device seconds per token, over those of the config as it is.
    """

    settings: Change
    reserved_bytes: int
    slower: float

    def __str__(self) -> str:
        return ", ".join(f"{key} = {shown(value)}" for key, value in self.settings.items())


def fitting_changes(config: JobConfig, world_size: int, hardware: Hardware, most: int = 3) -> list[Fitting]:
    """The cheapest changes after which the closed form fits: single ones, then two together, until there are enough."""
    base = _cost(config, world_size, hardware)[1]
    singles = list(_candidates(config, world_size))
    found: list[Fitting] = []
    with planned_for(hardware.machine):
        for together in (1, 2, 3):
            for changes in itertools.combinations(singles, together):
                settings = {key: value for change in changes for key, value in change.items()}
                more = any(fitting.settings.items() <= settings.items() for fitting in found)
                if more or not _agree(changes):
                    continue
                changed = with_settings(config, settings)
                if fits := _legal_cost(changed, world_size, hardware):
                    found.append(Fitting(settings, fits[0], fits[1] / base))
            if len(found) < most and together == 1:
                found += _more_ranks(config, world_size, hardware, base)
            if len(found) >= most:
                break
    return sorted(found, key=lambda fitting: fitting.slower)[:most]


def _more_ranks(config: JobConfig, world_size: int, hardware: Hardware, base: float) -> list[Fitting]:
    """The config as it is on the least power of two times as many ranks, if any are enough."""
    ranks = 2 * world_size
    while ranks <= _MOST_RANKS:
        if fits := _legal_cost(config, ranks, hardware):
            return [Fitting({"estimation.gpus": ranks}, fits[0], fits[1] * ranks / (base * world_size))]
        ranks *= 2
    return []


def _agree(changes: Sequence[Change]) -> bool:
    """No two of them set one key to different values."""
    return all(
        first[key] == second[key]
        for first, second in itertools.combinations(changes, 2)
        for key in first.keys() & second
    )


def with_settings(config: JobConfig, settings: Change) -> JobConfig:
    """A copy of a config with other values."""
    changed = copy.deepcopy(config)
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        setattr(value_of(changed, section), name, value)
    return changed


def _legal_cost(config: JobConfig, world_size: int, hardware: Hardware) -> tuple[int, float] | None:
    """`_cost`; None for a config that doesn't fit or is wrong. The rules come last: some of them build the model."""
    if batch_degree(config, world_size) == 0:
        return None
    cost = _cost(config, world_size, hardware)
    return cost if cost[0] <= hardware.fit_bytes and not checks.check(config, world_size, set()) else None


def _cost(config: JobConfig, world_size: int, hardware: Hardware) -> tuple[int, float]:
    """(bytes reserved at most, seconds per token)."""
    layout = layout_of(config, world_size)
    seconds = step_time(layout, hardware).seconds
    reserved = max(reserved_bytes(layout, rank) for rank in range(layout.pp))
    return reserved, seconds / (layout.windows_per_step * layout.seq_len)


def _candidates(config: JobConfig, world_size: int) -> Iterator[Change]:
    """Changes that save memory and keep the global batch."""
    settings, training = config.parallelism, config.training
    batch = global_batch_size(config, batch_degree(config, world_size))
    mode = "activation_checkpoint.mode"
    current = config.activation_checkpoint.mode
    if current in ("none", "memory_budget"):
        yield {mode: "selective", "activation_checkpoint.selective_ac_option": "op"}
    if current != "full":
        yield {mode: "full"}
    if config.loss.name == "cross_entropy":
        yield {"loss.name": "linear_cross_entropy"}
    if settings.pipeline_parallel_degree == 1 and training.local_batch_size % 2 == 0:
        yield {"training.local_batch_size": training.local_batch_size // 2, "training.global_batch_size": batch}
    if settings.fsdp_reshard_after_forward == "never" or settings.pipeline_parallel_degree > 1:
        yield {"parallelism.fsdp_reshard_after_forward": "always"}
    if settings.data_parallel_replicate_degree > 1:
        yield {"parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": -1}
    if config.optimizer.state_dtype is None and training.dtype == "float32":
        yield {"optimizer.state_dtype": "bfloat16"}
    for degree in (2, 4, 8):
        for name in ("tensor", "context"):
            key = f"parallelism.{name}_parallel_degree"
            if degree > value_of(config, key):
                yield {key: degree, "parallelism.data_parallel_shard_degree": -1, "training.global_batch_size": batch}
    if not training.enable_cpu_offload:
        yield {"training.enable_cpu_offload": True}
