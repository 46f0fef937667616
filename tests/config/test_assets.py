"""model.hf_assets_path: the folder is the flavor's, and its tokenizer is the run's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from titan.config.derived import tokenizer_path
from titan.config.errors import ConfigError
from titan.config.loader import load_and_check
from titan.models.llama.huggingface import to_config
from titan.models.spec import model_families

SIZES = model_families()["llama3"].flavors["debugmodel"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A debug model's config.json and a tokenizer of three ids."""
    (tmp_path / "config.json").write_text(json.dumps(to_config(SIZES)))
    Tokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def mistakes(*arguments: str) -> list[str]:
    try:
        load_and_check(arguments, 1)
    except ConfigError as error:
        return error.mistakes
    return []


def change(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_its_tokenizer_is_used_unless_another_is_named(folder: Path) -> None:
    assets = f"--model.hf_assets_path={folder}"
    assert tokenizer_path(load_and_check([assets], 1).config) == str(folder)
    other = shutil.copy(folder / "tokenizer.json", folder / "other.json")
    assert tokenizer_path(load_and_check([assets, f"--model.tokenizer_path={other}"], 1).config) == str(other)
    assert tokenizer_path(load_and_check([], 1).config) is None
    (folder / "tokenizer.json").unlink()
    assert tokenizer_path(load_and_check([assets], 1).config) is None  # of a model for bytes


def test_another_model_is_refused(folder: Path) -> None:
    change(folder, hidden_size=128, head_dim=None, rope_theta=10_000.0)
    (mistake,) = mistakes(f"--model.hf_assets_path={folder}")
    assert "config.json isn't of llama3 debugmodel: dim (stored 128, here 192)" in mistake
    assert "rope_theta (stored 10000.0, here 500000.0)" in mistake and "head_dim (stored 16, here 24)" in mistake


def test_context_and_padding_are_no_difference(folder: Path) -> None:
    change(folder, max_position_embeddings=4096, vocab_size=200)
    assert mistakes(f"--model.hf_assets_path={folder}") == []
    change(folder, vocab_size=300)
    (mistake,) = mistakes(f"--model.hf_assets_path={folder}")
    assert "vocab_size (stored 300, here 264)" in mistake
    assert mistakes(f"--model.hf_assets_path={folder}", "--model.vocab_size=300") == []


def test_what_is_no_folder_of_a_model(folder: Path) -> None:
    (mistake,) = mistakes(f"--model.hf_assets_path={folder / 'none'}")
    assert mistake.endswith("no such folder")
    (folder / "config.json").write_text("{")
    (mistake,) = mistakes(f"--model.hf_assets_path={folder}")
    assert "config.json can't be read" in mistake
    (folder / "config.json").unlink()
    (mistake,) = mistakes(f"--model.hf_assets_path={folder}")
    assert "isn't a Hugging Face model's folder" in mistake
