"""Snapshots of an accelerator's memory: every allocation with its stack, and what came before (docs/profiling.md)."""

from __future__ import annotations

import os
from pathlib import Path

from titan.config.job_config import Profiling
from titan.observability.device import Device, record_memory, records_memory, write_memory_snapshot
from titan.observability.logging import logger

_EVENTS = 100_000  # allocations and frees that are remembered: a few steps of a large model


class MemorySnapshots:
    """Writes `step-N/rank-R.pickle`, or `step-N-out-of-memory/rank-R.pickle` after that error.

    Args:
        folder: for all of them.
        rank: this process's.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        record_memory(_EVENTS)

    def write(self, step: int, *, out_of_memory: bool = False) -> None:
        """Write one; a failure is a warning, since it must neither end a run nor hide why it ends."""
        folder = self._folder / f"step-{step}{'-out-of-memory' if out_of_memory else ''}"
        path, part = folder / f"rank-{self._rank}.pickle", folder / f".rank-{self._rank}.pickle"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_memory_snapshot(part)
            os.replace(part, path)
        except Exception as error:  # after running out of memory, whatever the allocator raises
            logger.warning(f"no memory snapshot of step {step}: {type(error).__name__}: {error}")
        else:
            say = logger.warning if out_of_memory else logger.info
            say(f"Memory snapshot in {path}")


def open_memory_snapshots(settings: Profiling, dump_folder: Path, device: Device, rank: int) -> MemorySnapshots | None:
    """To be called before the model is made, for its stacks to be known. None where no snapshots are asked for, or the
    device has no record of its memory, which rank 0 says once.
    """
    if not settings.enable_memory_snapshot:
        return None
    if records_memory(device):
        return MemorySnapshots(dump_folder / settings.save_memory_snapshot_folder, rank)
    if rank == 0:
        logger.warning(
            f"profiling.enable_memory_snapshot = true: unavailable on {device.type}; the run goes on without"
        )
    return None
