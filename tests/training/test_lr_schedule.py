"""The table of right values, computed by hand from the definition in docs/numerics.md."""

import pytest

from titan.config.job_config import LRScheduler
from titan.training.lr_schedule import lr_factor

TABLE = [
    (dict(warmup_steps=2), [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
    (
        dict(warmup_steps=2, decay_ratio=0.5, decay_type="cosine", min_lr_factor=0.1),
        [0.5, 1, 1, 1, 1, 1, 0.914058, 0.689058, 0.410942, 0.185942],
    ),
    (dict(warmup_steps=2, decay_ratio=0.4, decay_type="sqrt"), [0.5, 1, 1, 1, 1, 1, 1, 0.5, 0.292893, 0.133975]),
    (dict(warmup_steps=0), [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
    (dict(warmup_steps=10), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]),
    (dict(warmup_steps=20), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]),
    (dict(warmup_steps=6, decay_ratio=0.8), [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1, 0.75, 0.5, 0.25]),
    (dict(warmup_steps=4, decay_ratio=0.0), [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
    (dict(warmup_steps=0, decay_ratio=1.0), [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
]


@pytest.mark.parametrize(("settings", "expected"), TABLE)
def test_lr_shape(settings: dict, expected: list[float]) -> None:
    factors = [lr_factor(LRScheduler(**settings), step, 10) for step in range(1, 11)]
    assert factors == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 6, 10, 20])
@pytest.mark.parametrize("ratio", [None, 0.0, 0.3, 1.0])
def test_lr_too_long(decay_type: str, warmup: int, ratio: float | None) -> None:
    """Never negative, never above the peak, rising in the warm-up, falling after it, and defined beyond the end."""
    settings = LRScheduler(warmup_steps=warmup, decay_ratio=ratio, decay_type=decay_type, min_lr_factor=0.05)
    factors = [lr_factor(settings, step, 10) for step in range(1, 16)]
    assert all(0 < factor <= 1 for factor in factors)
    peak = factors.index(max(factors))
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert max(factors) == 1
