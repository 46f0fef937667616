"""The layout that trains fastest on so many ranks, among all that are possible and fit, by the closed forms.

Degrees, the windows of a microbatch, the schedule, activation checkpointing and resharding vary; the model, the global
batch, the data and the optimizer are the config's. Times within `TIE` of each other count as equal: then fewer
dimensions win, then less memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from titan.config.derived import batch_degree, global_batch_size, model_sizes
from titan.config.job_config import JobConfig
from titan.config.rules import divisors
from titan.estimation.changes import Change, with_settings
from titan.estimation.closed_form import reserved_bytes
from titan.estimation.from_config import layout_of
from titan.estimation.hardware import Hardware
from titan.estimation.layout import Checkpointing, Layout, Mode, Stage, even_stages
from titan.estimation.time import StepTime, step_time
from titan.models.spec import model_families

TIE = 0.03
_SHOWN = 5
_LEAST_TOKENS = 2048  # of a sequence on a rank of cp: shorter pieces make products too small for these formulas
_ROWS = (1, 2, 4, 8)
_MODES: tuple[Mode, ...] = ("none", "op", "full")
_STAGES_PER_RANK = (1, 2, 4)
_ONE_DIMENSION: Change = {
    "training.global_batch_size": -1,
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.context_parallel_degree": 1,
    "parallelism.pipeline_parallel_degree": 1,
}


@dataclass(frozen=True)
class Candidate:
    """A layout that fits.

    Attributes:
        seconds: of a step.
        reserved: bytes of the rank that needs most.
    """

    layout: Layout
    time: StepTime
    reserved: int

    @property
    def dimensions(self) -> int:
        """That have more than one rank."""
        own = self.layout
        return sum(degree > 1 for degree in (own.pp, own.dp_replicate, own.dp_shard, own.cp, own.tp))

    @property
    def tokens_per_second(self) -> float:
        """Of one rank."""
        own = self.layout
        return own.windows_per_step * own.seq_len / own.world_size / self.time.seconds

    def __str__(self) -> str:
        own = self.layout
        degrees = {"tp": own.tp, "cp": own.cp, "pp": own.pp, "shard": own.dp_shard, "replicate": own.dp_replicate}
        parts = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1] or ["one rank"]
        schedule = f", {own.schedule}" if own.pp > 1 else ""
        if own.stages_per_rank() > 1:
            schedule += f" of {own.stages_per_rank()} stages per rank"
        reshard = {"default": "", "never": ", weights stay gathered", "always": ", weights freed after each use"}
        return (
            f"{' × '.join(parts)}, microbatches of {own.rows} window(s){schedule}, checkpointing "
            f"{own.checkpointing.mode}{reshard[own.reshard]}"
        )


def fitting_layouts(config: JobConfig, world_size: int, hardware: Hardware) -> list[Candidate]:
    """All layouts that fit, the fastest first.

    Raises:
        UserError: the model's blocks aren't like Llama's.
    """
    # The batch is that of the config's own layout, where it has one on so many ranks.
    batch = global_batch_size(config, max(1, batch_degree(config, world_size)))
    base = layout_of(with_settings(config, _ONE_DIMENSION), world_size)
    fitting = []
    for layout in _layouts(config, base, batch, world_size, hardware):
        reserved = max(reserved_bytes(layout, rank) for rank in {0, layout.pp // 2, layout.pp - 1})
        if reserved <= hardware.fit_bytes:
            fitting.append(Candidate(layout, step_time(layout, hardware), reserved))
    fitting.sort(key=lambda candidate: candidate.time.seconds)
    return fitting


def best_first(fitting: list[Candidate]) -> list[Candidate]:
    """A few of those that fit, each of other degrees than those before it.

    Args:
        fitting: the fastest first.
    """
    ranked: list[Candidate] = []
    while fitting and len(ranked) < _SHOWN:
        bound = fitting[0].time.seconds * (1 + TIE)
        tied = [candidate for candidate in fitting if candidate.time.seconds <= bound]
        best = min(tied, key=lambda candidate: (candidate.dimensions, candidate.reserved))
        ranked.append(best)
        # The next is to be another layout, not the same degrees with another detail.
        fitting = [other for other in fitting if _degrees(other.layout) != _degrees(best.layout)]
    return ranked


def frontier(fitting: list[Candidate]) -> list[Candidate]:
    """Those that no other beats in both memory and speed, the least memory first; ties in speed count as equal."""
    kept: list[Candidate] = []
    for candidate in sorted(fitting, key=lambda candidate: (candidate.reserved, candidate.time.seconds)):
        if not kept or candidate.time.seconds < kept[-1].time.seconds / (1 + TIE):
            kept.append(candidate)
    return kept


def _degrees(layout: Layout) -> tuple[int, ...]:
    return layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp


def _layouts(config: JobConfig, base: Layout, batch: int, world_size: int, hardware: Hardware) -> Iterator[Layout]:
    """What the rules of the config allow, and common sense."""
    model, node = base.model, hardware.ranks_per_node
    family = model_families()[config.model.name]
    sizes = family.divisible_by_tp(model_sizes(config))
    balanced = config.parallelism.context_parallel_load_balancer == "headtail"
    for tp in divisors(math.gcd(*sizes.values(), world_size)) if sizes else [1]:
        if tp > node:
            break
        for cp in divisors(world_size // tp):
            unit = cp * math.lcm(2, tp) if balanced and cp > 1 else cp * tp
            if base.seq_len % unit or (cp > 1 and base.seq_len // cp < _LEAST_TOKENS):
                continue
            for pp in divisors(world_size // tp // cp):
                data = world_size // tp // cp // pp
                if pp > (model.n_layers if family.pipeline else 1) or batch % data:
                    continue
                degrees = dataclasses.replace(base, tp=tp, cp=cp, csv=None)
                yield from _spread(config, degrees, pp, data, batch // data, node // tp or 1)


def _spread(config: JobConfig, base: Layout, pp: int, data: int, windows: int, in_node: int) -> Iterator[Layout]:
    """Layouts of some degrees: how weights are sharded, and what goes through the ranks at a time."""
    for stages, schedule in _pipelines(config, base, pp):
        for rows in _ROWS:
            if windows % rows or (pp > 1 and windows // rows < pp):
                continue
            through = windows // rows if pp > 1 else 1
            if schedule == "Interleaved1F1B" and through % max(1, through // pp):
                continue
            for shard in divisors(data):
                # Copies within a node save little, and sharding within less than a node neither.
                if shard < data and shard * base.cp < in_node:
                    continue
                for mode in _MODES:
                    for reshard in _reshards(pp):
                        yield dataclasses.replace(
                            base,
                            stages=stages,
                            schedule=schedule,
                            rows=rows,
                            microbatches=through,
                            accumulation=1 if pp > 1 else windows // rows,
                            dp_shard=shard,
                            dp_replicate=data // shard,
                            checkpointing=Checkpointing(mode, early_stop=True),
                            reshard=reshard,
                        )


def _reshards(pp: int) -> tuple[Literal["default", "always", "never"], ...]:
    return ("default", "always") if pp > 1 else ("default", "never")


def _pipelines(config: JobConfig, base: Layout, pp: int) -> Iterator[tuple[tuple[tuple[Stage, ...], ...], str]]:
    """Stages of every rank with the schedule that runs them."""
    if pp == 1:
        yield even_stages(base.model.n_layers, 1, 1), "1F1B"
        return
    for per_rank in _STAGES_PER_RANK:
        if pp * per_rank <= base.model.n_layers and layers_per_stage(config, base, pp, per_rank):
            yield even_stages(base.model.n_layers, pp, per_rank), "1F1B" if per_rank == 1 else "Interleaved1F1B"


def layers_per_stage(config: JobConfig, base: Layout, pp: int, per_rank: int) -> int:
    """What makes so many stages; 0 when nothing does."""
    own = config.parallelism
    worth = base.model.n_layers + (
        own.pipeline_parallel_first_stage_less_layers + own.pipeline_parallel_last_stage_less_layers
    )
    layers = -(-worth // (pp * per_rank))
    return layers if -(-worth // layers) == pp * per_rank else 0
