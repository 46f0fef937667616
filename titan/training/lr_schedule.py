"""Learning rate as a function of the step alone: nothing to save, nothing to restore.

After a resume with another lr or another number of steps the new schedule simply holds from the next step on.
"""

from __future__ import annotations

import math

from titan.config.job_config import LRScheduler


def lr_factor(settings: LRScheduler, step: int, total_steps: int) -> float:
    """Factor of the peak learning rate that step `step` uses; the first step is 1.

    Warm-up to the peak at step w, constant, then decay over d steps; the decay's last value would fall on the step
    after the last, so that every step learns something. A warm-up longer than the schedule is cut off at its end.

    Args:
        total_steps: length of the schedule; steps beyond it use the final value.
    """
    warmup = min(settings.warmup_steps, total_steps)
    decay = total_steps - warmup
    if settings.decay_ratio is not None:
        decay = min(decay, round(total_steps * settings.decay_ratio))
    if step <= warmup:
        return step / warmup
    constant = total_steps + 1 - warmup - decay
    if step <= warmup + constant or decay == 0:
        return 1.0
    progress = min(1.0, (step - warmup - constant) / decay)
    match settings.decay_type:
        case "linear":
            remaining = 1 - progress
        case "sqrt":
            remaining = 1 - math.sqrt(progress)
        case "cosine":
            remaining = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.min_lr_factor + (1 - settings.min_lr_factor) * remaining
