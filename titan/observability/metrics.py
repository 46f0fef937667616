"""What a run measures of itself: speed, loss and memory over windows of steps."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from titan.config.job_config import Metrics
from titan.models.spec import FlopsPerToken
from titan.observability.console import Console
from titan.observability.device import Device
from titan.observability.flops import model_flops_utilization, tflops_per_device
from titan.observability.goodput import describe_goodput
from titan.observability.health import LossSpikes, SlowRanks
from titan.observability.logging import logger
from titan.observability.metric_writers import ValidationMetrics, WindowMetrics, open_writers
from titan.observability.run_record import RunRecord, describe_start


@dataclass(frozen=True)
class StepResult:
    """One optimizer step.

    Attributes:
        step: its number, from 1.
        loss: mean over the global batch's valid tokens.
        grad_norm: of the whole model, before clipping.
        lr: the learning rate used.
        tokens: trained on in this step over all ranks (windows × seq_len).
        data_seconds: how long this rank waited for its data.
        synced: when this rank had the loss, which took all ranks, by the clock of `MetricsLogger`.
        layer_norms: by name; empty when they aren't asked for.
        fingerprint: of its global batch; None when it isn't asked for.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    data_seconds: float
    synced: float
    layer_norms: Mapping[str, float] = field(default_factory=dict)
    fingerprint: str | None = None


class MetricsLogger:
    """Logs after this process's first step (alone, since start-up and compilation spoil its speed), after every
    `log_freq`-th step, and after the last. Time runs from here on, so make it just before the loop.

    Args:
        settings: the [metrics] section.
        dump_folder: where metrics.jsonl, starts.jsonl and TensorBoard's events go; rank 0 makes it. None: no file is
            written.
        device: whose memory is reported.
        rank, world_size: of this process.
        total_steps: of the whole run.
        start_step, tokens_seen: done before, when this is a resume; 0 otherwise.
        started: when the process started, in unix seconds.
        layout: degrees by name.
        config: the whole config, nested; W&B shows it.
        flops: FLOPs per token.
        peak_flops: of one device in FLOP/s; None when unknown.
        clock: gives seconds; for tests.
        wall_clock: gives unix seconds; for tests.
    """

    def __init__(
        self,
        settings: Metrics,
        dump_folder: Path | None,
        *,
        device: Device,
        rank: int,
        world_size: int,
        total_steps: int,
        start_step: int,
        tokens_seen: int,
        started: float,
        layout: Mapping[str, int],
        config: Mapping[str, Any],
        flops: FlopsPerToken,
        peak_flops: float | None,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._log_freq = settings.log_freq
        self._device = device
        self._world_size = world_size
        self._total_steps = total_steps
        self._first_step = start_step + 1
        self._tokens_seen = tokens_seen
        self._flops = flops
        self._peak_flops = peak_flops
        self._clock = clock
        # Unix time runs on with the other clock, which nobody sets: so that windows add up to it.
        self._clock_started = wall_clock() - clock()
        self._record, description = None, {"config": config}
        if rank == 0:
            description["start"] = describe_start(started, start_step, layout, device)
            self._record = RunRecord(dump_folder, description["start"])
        self._writers = open_writers(settings, dump_folder, rank, start_step, description)
        self._console = Console(settings, total_steps, start_step) if rank == 0 else None
        self._last_step = start_step
        self._window: list[StepResult] = []
        self._paused = {"checkpoint": 0.0, "validation": 0.0, "profiling": 0.0}
        self._closed = False
        self._first_step_end: float | None = None
        self._loss_spikes, self._slow_ranks = LossSpikes(), SlowRanks()
        self._own_seconds = 0.0
        self._window_start = self._released = clock()
        self._account = self._record.begin(self._clock_started + self._window_start) if self._record else None

    def logs(self, step: int) -> bool:
        """Whether a step is logged in any case; the one before an early end is, too."""
        return step in (self._first_step, self._total_steps) or step % self._log_freq == 0

    def ready(self) -> None:
        """This rank has the data of the next step, and comes to the others. What it did since it was with them last was
        its own work, but for pauses."""
        self._own_seconds += self._clock() - self._released

    def step(self, result: StepResult) -> None:
        """Count one step, and log when it is time to. Every rank must call this for every step."""
        self._window.append(result)
        self._last_step = result.step
        self._tokens_seen += result.tokens
        self._released = result.synced
        if (spike := self._loss_spikes.add(result.step, result.loss)) and self._console:
            logger.warning(spike)
        if self._console:
            self._console.advance()
        if self.logs(result.step):
            self.flush()

    def flush(self) -> None:
        """Log the steps since the last log, if any. Every rank must call it when a run ends before its last step."""
        if not self._window:
            return
        now = self._clock()
        step, metrics = self._last_step, self._measure(now)
        if self._console:
            self._console.show(step, metrics, self._device.memory().capacity_bytes, self._seconds_left(step, now))
        values = asdict(metrics) | dict(self._window[-1].layer_norms)
        if metrics.fingerprint is None:
            del values["fingerprint"]
        for writer in self._writers:
            writer.write(step, values)
        # The time that logging took belongs to the next window: it is part of what training costs.
        self._window_start = now
        if self._first_step_end is None:
            self._first_step_end = now
        self._window.clear()
        self._own_seconds = 0.0
        self._paused = dict.fromkeys(self._paused, 0.0)

    def validation(self, step: int, loss: float, bytes_per_token: float | None) -> None:
        """Log a validation round after this step: a line of its own, with keys of its own."""
        metrics = ValidationMetrics.of(loss, bytes_per_token)
        if self._console:
            self._console.show_validation(step, metrics)
        for writer in self._writers:
            writer.write(step, asdict(metrics) | {"time": self._clock_started + self._clock()})

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs, as JSON."""
        return self._loss_spikes.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._loss_spikes.load_state_dict(state)

    @contextmanager
    def pause(self, name: Literal["checkpoint", "validation", "profiling"]) -> Iterator[None]:
        """Time spent in this context isn't training time."""
        start = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - start
            self._paused[name] += seconds
            self._released += seconds

    def finish(self) -> None:
        """Log what is left, and where the run's time went. Every rank must call it at an orderly end."""
        self.flush()
        self._end(orderly=True)
        if self._account:
            logger.info(describe_goodput(self._account.seconds()))

    def close(self) -> None:
        """Close what is open, after a failure too; may be called twice. Talks to no other rank."""
        with suppress(OSError):  # such as a full disk, which may be why a run fails
            self._end(orderly=False)
        if self._console:
            self._console.close()
        for writer in self._writers:
            writer.close()

    def _end(self, *, orderly: bool) -> None:
        """Note when this start ended, and what it did since its last line."""
        if self._record and self._account and not self._closed:
            end = {"step": self._last_step, **self._timing(self._clock()), "orderly": orderly}
            self._account.add(end)
            self._record.end(end)
        self._closed = True

    def _timing(self, now: float) -> dict[str, float]:
        """The times in ACCOUNTED, of the window that is open."""
        window = self._window
        return {
            "time": self._clock_started + now,
            "step_seconds": (now - self._window_start - sum(self._paused.values())) / max(1, len(window)),
            "data_seconds": statistics.fmean(result.data_seconds for result in window) if window else 0.0,
        } | {f"{name}_seconds": seconds for name, seconds in self._paused.items()}

    def _measure(self, now: float) -> WindowMetrics:
        window = self._window
        losses = [result.loss for result in window]
        timing = self._timing(now)
        if self._account:
            self._account.add({"step": self._last_step, **timing})
        tokens_per_second = sum(result.tokens for result in window) / (timing["step_seconds"] * len(window))
        per_device = tokens_per_second / self._world_size
        return WindowMetrics(
            loss=statistics.fmean(losses),
            loss_max=math.nan if any(map(math.isnan, losses)) else max(losses),
            grad_norm=window[-1].grad_norm,
            lr=window[-1].lr,
            tokens_seen=self._tokens_seen,
            tokens_per_second=tokens_per_second,
            tokens_per_second_per_device=per_device,
            tflops_per_device=tflops_per_device(per_device, self._flops),
            mfu=model_flops_utilization(per_device, self._flops, self._peak_flops),
            memory_peak_bytes=self._exchange(timing["step_seconds"]),
            goodput=self._account.goodput() if self._account else None,
            **timing,
            fingerprint=window[-1].fingerprint,
        )

    def _exchange(self, step_seconds: float) -> int:
        """Tell all ranks what each knows of itself; returns the largest peak of memory in bytes."""
        peak = self._device.memory().peak_bytes
        if self._world_size == 1 or not dist.is_initialized():
            return peak
        self.ready()
        seconds = (self._own_seconds, sum(result.data_seconds for result in self._window))
        own = torch.tensor([peak, *(round(1e9 * total / len(self._window)) for total in seconds)], dtype=torch.int64)
        ranks = torch.empty(self._world_size * len(own), dtype=torch.int64)
        dist.all_gather_single(ranks, own)
        self._released = self._clock()
        ranks = ranks.view(self._world_size, len(own))
        if self._console and self._window[-1].step > self._first_step:  # start-up is in the first one
            _, busy, data = (ranks.double() / 1e9).T.tolist()
            for warning in self._slow_ranks.add(busy, data, step_seconds):
                logger.warning(warning)
        return int(ranks[:, 0].max())

    def _seconds_left(self, step: int, now: float) -> float | None:
        """By the mean time of a step since the first, pauses included, for people wait for those too."""
        if self._first_step_end is None:
            return None
        return (now - self._first_step_end) / (step - self._first_step) * (self._total_steps - step)
