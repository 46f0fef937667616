"""Traces of chosen steps by torch's profiler, each with a summary, and snapshots of the memory.

Steps are counted as the run counts them, so that a resumed run traces the steps that it would have traced: of each
`profile_freq` steps the last `profiler_active` are traced, and the `profiler_warmup` before them start the profiler,
whose first step is a slow one. Ranks write without asking each other for anything.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path

from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile, supported_activities

from titan.config.job_config import Profiling
from titan.observability.device import Device
from titan.observability.logging import logger
from titan.observability.memory_snapshots import MemorySnapshots
from titan.observability.regions import LayerRegions
from titan.observability.trace_rows import separate
from titan.observability.trace_summary import summarize


class Phase(Enum):
    """What the profiler does in a step."""

    OFF = auto()
    WARM_UP = auto()
    TRACED = auto()


def phase_of(step: int, settings: Profiling) -> Phase:
    """Of a step of the run, counted from 1, where traces are on."""
    left = -step % settings.profile_freq  # steps until the window's last
    if left < settings.profiler_active:
        return Phase.TRACED
    return Phase.WARM_UP if left < settings.profiler_active + settings.profiler_warmup else Phase.OFF


class Profiler:
    """What [profiling] asks of a rank; to be told when each step begins and ends.

    Args:
        dump_folder: in which its folders lie.
        first_step: of this process. A window that it begins within is traced from there on.
        parts: modules whose layers bear their names in traces.
        snapshots: of the memory, when they are on.
    """

    def __init__(
        self,
        settings: Profiling,
        dump_folder: Path,
        *,
        device: Device,
        rank: int,
        first_step: int,
        parts: Iterable[nn.Module],
        snapshots: MemorySnapshots | None,
    ) -> None:
        self._settings = settings
        self._folder = dump_folder / settings.save_traces_folder
        self._rank = rank
        self._first_step = first_step
        self._activities = {ProfilerActivity.CPU} if device.type == "cpu" else supported_activities()
        if device.type == "cpu":
            # Or torch prints two lines of its own per trace. Elsewhere it may have to tell of a device's fault.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._layers = LayerRegions(parts)
        self._profile: profile | None = None
        self._recording = False
        self._region: record_function | None = None
        self._snapshots = snapshots

    def begin(self, step: int) -> None:
        """Before anything of a step, its data included."""
        phase = phase_of(step, self._settings) if self._settings.enable_profiling else Phase.OFF
        if phase == Phase.OFF:
            return
        if self._profile is None:
            self._profile = profile(activities=self._activities)
            self._profile.prepare_trace()
        if phase == Phase.TRACED:
            if not self._recording:
                self._layers.attach()
                self._profile.start_trace()
                self._recording = True
            self._region = record_function(f"step {step}")
            self._region.__enter__()

    def end(self) -> None:
        """After a step, before a validation or a save that follows it."""
        if self._region is not None:
            self._region.__exit__(None, None, None)
            self._region = None

    def writes_after(self, step: int) -> bool:
        """Whether `write` has something to do after this step, the same on all ranks."""
        enabled = self._settings.enable_profiling or self._snapshots is not None
        return enabled and step % self._settings.profile_freq == 0

    def write(self, step: int) -> None:
        """Write the traces that end with this step, and the memory. Takes seconds; a failure is a warning."""
        if self._recording:
            finished = self._stop()
            self._write_trace(finished, step)
        if self._snapshots is not None:
            self._snapshots.write(step)

    def out_of_memory(self, step: int) -> None:
        """Write the memory after a step failed for want of it; never raises."""
        if self._snapshots is not None:
            self._snapshots.write(step, out_of_memory=True)

    def close(self) -> None:
        """End a window that the run's end has cut short; it isn't written. After a failure too."""
        if self._profile is None:
            return
        with suppress(RuntimeError):  # a device that has failed can't be asked; why it failed is to be seen
            self.end()
            if not self._recording:  # the profiler ends only what it has begun
                self._profile.start_trace()
            self._stop()

    def _stop(self) -> profile:
        assert self._profile is not None
        finished = self._profile
        self._layers.detach()
        finished.stop_trace()
        self._profile, self._recording = None, False
        return finished

    def _write_trace(self, finished: profile, step: int) -> None:
        start = time.perf_counter()
        folder = self._folder / f"step-{step}"
        plain, packed = folder / f".rank-{self._rank}.json", folder / f".rank-{self._rank}.json.gz"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(plain))
            trace = json.loads(plain.read_bytes())
            summary = summarize(trace["traceEvents"])
            separate(trace["traceEvents"], self._layers.backward_names())
            packed.write_bytes(gzip.compress(json.dumps(trace).encode(), compresslevel=3))
            text = folder / f".rank-{self._rank}.txt"
            text.write_text(f"rank {self._rank}: {summary.text()}{self._caveat(step)}", encoding="utf-8")
            for path in (packed, text):
                os.replace(path, path.with_name(path.name[1:]))
        except Exception as error:  # what is only looked at ends no run
            logger.warning(f"profiling.save_traces_folder: no trace of step {step}: {type(error).__name__}: {error}")
        else:
            logger.info(f"Trace of step {step} in {folder}, written in {time.perf_counter() - start:.1f} s")
        finally:
            with suppress(OSError):  # on a full disk it would be in the way
                plain.unlink()

    def _caveat(self, step: int) -> str:
        if step - self._settings.profiler_active < self._first_step:
            return (
                f"\nStep {self._first_step} is the process's first: start-up and compilation take part of its time.\n"
            )
        return ""
