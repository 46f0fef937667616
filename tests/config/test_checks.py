"""Rules that span fields, warnings, and the numbers that follow from a config."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.conftest import Load, Mistakes
from titan.config.checks import check
from titan.config.derived import global_batch_size, model_sizes, resolved_steps
from titan.config.job_config import JobConfig
from titan.config.loader import load_config


def test_defaults_pass_for_any_world() -> None:
    for world_size in (1, 2, 3, 8, 1000):
        assert check(JobConfig(), world_size, set()) == []


@pytest.mark.parametrize(
    ("batch", "local", "world_size", "legal"),
    [(10, 4, 2, "8 or 16"), (4, 4, 2, "8"), (17, 8, 1, "16 or 24")],
)
def test_global_batch(batch: int, local: int, world_size: int, legal: str) -> None:
    config = JobConfig()
    config.training.global_batch_size, config.training.local_batch_size = batch, local
    (mistake,) = check(config, world_size, set())
    assert mistake == (
        f"training.global_batch_size = {batch}: not a multiple of training.local_batch_size {local} * {world_size} "
        f"batch ranks (dp_replicate * dp_shard) = {local * world_size}; nearest legal: {legal}"
    )


def test_reported_keys_silence_the_rules_that_read_them() -> None:
    config = JobConfig()
    config.training.global_batch_size = 3
    assert check(config, 1, {"training.local_batch_size"}) == []


def test_vocabulary_of_the_flavor(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan.data import tokenizer

    class Large:
        vocab_size = 128_256

    monkeypatch.setattr(tokenizer, "build_tokenizer", lambda path: Large())
    config = JobConfig()
    (mistake,) = check(config, 1, set())
    assert "the vocabulary of model.flavor debugmodel = 264" in mistake and "set model.vocab_size to 128256" in mistake
    config.model.vocab_size = 128_256
    assert check(config, 1, set()) == []


def test_data_that_is_there(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("a")
    monkeypatch.setenv("HOME", os.getcwd())
    for path in ("texts", "texts/a.txt", "texts/*.txt", "**/*.txt", "texts/**", "~/texts", "~/texts/*.txt"):
        load("", "--training.dataset=text", f"--training.dataset_path={path}")


def test_datasets_of_the_hub_are_known_by_their_form(load: Load) -> None:
    for name in ("c4", "allenai/c4", "python_stdlib"):
        load("", f"--training.dataset={name}")


def test_a_dataset_is_checked_without_the_libraries_that_read_it() -> None:
    code = (
        "import sys; from titan.config.job_config import JobConfig; from titan.config.checks_data import _dataset; "
        "config = JobConfig(); config.training.dataset = 'jsno'; print(list(_dataset(config, 1))); "
        "print({'torch', 'datasets', 'pyarrow'} & {*sys.modules})"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert "Did you mean json?" in result.stdout and result.stdout.endswith("set()\n")


class TestCustomImport:
    @pytest.fixture(autouse=True)
    def importable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(tmp_path))

    def test_registers_a_model(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        from titan.models import spec

        monkeypatch.setattr(spec, "_FAMILIES", dict(spec.model_families()))
        Path("my_family.py").write_text(
            "import dataclasses\n"
            "from titan.models.spec import model_families, register_model\n"
            "register_model(dataclasses.replace(model_families()['llama3'], name='mine'))\n"
        )
        assert load("", "--experimental.custom_import=my_family", "--model.name=mine").config.model.name == "mine"

    def test_registers_a_dataset(self, load: Load, mistakes: Mistakes, monkeypatch: pytest.MonkeyPatch) -> None:
        from titan.data import sources

        monkeypatch.setattr(sources, "_factories", dict(sources._factories))
        Path("my_verses.py").write_text(
            "from titan.data.sources import register_dataset\nregister_dataset('verses', lambda training: None)\n"
        )
        (mistake,) = mistakes("", "--training.dataset=verses")
        assert "training.dataset = 'verses' isn't a dataset" in mistake
        load("", "--experimental.custom_import=my_verses", "--training.dataset=verses")
        (mistake,) = mistakes("", "--experimental.custom_import=my_verses", "--training.dataset=verse")
        assert "Did you mean verses?" in mistake

    def test_that_fails(self, mistakes: Mistakes) -> None:
        Path("my_broken.py").write_text("1 / 0\n")
        (mistake,) = mistakes("", "--experimental.custom_import=my_broken")
        assert "experimental.custom_import = my_broken" in mistake and "ZeroDivisionError: division by zero" in mistake
        assert "my_broken" not in sys.modules


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--training.steps=10", "lr_scheduler.warmup_steps = 200: more than the schedule's 10 steps"),
        (
            "--training.steps=10 --lr_scheduler.warmup_steps=6 --lr_scheduler.decay_ratio=.8",
            "6 + decay_ratio 0.8 * 10 steps = 14: more than the schedule's 10 steps; the decay is cut to 4",
        ),
        (
            "--lr_scheduler.total_steps=500 --lr_scheduler.min_lr_factor=0.1",
            "lr_scheduler.total_steps = 500: the run has 10000 steps; after step 500 the learning rate stays at 0.1",
        ),
        (
            "--training.steps=300 --training.total_tokens=16384000",
            "training.total_tokens = 16384000 decides the length of the run: 1000 steps; training.steps = 300",
        ),
    ],
)
def test_warnings(arguments: str, expected: str, load: Load) -> None:
    (warning,) = load("", *arguments.split(" ")).warnings
    assert expected in warning


def test_a_tokenizer_that_is_far_too_small(load: Load) -> None:
    model = ["--model.flavor=8B", "--training.steps=500"]
    advice = "the tokenizer only 258 ids: set model.tokenizer_path to the model's own"
    assert load("", *model).warnings == [f"llama3 8B has 128,256 rows, {advice}"]
    assert load("", *model, "--model.vocab_size=517").warnings == [f"model.vocab_size has 517 rows, {advice}"]
    assert load("", *model, "--model.vocab_size=516").warnings == []
    assert load("", "--model.vocab_size=1000").warnings == []  # the debug model


@pytest.mark.parametrize(
    "arguments",
    ["", "--training.total_tokens=16384000", "--training.steps=10 --lr_scheduler.warmup_steps=10"],
)
def test_no_warnings(arguments: str, load: Load) -> None:
    assert load("", *arguments.split()).warnings == []


def test_derived_numbers() -> None:
    config = load_config(["--training.local_batch_size=4", "--training.seq_len=10", "--training.steps=7"]).config
    assert global_batch_size(config, 3) == 12
    assert resolved_steps(config, 12) == 7
    for tokens, steps in ((1, 1), (120, 1), (121, 2), (240, 2)):
        config.training.total_tokens = tokens
        assert resolved_steps(config, 12) == steps
    config.training.global_batch_size = 24
    assert global_batch_size(config, 3) == 24


def test_model_sizes() -> None:
    config = JobConfig()
    assert (model_sizes(config).vocab_size, model_sizes(config).norm_type) == (264, "rmsnorm")
    config.model.norm_type, config.model.vocab_size = "layernorm", 300
    assert (model_sizes(config).vocab_size, model_sizes(config).norm_type) == (300, "layernorm")
    assert model_sizes(JobConfig()).vocab_size == 264
