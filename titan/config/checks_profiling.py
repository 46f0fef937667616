"""Rules of profiling, and what deserves a warning of it."""

from __future__ import annotations

from collections.abc import Iterator

from titan.config.job_config import JobConfig
from titan.config.rules import Mistakes, Rule

_FREQ = "profiling.profile_freq"
_PARTS = ("profiling.profiler_warmup", "profiling.profiler_active")
_WRITES = ("profiling.enable_profiling", "profiling.enable_memory_snapshot")


def _period(config: JobConfig, world_size: int) -> Mistakes:
    settings = config.profiling
    least = settings.profiler_warmup + settings.profiler_active
    snapshots_alone = settings.enable_memory_snapshot and not settings.enable_profiling
    if settings.profile_freq < least and not snapshots_alone:
        yield (
            f"{_FREQ} = {settings.profile_freq}: fewer steps than profiling.profiler_warmup "
            f"{settings.profiler_warmup} + profiling.profiler_active {settings.profiler_active} = {least}; "
            f"set it to {least} or more, or lower those"
        )


def _load_only(config: JobConfig, world_size: int) -> Mistakes:
    settings = config.profiling
    for key, enabled in zip(_WRITES, (settings.enable_profiling, settings.enable_memory_snapshot), strict=True):
        if enabled and config.checkpoint.load_only:
            yield (
                f"{key} = true writes to job.dump_folder, in which checkpoint.load_only = true writes nothing; "
                "switch one of them off"
            )


RULES = (
    Rule(_period, (_FREQ, *_PARTS, *_WRITES)),
    Rule(_load_only, ("checkpoint.load_only", *_WRITES)),
)


def warnings(config: JobConfig, steps: int) -> Iterator[str]:
    """What the run is too short for.

    Args:
        steps: of the whole run.
    """
    if config.profiling.enable_profiling and steps < config.profiling.profile_freq:
        yield (
            f"profiling.enable_profiling = true writes nothing: the first trace ends with step {_FREQ} = "
            f"{config.profiling.profile_freq}, the run with step {steps}"
        )
