"""Older names keep working with one warning; keys that can't act are refused by name unless they ask for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.conftest import Load, Mistakes
from titan.config import not_built
from titan.config.fields import all_settings, sections, value_of
from titan.config.given import COMMAND_LINE, Given
from titan.config.legacy import RENAMES, translate
from titan.config.loader import load_config
from titan.config.not_built import ANY, NEVER, NOT_BUILT
from titan.config.toml_text import toml_value


@pytest.mark.parametrize(
    ("toml", "key", "value"),
    [
        ("[training]\nbatch_size = 4", "training.local_batch_size", 4),
        ("[training]\nwarmup_steps = 4", "lr_scheduler.warmup_steps", 4),
        ("[training]\ndata_parallel_degree = 1", "parallelism.data_parallel_shard_degree", 1),
        ("[training]\ndata_parallel_shard_degree = 1", "parallelism.data_parallel_shard_degree", 1),
        ("[training]\ndata_parallel_replicate_degree = 1", "parallelism.data_parallel_replicate_degree", 1),
        ("[training]\nseed = 4", "debug.seed", 4),
        ("[training]\ndeterministic = true", "debug.deterministic", True),
        ("[experimental]\ncustom_args_module = 'json'", "experimental.custom_import", "json"),
        ("[job]\ncustom_config_module = 'json'", "experimental.custom_import", "json"),
        ("[checkpoint]\nenable_checkpoint = true", "checkpoint.enable", True),
        ("[metrics]\nrank_0_only = false", "metrics.save_for_all_ranks", True),
        ("[metrics]\nenable_color_printing = true", "metrics.disable_color_printing", False),
        ("[optimizer]\nfused = true", "optimizer.implementation", "fused"),
        ("[optimizer]\nfused = false", "optimizer.implementation", "foreach"),
        ("[lr_scheduler]\nlr_min = 0.1", "lr_scheduler.min_lr_factor", 0.1),
        ("[job]\nprint_args = true", "job.print_config", True),
    ],
)
def test_renamed_in_a_file(toml: str, key: str, value: Any, load: Load) -> None:
    loaded = load(toml)
    assert value_of(loaded.config, key) == value
    (warning,) = [warning for warning in loaded.warnings if "older name" in warning]
    assert key in warning and warning.startswith("run.toml: ")


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("--training.batch-size 4", "training.local_batch_size", 4),
        ("--checkpoint.enable-checkpoint", "checkpoint.enable", True),
        ("--checkpoint.no_enable_checkpoint", "checkpoint.enable", False),
        ("--metrics.rank_0_only=False", "metrics.save_for_all_ranks", True),
        ("--metrics.no-rank_0_only", "metrics.save_for_all_ranks", True),
        ("--metrics.rank_0_only", "metrics.save_for_all_ranks", False),
        ("--optimizer.fused", "optimizer.implementation", "fused"),
        ("--optimizer.no_fused", "optimizer.implementation", "foreach"),
    ],
)
def test_renamed_on_the_command_line(arguments: str, key: str, value: Any) -> None:
    loaded = load_config(arguments.split(" "))
    assert value_of(loaded.config, key) == value
    assert len(loaded.warnings) == 1 and key in loaded.warnings[0]


def test_a_later_source_wins_under_either_name(load: Load) -> None:
    assert load("[training]\nbatch_size = 4", "--training.local_batch_size=2").config.training.local_batch_size == 2
    assert load("[training]\nlocal_batch_size = 4", "--training.batch_size=2").config.training.local_batch_size == 2


def test_both_names_with_one_value_are_fine(load: Load) -> None:
    loaded = load("[training]\nbatch_size = 4\nlocal_batch_size = 4")
    assert loaded.config.training.local_batch_size == 4


def test_contradiction_by_meaning(mistakes: Mistakes) -> None:
    (mistake,) = mistakes("[metrics]\nrank_0_only = true\nsave_for_all_ranks = true")
    assert "metrics.save_for_all_ranks = true" in mistake and "run.toml: metrics.rank_0_only" in mistake


def test_one_warning_per_older_name(load: Load) -> None:
    Path("base.toml").write_text("[training]\nbatch_size = 1\n")
    loaded = load("extends = 'base.toml'\n[training]\nbatch_size = 2", "--training.batch_size=3")
    assert sum("training.batch_size" in warning for warning in loaded.warnings) == 1


def test_older_spelling_of_a_value(load: Load) -> None:
    loaded = load("[model]\nnorm_type = 'fused_rmsnorm'")
    assert loaded.config.model.norm_type == "rmsnorm"
    assert any("fused_rmsnorm" in warning and '"rmsnorm"' in warning for warning in loaded.warnings)


@pytest.mark.parametrize(
    ("key", "value", "translated"),
    [
        ("experimental.pipeline_parallel_schedule", "1f1b", ("parallelism.pipeline_parallel_schedule", "1F1B")),
        ("parallelism.pipeline_parallel_schedule", "interleaved_1f1b", (None, "Interleaved1F1B")),
        ("parallelism.pipeline_parallel_schedule", "gpipe", (None, "GPipe")),
        ("parallelism.pipeline_parallel_schedule", "flexible_interleaved_1f1b", (None, "Interleaved1F1B")),
        ("parallelism.pipeline_parallel_schedule", "FlexibleInterleaved1F1B", (None, "Interleaved1F1B")),
        ("parallelism.pipeline_parallel_schedule", "zbv_zero_bubble", (None, "ZBVZeroBubble")),
        ("parallelism.pipeline_parallel_schedule", "looped-bfs", (None, "LoopedBFS")),
        ("parallelism.pipeline_parallel_schedule", "other", (None, "other")),
        ("training.enable_loss_parallel", True, ("parallelism.disable_loss_parallel", False)),
        ("compile.enable_async_tensor_parallel", True, ("parallelism.enable_async_tensor_parallel", True)),
        ("model.converters", ["quantize.linear.float8"], ("float8.enable_float8_linear", True)),
        ("model.converters", [], ("float8.enable_float8_linear", False)),
        ("quantize.linear.float8.recipe_name", "rowwise", ("float8.recipe_name", "rowwise")),
        ("activation_checkpoint.selective_ac_option", 2, (None, "2")),
        ("training.steps", 2, (None, 2)),
    ],
)
def test_translation(key: str, value: object, translated: tuple[str | None, object]) -> None:
    found_key, found_value, _ = translate(Given(key, value, "run.toml"))
    assert (found_key, found_value) == (translated[0] or key, translated[1])


def test_schedule_of_any_spelling_says_todays(load: Load) -> None:
    (warning,) = load("", "--parallelism.pipeline_parallel_schedule=interleaved_1F1B").warnings
    assert warning.endswith('is an older name; today it is "Interleaved1F1B"')
    (warning,) = load("", "--experimental.pipeline_parallel_schedule=1f1b").warnings
    assert warning.endswith('is an older name; today it is parallelism.pipeline_parallel_schedule = "1F1B"')


PIPELINE = "--parallelism.pipeline_parallel_degree=2"


class TestMicrobatchCount:
    """experimental.pipeline_parallel_microbatches is a count; today's key is a size, so it needs the batch size."""

    @staticmethod
    def size(*arguments: str) -> int:
        return load_config([PIPELINE, *arguments]).config.parallelism.pipeline_parallel_microbatch_size

    def test_size(self) -> None:
        assert self.size("--experimental.pipeline_parallel_microbatches=4", "--training.batch_size=12") == 3

    def test_count_that_doesnt_divide(self, mistakes: Mistakes) -> None:
        (mistake,) = mistakes("", PIPELINE, "--experimental.pipeline_parallel_microbatches=3", world_size=2)
        assert mistake.endswith("training.local_batch_size = 8 can't be cut into 3 microbatches; legal: 1, 2, 4 or 8")

    def test_overridden_by_a_size(self, load: Load) -> None:
        toml = "[experimental]\npipeline_parallel_microbatches = 3"
        config = load(toml, PIPELINE, "--parallelism.pipeline_parallel_microbatch_size=2", world_size=2).config
        assert config.parallelism.pipeline_parallel_microbatch_size == 2

    def test_without_a_pipeline_it_asks_for_nothing(self, load: Load) -> None:
        config = load("", "--experimental.pipeline_parallel_microbatches=3").config
        assert config.parallelism.pipeline_parallel_microbatch_size == 1


class TestSplitPoints:
    """experimental.pipeline_parallel_split_points has the first module of each next stage."""

    @staticmethod
    def toml(*points: str) -> str:
        return f"[experimental]\npipeline_parallel_degree = 2\npipeline_parallel_split_points = {toml_value([*points])}"

    def test_parts(self, load: Load) -> None:
        loaded = load(self.toml("layers.2"), world_size=2)
        layers = [f"layers.{layer}" for layer in range(6)]
        assert loaded.config.parallelism.module_fqns_per_model_part == [
            ["tok_embeddings", *layers[:2]],
            [*layers[2:], "norm", "output"],
        ]
        assert any("parallelism.module_fqns_per_model_part" in warning for warning in loaded.warnings)
        on_the_command_line = ("--experimental.pipeline_parallel_split_points", "layers.1,layers.2,norm")
        loaded = load(
            self.toml("layers.2"),
            *on_the_command_line,
            "--experimental.pipeline_parallel_schedule=gpipe",
            "--parallelism.pipeline_parallel_degree=4",
            world_size=4,
        )
        parts = loaded.config.parallelism.module_fqns_per_model_part
        assert parts is not None and [part[0] for part in parts] == ["tok_embeddings", "layers.1", "layers.2", "norm"]

    def test_none(self, load: Load) -> None:
        assert load(self.toml(), world_size=2).config.parallelism.module_fqns_per_model_part is None
        asks_nothing = ("--parallelism.pipeline_parallel_degree", "1")
        assert load(self.toml("layers.99"), *asks_nothing).config.parallelism.module_fqns_per_model_part is None

    @pytest.mark.parametrize(
        ("points", "expected"),
        [
            (["layers.6"], 'the model has no module "layers.6"; did you mean layers.'),
            (["layer.2"], 'the model has no module "layer.2"; did you mean layers.2?'),
            (["layers.3", "layers.2"], "each point starts a stage, so they go in the order of the model, once each"),
            (["layers.3", "layers.3"], "once each: layers.0 … output"),
            (["tok_embeddings"], "once each: layers.0 … output"),
        ],
    )
    def test_wrong(self, points: list[str], expected: str, mistakes: Mistakes) -> None:
        (mistake,) = mistakes(self.toml(*points), world_size=2)
        assert mistake.startswith("run.toml: experimental.pipeline_parallel_split_points = ") and expected in mistake

    def test_number_of_parts_is_checked_like_todays(self, mistakes: Mistakes) -> None:
        (mistake,) = mistakes(self.toml("layers.2", "layers.4"), world_size=2)
        assert "module_fqns_per_model_part: it has 3 parts" in mistake

    def test_unknown_model_is_one_mistake(self, mistakes: Mistakes) -> None:
        (mistake,) = mistakes(self.toml("layers.2"), "--model.name=lama3", world_size=2)
        assert mistake.startswith("model.name")

    def test_model_of_ones_own(self, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from titan.models import spec

        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(spec, "_FAMILIES", dict(spec.model_families()))
        Path("family_to_cut.py").write_text(
            "import dataclasses\n"
            "from titan.models.spec import Stages, model_families, register_model\n"
            "stages = lambda sizes: Stages(('a',), ('b.0', 'b.1'), ('c',))\n"
            "register_model(dataclasses.replace(model_families()['llama3'], name='cut', stages=stages))\n"
        )
        own = ("--experimental.custom_import=family_to_cut", "--model.name=cut")
        parts = load(self.toml("b.1"), *own, world_size=2).config.parallelism.module_fqns_per_model_part
        assert parts == [["a", "b.0"], ["b.1", "c"]]


def test_tables_name_no_key_twice() -> None:
    old = [row.old for row in RENAMES]
    assert len(old) == len(set(old))
    respelled = {row.old for row in RENAMES if row.old == row.new}
    real = set(all_settings())
    assert not real & set(NOT_BUILT) and not real & set(NEVER) and not set(NOT_BUILT) & set(NEVER)
    assert not (set(old) - respelled) & (real | set(NOT_BUILT) | set(NEVER))
    for row in RENAMES:
        assert row.new in real or row.new in NOT_BUILT or row.new == "float8.*", row


@pytest.mark.parametrize("key", [*NOT_BUILT, *NEVER])
def test_harmless_values_pass_and_others_dont(key: str, load: Load, mistakes: Mistakes) -> None:
    section, _, name = key.rpartition(".")
    row = not_built.find_missing(key)
    assert row is not None
    for value in (5, "x") if row.harmless is ANY else row.harmless:
        load(f"[{section}]\n{name} = {toml_value(value)}")
        text = value if isinstance(value, str) else toml_value(value)
        load("", f"--{key}={text}")
    if row.harmless is not ANY:
        (mistake,) = mistakes(f'[{section}]\n{name} = "something"')
        assert mistake.startswith(f'run.toml: {key} = "something": {row.reason}; leave it ')


def test_refusal_doesnt_confuse_types(mistakes: Mistakes) -> None:
    assert mistakes("[parallelism]\nexpert_parallel_degree = true")
    assert mistakes("[compile]\nenable = 0")


def test_a_file_of_2024_that_asks_for_what_is_there(load: Load) -> None:
    loaded = load("""
        [job]
        dump_folder = "./outputs"
        description = "Llama 3 debug training"
        use_for_integration_test = true
        [profiling]
        enable_profiling = false
        save_traces_folder = "profile_trace"
        profile_freq = 10
        [metrics]
        log_freq = 1
        enable_color_printing = true
        enable_tensorboard = true
        [model]
        name = "llama3"
        flavor = "debugmodel"
        norm_type = "compiled_rmsnorm"
        [optimizer]
        name = "AdamW"
        lr = 8e-4
        [training]
        batch_size = 8
        seq_len = 2048
        warmup_steps = 2
        max_norm = 1.0
        steps = 10
        data_parallel_degree = -1
        tensor_parallel_degree = 1
        compile = false
        [experimental]
        pipeline_parallel_degree = 1
        enable_async_tensor_parallel = false
        [checkpoint]
        enable_checkpoint = false
        folder = "checkpoint"
        interval_type = "steps"
        interval = 5
        model_weights_only = false
        export_dtype = "float32"
        async_mode = "disabled"
        [activation_checkpoint]
        mode = "none"
        selective_ac_option = "2"
        [float8]
        enable_float8_linear = false
        scaling_type_input = "dynamic"
    """)
    assert loaded.config.lr_scheduler.warmup_steps == 2
    assert loaded.config.training.local_batch_size == 8
    assert len(loaded.warnings) == 11


def test_row_for_a_whole_section_keeps_the_name() -> None:
    (row,) = [row for row in RENAMES if row.old.endswith(".*")]
    assert row.new == "float8.*"
    assert translate(Given("quantize.linear.float8.emulate", "true", COMMAND_LINE)) == ("float8.emulate", "true", True)


def test_sections_are_those_of_the_dataclasses() -> None:
    assert "training.dataloader" in sections() and sections()[0] == "job"
