"""Rules of the data, and what deserves a warning of it."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.config.conftest import Load, Mistakes

LOADER = "training.dataloader"


def test_workers_need_fork(load: Load, mistakes: Mistakes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("", f"--{LOADER}.num_workers=3").config.training.dataloader.num_workers == 3
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    (mistake,) = mistakes("", f"--{LOADER}.num_workers=3")
    assert mistake == f"{LOADER}.num_workers = 3: this system can't fork processes; leave it at 0"
    load("")


def test_pinning_says_that_it_gains_nothing_on_a_cpu(load: Load) -> None:
    (warning,) = load("", f"--{LOADER}.pin_memory").warnings
    assert f"{LOADER}.pin_memory = true: batches stay in a CPU's memory" in warning


def test_a_dataloader_as_older_files_have_it(load: Load) -> None:
    loaded = load(
        "[training.dataloader]\nnum_workers = 2\nprefetch_factor = 4\npin_memory = false\npersistent_workers = true"
    )
    settings = loaded.config.training.dataloader
    assert (settings.num_workers, settings.prefetch_factor, settings.pin_memory) == (2, 4, False)
    assert loaded.warnings == []
