"""What activation checkpointing asks of the rest of a config."""

from __future__ import annotations

import pytest

from tests.config.conftest import Load, Mistakes

SECTION = "activation_checkpoint"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("mode=everything", ['expected one of "none", "full", "selective", "memory_budget"']),
        ("selective_ac_option=0", ['selective_ac_option = "0": expected "op", or a number N from 1 to 6, the layers']),
        ("selective_ac_option=7", ["from 1 to 6, the layers of llama3 debugmodel"]),
        ("selective_ac_option=ops", ['selective_ac_option = "ops": expected "op"']),
        ("mode=memory_budget memory_budget=1.5", ["memory_budget 1.5", "at most 1"]),
        (
            "mode=memory_budget",
            ['"memory_budget" needs compile.enable = true', '(it is false); without it choose "sel'],
        ),
        (
            "mode=none offload",
            ["offload = true moves what", 'mode = "none" checkpoints none; choose selective or full'],
        ),
    ],
)
def test_illegal(settings: str, expected: list[str], mistakes: Mistakes) -> None:
    arguments = ["--compile.enable"] if "=1.5" in settings else []
    found = mistakes("", *(f"--{SECTION}.{setting}" for setting in settings.split()), *arguments)
    assert len(found) == 1 and all(text in found[0] for text in expected), found


def test_a_memory_budget_beside_tensor_parallelism_is_refused(mistakes: Mistakes) -> None:
    settings = [f"--{SECTION}.mode=memory_budget", "--compile.enable", "--parallelism.tensor_parallel_degree=2"]
    (found,) = mistakes("", *settings, world_size=2)
    assert 'mode = "memory_budget": torch.compile can\'t weigh' in found and "tensor_parallel_degree = 2" in found


@pytest.mark.parametrize(
    "settings",
    [
        "mode=none selective_ac_option=99",  # nobody asks for it
        "selective_ac_option=6",
        "mode=full memory_budget=0 early_stop no_preserve_rng_state determinism_check=none",
        "offload no_offload_use_streams",
    ],
)
def test_legal(settings: str, load: Load) -> None:
    load("", *(f"--{SECTION}.{setting}" for setting in settings.split()))
    load("", *(f"--{SECTION}.{setting}" for setting in settings.split()), "--compile.enable")


def test_the_default_is_op(load: Load) -> None:
    settings = load().config.activation_checkpoint
    assert (settings.mode, settings.selective_ac_option, settings.offload) == ("selective", "op", False)


def test_ac_offload_says_that_it_gains_nothing_on_a_cpu(load: Load) -> None:
    (warning,) = load("", f"--{SECTION}.offload").warnings
    assert "a CPU's memory is the host's" in warning


def test_number_of_an_older_file(load: Load) -> None:
    assert load(f"[{SECTION}]\nselective_ac_option = 2").config.activation_checkpoint.selective_ac_option == "2"
