"""Rules about [metrics] (titan/config/checks_metrics.py)."""

from __future__ import annotations

import importlib.util

import pytest

from tests.config.conftest import Load, Mistakes


def test_without_wandb(mistakes: Mistakes, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (mistake,) = mistakes("", "--metrics.enable_wandb")
    assert mistake == "metrics.enable_wandb = true: wandb isn't installed: pip install 'titan[wandb]'"
    load()


def test_layers_norms_need_all_gradients_at_once(mistakes: Mistakes, load: Load) -> None:
    early = ["--optimizer.early_step_in_backward", "--training.max_norm=0"]
    (mistake,) = mistakes("", "--metrics.layer_norms", *early)
    assert "metrics.layer_norms = true with optimizer.early_step_in_backward = true" in mistake
    assert "set one of the two to false" in mistake
    load("", "--metrics.layer_norms")
    load("", *early)
