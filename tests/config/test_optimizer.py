"""[[optimizer.groups]], a list of tables, and the rules of the optimizer."""

from __future__ import annotations

import pytest

from tests.config.conftest import Load, Mistakes
from titan.config.job_config import ParameterGroup

GROUP = "[[optimizer.groups]]\n"
WQ = '[[optimizer.groups]]\npattern = "*.wq.weight"\n'


def test_tables_of_a_file_and_of_the_command_line(load: Load) -> None:
    expected = [ParameterGroup("*.wq.weight", 0.5), ParameterGroup("*.wk.weight", 1.0, weight_decay=0.0)]
    text = f'{WQ}lr_factor = 0.5\n{GROUP}pattern = "*.wk.weight"\nweight_decay = 0'
    assert load(text).config.optimizer.groups == expected
    json = '[{"pattern": "*.wq.weight", "lr_factor": 0.5}, {"pattern": "*.wk.weight", "weight_decay": 0}]'
    assert load("", f"--optimizer.groups={json}").config.optimizer.groups == expected
    assert load(WQ, "--optimizer.groups", json).config.optimizer.groups == expected  # the later list, whole
    assert load(WQ, "--optimizer.groups=[]").config.optimizer.groups == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f'{GROUP}patern = "*"', ['optimizer.groups, table 1: patern = "*": no such key; did you mean pattern?']),
        (f"{WQ}zzz = 1", ["table 1: zzz = 1: no such key; the keys are pattern, lr_factor, weight_decay"]),
        (f"{WQ}{GROUP}lr_factor = 2.0", ["optimizer.groups, table 2: pattern is missing"]),
        (f"{GROUP}pattern = 5", ["table 1: pattern = 5: expected a text"]),
        (f'{WQ}lr_factor = "2"', ['lr_factor = "2": expected a finite number of at least 0; write 2 without quotes']),
        (f"{WQ}weight_decay = -1", ["weight_decay = -1: expected a finite number of at least 0"]),
        (
            f"{WQ}lr_factor = true\n{GROUP}patern = 3\nweight_decay = nan",
            ["table 1: lr_factor = true", "table 2: patern = 3", "table 2: weight_decay = nan"],
        ),
        ('[optimizer.groups]\npattern = "*"', ["optimizer.groups = a table: expected a list of tables; ", "[[ ]]"]),
        ("[optimizer]\ngroups = ['*']", ['optimizer.groups = ["*"]: expected a list of tables']),
        ("[optimizer]\ngroups = 5", ["optimizer.groups = 5: expected a list of tables"]),
    ],
)
def test_wrong_tables(text: str, expected: list[str], mistakes: Mistakes) -> None:
    found = mistakes(text)
    if len(found) == 1:
        assert all(part in found[0] for part in ["run.toml: ", *expected])
    else:
        assert [part in mistake for part, mistake in zip(expected, found, strict=True)] == [True] * len(expected)


def test_wrong_tables_on_the_command_line(mistakes: Mistakes) -> None:
    (mistake,) = mistakes("", '--optimizer.groups=[{"patern": "*"}]')
    assert mistake.startswith("command line: --optimizer.groups, table 1: patern")
    (mistake,) = mistakes("", "--optimizer.groups=*.wq.weight")
    assert "expected a list of tables" in mistake


def test_opt_decay_groups_a_pattern_that_fits_nothing(load: Load, mistakes: Mistakes) -> None:
    (mistake,) = mistakes(f'{WQ}{GROUP}pattern = "*.atention.wk.weight"')
    assert mistake.startswith(
        'optimizer.groups, table 2: pattern = "*.atention.wk.weight": fits no parameter of llama3 debugmodel; did you '
        "mean layers.*.attention.wk.weight?"
    )
    (mistake,) = mistakes("", '--optimizer.groups=[{"pattern": "*nrom*"}]')
    assert 'pattern = "*nrom*": fits no parameter' in mistake
    # Checked on the whole model: with a pipeline too, where a stage has only some of the names.
    pipeline = ("--parallelism.pipeline_parallel_degree=2", '--optimizer.groups=[{"pattern": "output.weight"}]')
    load("", *pipeline, world_size=2)


def test_a_group_that_earlier_ones_leave_nothing(mistakes: Mistakes) -> None:
    (mistake,) = mistakes(f'{GROUP}pattern = "layers.*"\n{WQ}')
    assert "table 2" in mistake and "earlier tables, which count, have all that it fits (layers.0.attention" in mistake


EARLY = "--optimizer.early_step_in_backward"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "training.max_norm = 0, since a norm of all gradients is known too late (it is 1)"),
        (["--training.global_batch_size=32"], "training.global_batch_size = 16 or -1 (it is 32)"),
        (["--training.nonfinite=skip"], 'training.nonfinite = "stop"'),
        (["--parallelism.pipeline_parallel_degree=2"], "no pipeline"),
        (["--compile.enable", "--compile.components=optimizer"], 'compile.components without "optimizer"'),
        (["--optimizer.name=Muon"], 'optimizer.name = "AdamW" or "Adam"'),
    ],
)
def test_in_backward_lacks_what_needs_all_gradients(arguments: list[str], expected: str, mistakes: Mistakes) -> None:
    norm = ["--training.max_norm=0"] if arguments else []
    (mistake,) = mistakes("", EARLY, *norm, *arguments, world_size=2)
    assert mistake.startswith("optimizer.early_step_in_backward = true needs ") and expected in mistake


def test_in_backward_all_at_once_and_what_is_legal(load: Load, mistakes: Mistakes) -> None:
    (mistake,) = mistakes("", EARLY, "--training.nonfinite=skip", "--training.global_batch_size=80")
    assert mistake.count(";") == 2
    load("", EARLY, "--training.max_norm=0", "--training.enable_cpu_offload")
    load("", EARLY, "--training.max_norm=0", "--compile.enable", "--training.global_batch_size=8")


def test_muon_needs_to_know_the_layers(mistakes: Mistakes, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from titan.models import spec

    family = dataclasses.replace(spec.model_families()["llama3"], name="mine", stages=None)
    monkeypatch.setattr(spec, "_FAMILIES", {**spec.model_families(), "mine": family})
    (mistake,) = mistakes("", "--optimizer.name=Muon", "--model.name=mine")
    assert "model family mine doesn't say which modules are layers (ModelSpec.stages)" in mistake


def test_components_that_compile_nothing(load: Load, mistakes: Mistakes) -> None:
    (mistake,) = mistakes("", "--compile.enable", "--compile.components=[]")
    assert "compile.components = []: nothing is left to compile" in mistake
    (mistake,) = mistakes("", "--compile.enable", "--compile.components=optimizer", "--optimizer.name=Muon")
    assert "Muon isn't compiled" in mistake
    assert load("", "--compile.components=[]").config.compile.components == []


def test_num_bf16_params_is_warned_of(load: Load) -> None:
    (warning,) = load("", "--training.dtype=bfloat16").warnings
    assert 'training.dtype = "bfloat16"' in warning and "norm gains, which start at 1, may never move" in warning


def test_a_second_moment_that_rounding_holds_is_warned_of(load: Load) -> None:
    (warning,) = load("", "--optimizer.state_dtype=bfloat16", "--optimizer.beta2=0.999").warnings
    assert warning.startswith("optimizer.beta2 = 0.999 with moments in bfloat16: ") and "at most 0.998" in warning
    assert load("", "--optimizer.state_dtype=bfloat16", "--optimizer.beta2=0.998").warnings == []
    assert load("", "--optimizer.beta2=0.999").warnings == []


@pytest.mark.parametrize(
    "why", [["--compile.enable", "--compile.components=optimizer"], ["--optimizer.state_dtype=bfloat16"]]
)
def test_an_implementation_that_is_not_used_is_warned_of(why: list[str], load: Load) -> None:
    (warning,) = load("", "--optimizer.implementation=foreach", *why).warnings
    assert warning.startswith('optimizer.implementation = "foreach" isn\'t used: ')
    assert load("", *why).warnings == []
    assert load("", "--optimizer.implementation=foreach", "--optimizer.state_dtype=float32").warnings == []
