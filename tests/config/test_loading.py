"""Precedence, files, the command line's spellings, and where each value came from."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.config.conftest import Load
from titan.config.convert import convert
from titan.config.fields import all_settings, value_of
from titan.config.job_config import JobConfig
from titan.config.loader import load_config
from titan.config.toml_text import toml_value

ROOT = Path(__file__).parents[2]


def test_nothing_given(load: Load) -> None:
    loaded = load()
    assert loaded.config == JobConfig()
    assert set(loaded.origins) == set(all_settings())
    assert set(loaded.origins.values()) == {"default"}


def test_precedence_and_origins(load: Load) -> None:
    Path("base.toml").write_text("[training]\nsteps = 1\nseq_len = 1\nlocal_batch_size = 1\n")
    toml = "extends = 'base.toml'\n[training]\nseq_len = 2\nlocal_batch_size = 2"
    loaded = load(toml, "--training.local_batch_size", "3")
    training = loaded.config.training
    assert (training.steps, training.seq_len, training.local_batch_size) == (1, 2, 3)
    origins = [loaded.origins[f"training.{name}"] for name in ("steps", "seq_len", "local_batch_size", "max_norm")]
    assert origins == ["base.toml", "run.toml", "command line", "default"]


def test_extends_several_files_recursively_and_relative(load: Load) -> None:
    Path("more").mkdir()
    Path("more/a.toml").write_text("extends = ['../c.toml']\n[training]\nsteps = 10\n")
    Path("more/b.toml").write_text("extends = '../c.toml'\n[training]\nseq_len = 20\n")
    Path("c.toml").write_text("[training]\nsteps = 1\nseq_len = 1\nlocal_batch_size = 7\n")
    loaded = load("extends = ['more/a.toml', 'more/b.toml']")
    training = loaded.config.training
    # b comes after a, and brings what it extends with it.
    assert (training.steps, training.seq_len, training.local_batch_size) == (1, 20, 7)
    assert loaded.origins["training.seq_len"] == "more/b.toml"
    assert loaded.origins["training.steps"] == "c.toml"


def test_longer_cycle() -> None:
    Path("a.toml").write_text("extends = 'b.toml'")
    Path("b.toml").write_text("extends = './a.toml'")
    with pytest.raises(Exception, match=r"extends itself: a\.toml -> b\.toml -> a\.toml"):
        load_config(["--job.config_file", "a.toml"])


def test_config_file_is_looked_up_in_train_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("titan.config.toml_files.REPOSITORY", tmp_path / "repository")
    (tmp_path / "repository/train_configs").mkdir(parents=True)
    (tmp_path / "repository/train_configs/x.toml").write_text("[training]\nsteps = 3\n")
    assert load_config(["--job.config_file", "x.toml"]).config.training.steps == 3
    Path("train_configs").mkdir()
    Path("train_configs/x.toml").write_text("[training]\nsteps = 2\n")
    loaded = load_config(["--job.config_file", "x.toml"])
    assert (loaded.config.training.steps, loaded.origins["training.steps"]) == (2, "train_configs/x.toml")
    Path("x.toml").write_text("[training]\nsteps = 1\n")
    assert load_config(["--job.config_file=x.toml"]).config.training.steps == 1


def test_files_that_arent_utf8_or_have_a_mark() -> None:
    Path("latin.toml").write_bytes(b'[job]\ndescription = "caf\xe9"\n')
    with pytest.raises(Exception, match=r"latin\.toml, line 2: not UTF-8"):
        load_config(["--job.config_file", "latin.toml"])
    Path("marked.toml").write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 5\r\n")
    assert load_config(["--job.config_file", "marked.toml"]).config.training.steps == 5


def test_known_sections_may_be_empty(load: Load) -> None:
    sections = ["training", "training.dataloader", "compile", "memory_estimation", "quantize", "quantize.linear.float8"]
    load("\n".join(f"[{section}]" for section in sections))


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("--training.seq-len 64", "training.seq_len", 64),
        ("--lr-scheduler.warmup-steps=5", "lr_scheduler.warmup_steps", 5),
        ("--training.dataloader.prefetch-factor 0", "training.dataloader.prefetch_factor", 0),
        ("--training.steps 1e3", "training.steps", 1000),
        ("--training.steps 1_000", "training.steps", 1000),
        ("--training.total_tokens 1.5e12", "training.total_tokens", 1_500_000_000_000),
        ("--training.global_batch_size -1", "training.global_batch_size", -1),
        ("--optimizer.lr 1", "optimizer.lr", 1.0),
        ("--optimizer.lr=3e-4", "optimizer.lr", 3e-4),
        ("--training.steps 5 --training.steps 6", "training.steps", 6),
        ("--job.description a=b", "job.description", "a=b"),
        ("--job.description=--x=y", "job.description", "--x=y"),
        ("--job.description 12", "job.description", "12"),
        ("--job.description=", "job.description", ""),
        ("--model.vocab_size=", "model.vocab_size", None),
        ("--training.shuffle FALSE", "training.shuffle", False),
        ("--training.no-shuffle", "training.shuffle", False),
    ],
)
def test_command_line(arguments: str, key: str, value: Any) -> None:
    found = value_of(load_config(arguments.split(" ")).config, key)
    assert (found, type(found)) == (value, type(value))


def test_toml_widens_whole_numbers_only_to_floats(load: Load) -> None:
    loaded = load("[optimizer]\nlr = 1")
    assert loaded.config.optimizer.lr == 1.0 and isinstance(loaded.config.optimizer.lr, float)


def test_empty_text_unsets_what_may_be_unset(load: Load) -> None:
    Path("base.toml").write_text("[model]\ntokenizer_path = 'x'\nvocab_size = 300\n")
    loaded = load("extends = 'base.toml'\n[model]\ntokenizer_path = ''", "--model.vocab_size=")
    assert loaded.config.model.tokenizer_path is None and loaded.config.model.vocab_size is None


def test_every_setting_can_be_given_on_the_command_line() -> None:
    for setting in all_settings().values():
        if setting.default is None or setting.key == "job.config_file":
            continue
        text = setting.default if isinstance(setting.default, str) else toml_value(setting.default)
        loaded = load_config([f"--{setting.key}={text}"])
        assert loaded.config == JobConfig()
        assert loaded.origins[setting.key] == "command line"


def test_help_has_every_setting_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        load_config(["--training.steps", "x", "--help"])
    assert exit_.value.code == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for setting in all_settings().values():
        assert f"--{setting.key} " in text
        assert re.sub(r"\s+", " ", setting.meaning) in text
    assert "--training.steps INT (default: 10000; >= 1)" in text
    assert "--training.global_batch_size INT (default: -1; >= 1 or -1)" in text
    assert "--optimizer.implementation fused|foreach|for-loop" in text


def test_every_setting_has_a_meaning_and_a_default_that_is_legal() -> None:
    for setting in all_settings().values():
        assert setting.meaning.endswith("."), setting.key
        if setting.default is not None:
            assert convert(setting.default, setting, from_text=False) == setting.default


def test_import_is_light() -> None:
    code = (
        "import sys, time, titan.config.startup as startup; seconds = time.process_time(); "
        "heavy = 'torch' in sys.modules or 'numpy' in sys.modules; startup.config_from_command_line([]); "
        "print(seconds < 0.3, heavy, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.split() == ["True", "False", "False"]
