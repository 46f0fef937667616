"""Random numbers and algorithms that make a run repeatable."""

from __future__ import annotations

import os

import torch

from titan.config.job_config import Debug
from titan.data.shuffle import derive_key


def set_determinism(settings: Debug) -> None:
    """Choose deterministic algorithms, if asked to. Must come before the accelerator's first use."""
    if settings.deterministic:
        # cuBLAS is only deterministic with a fixed workspace (its documentation, "Results reproducibility").
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.deterministic, warn_only=settings.deterministic_warn_only)


def seed_step(seed: int, step: int, batch_rank: int) -> None:
    """Seed this process's generators for one step, by what it computes and not by what it did before.

    A model with random layers (dropout) so resumes exactly, with no generator's state in the checkpoint. Ranks that
    work on the same rows (tp, pp) draw the same numbers.
    """
    torch.manual_seed(derive_key(seed, "step", step, batch_rank))
