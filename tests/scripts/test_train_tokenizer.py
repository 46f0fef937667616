"""scripts/train_tokenizer.py: a tokenizer that titan reads back, exact on any text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import train_tokenizer
from tests.data.test_tokenizer import TRICKY
from tests.data.tiny_data import json_lines, write
from titan.data.tokenizer import build_tokenizer, document_tokens

ROWS = [f"the theme of {i} is that there are {i} themes, and then there is the end." for i in range(200)]


def trained(folder: Path, *arguments: str) -> Path:
    write(folder, {"rows.jsonl": json_lines(ROWS)})
    data = ["--training.dataset=json", f"--training.dataset_path={folder / 'rows.jsonl'}"]
    train_tokenizer.main([*data, f"--output={folder / 'mine'}", *arguments])
    return folder / "mine"


def test_it_is_read_back_and_is_exact(tmp_path: Path) -> None:
    folder = trained(tmp_path, "--vocab_size=300")
    tokenizer = build_tokenizer(str(folder))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (300, 0, 1)
    for text in (ROWS[7], TRICKY, "日本語", train_tokenizer.BOS):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not {0, 1} & set(ids.tolist())
    assert document_tokens(tokenizer, "").tolist() == [0, 1]
    assert len(tokenizer.encode(ROWS[7])) < 0.6 * len(ROWS[7].encode())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config == {"bos_token": train_tokenizer.BOS, "eos_token": train_tokenizer.EOS}


def test_it_is_the_same_again_and_another_of_other_text(tmp_path: Path) -> None:
    first, second, few = (
        (trained(tmp_path / name, "--vocab_size=290", *more) / "tokenizer.json").read_bytes()
        for name, more in (("a", []), ("b", []), ("c", ["--documents=2"]))
    )
    assert first == second != few


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in {
        ("--vocab_size=200",): "--vocab_size 200: the bytes, BOS and EOS are 258 ids already",
        ("--training.dataset=tokens",): "name the dataset that it was made of",
        ("--training.text_feld=x",): "did you mean --training.text_field?",
    }.items():
        with pytest.raises(SystemExit) as caught:
            trained(tmp_path, *arguments)
        assert caught.value.code == 2
        assert expected in capsys.readouterr().err
