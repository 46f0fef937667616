"""What a run measures of itself: speed, loss and memory over windows of steps."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from titan.config.job_config import Metrics
from titan.models.spec import FlopsPerToken
from titan.observability.device import Device
from titan.observability.flops import model_flops_utilization, tflops_per_device
from titan.observability.metric_writers import Console, ValidationMetrics, WindowMetrics, open_writers


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
        fingerprint: of its global batch; None when it isn't asked for.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    data_seconds: float
    fingerprint: str | None = None


class MetricsLogger:
    """Logs after this process's first step (alone, since start-up and compilation spoil its speed), after every
    `log_freq`-th step, and after the last. Time runs from here on, so make it just before the loop.

    Args:
        settings: the [metrics] section.
        dump_folder: where metrics.jsonl and TensorBoard's events go; rank 0 makes it. None: no file is written.
        device: whose memory is reported.
        rank, world_size: of this process.
        total_steps: of the whole run.
        start_step, tokens_seen: done before, when this is a resume; 0 otherwise.
        flops: FLOPs per token.
        peak_flops: of one device in FLOP/s; None when unknown.
        clock: gives seconds; for tests.
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
        flops: FlopsPerToken,
        peak_flops: float | None,
        clock: Callable[[], float] = time.perf_counter,
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
        self._writers = open_writers(settings, dump_folder, rank, start_step)
        self._console = Console(settings, total_steps, start_step) if rank == 0 else None
        self._window: list[StepResult] = []
        self._paused = {"checkpoint": 0.0, "validation": 0.0, "profiling": 0.0}
        self._first_step_end: float | None = None
        self._window_start = clock()

    def step(self, result: StepResult) -> None:
        """Count one step, and log when it is time to. Every rank must call this for every step."""
        self._window.append(result)
        self._tokens_seen += result.tokens
        if self._console:
            self._console.advance()
        if result.step in (self._first_step, self._total_steps) or result.step % self._log_freq == 0:
            self.flush()

    def flush(self) -> None:
        """Log the steps since the last log, if any. Every rank must call it when a run ends before its last step."""
        if not self._window:
            return
        now = self._clock()
        step, metrics = self._window[-1].step, self._measure(now)
        if self._console:
            self._console.show(step, metrics, self._device.memory().capacity_bytes, self._seconds_left(step, now))
        values = asdict(metrics)
        if metrics.fingerprint is None:
            del values["fingerprint"]
        for writer in self._writers:
            writer.write(step, values)
        # The time that logging took belongs to the next window: it is part of what training costs.
        self._window_start = now
        if self._first_step_end is None:
            self._first_step_end = now
        self._window.clear()
        self._paused = dict.fromkeys(self._paused, 0.0)

    def validation(self, step: int, loss: float, bytes_per_token: float | None) -> None:
        """Log a validation round after this step: a line of its own, with keys of its own."""
        metrics = ValidationMetrics.of(loss, bytes_per_token)
        if self._console:
            self._console.show_validation(step, metrics)
        for writer in self._writers:
            writer.write(step, asdict(metrics))

    @contextmanager
    def pause(self, name: Literal["checkpoint", "validation", "profiling"]) -> Iterator[None]:
        """Time spent in this context isn't training time."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused[name] += self._clock() - start

    def close(self) -> None:
        """Close what is open, after a failure too; may be called twice. Talks to no other rank."""
        if self._console:
            self._console.close()
        for writer in self._writers:
            writer.close()

    def _measure(self, now: float) -> WindowMetrics:
        window = self._window
        losses = [result.loss for result in window]
        seconds = now - self._window_start - sum(self._paused.values())
        tokens_per_second = sum(result.tokens for result in window) / seconds
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
            step_seconds=seconds / len(window),
            data_seconds=statistics.fmean(result.data_seconds for result in window),
            checkpoint_seconds=self._paused["checkpoint"],
            memory_peak_bytes=self._peak_over_ranks(),
            fingerprint=window[-1].fingerprint,
        )

    def _peak_over_ranks(self) -> int:
        peak = self._device.memory().peak_bytes
        if self._world_size == 1 or not dist.is_initialized():
            return peak
        largest = torch.tensor(peak, dtype=torch.int64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest.item())

    def _seconds_left(self, step: int, now: float) -> float | None:
        """By the mean time of a step since the first, pauses included, for people wait for those too."""
        if self._first_step_end is None:
            return None
        return (now - self._first_step_end) / (step - self._first_step) * (self._total_steps - step)
