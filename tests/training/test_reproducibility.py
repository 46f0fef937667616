import os

import torch

from titan.config.job_config import Debug
from titan.training.reproducibility import seed_step, set_determinism


def test_a_steps_random_numbers_do_not_depend_on_what_came_before() -> None:
    def draws(step: int, rank: int) -> list[float]:
        seed_step(0, step, rank)
        return torch.rand(3).tolist()

    first = draws(7, 0)
    torch.rand(100)
    assert draws(7, 0) == first
    assert draws(8, 0) != first and draws(7, 1) != first


def test_deterministic_algorithms_can_be_asked_for() -> None:
    try:
        set_determinism(Debug(deterministic=True, deterministic_warn_only=True))
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        set_determinism(Debug())
    assert not torch.are_deterministic_algorithms_enabled()
