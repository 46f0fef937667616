"""Text from a model: the draws, the end of a document, and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from scripts.generate import generate, main
from tests.checkpoint.test_conversion import named, stored
from tests.checkpoint.test_huggingface import strong_model
from tests.distributed.tiny_models import UNTIED
from titan.checkpoint.conversion import write_weights


class Counting(nn.Module):
    """The likeliest token after n is n + 1; row 9 is padding that would win otherwise."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen = tokens.shape[1]
        logits = nn.functional.one_hot(tokens + 1, 10).float() * 3
        logits[..., 9] = 100
        return logits


def draw(prompt: list[int], count: int, **options: Any) -> list[int]:
    defaults = {"ids": 8, "eos_id": None, "context": 4, "device": torch.device("cpu")}
    return generate(Counting(), prompt, count, **(defaults | options))


def test_greedy_stops_before_eos_and_never_draws_padding() -> None:
    assert draw([1], 4, temperature=0.0) == [2, 3, 4, 5]
    assert draw([1], 4, temperature=0.0, eos_id=4) == [2, 3]
    assert draw([1], 0) == []
    assert draw([1], 5, top_k=1) == [2, 3, 4, 5, 6]


def test_draws_follow_the_probabilities() -> None:
    drawn = [draw([1], 1, seed=seed)[0] for seed in range(400)]
    assert 0.65 < drawn.count(2) / 400 < 0.82  # e³ / (e³ + 7) = 0.742
    assert set(drawn) == set(range(8))
    assert drawn[:20] == [draw([1], 1, seed=seed)[0] for seed in range(20)]
    assert {draw([1], 1, seed=seed, temperature=0.1)[0] for seed in range(50)} == {2}


def test_a_long_text_is_cut_to_the_context() -> None:
    model = Counting()
    generate(model, [0] * 9, 2, ids=8, eos_id=None, context=4, device=torch.device("cpu"))
    assert model.seen == 4


def test_text_is_that_of_transformers_in_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = stored(strong_model(UNTIED), tmp_path, "untied", "dcp")._replace(tokenizer_path="tiny")
    write_weights(source, tmp_path / "hf", "hf", None)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    prompt = torch.tensor([[99, *(byte % 99 for byte in b"Once")]])
    everything = torch.ones_like(prompt)
    drawn = theirs.generate(prompt, attention_mask=everything, do_sample=False, max_new_tokens=8, pad_token_id=0)
    text = bytes(drawn[0, prompt.shape[1] :].tolist()).decode("ascii", errors="replace")
    model = ["--experimental.custom_import=tests.distributed.tiny_models", "--model.name=tiny", "--model.flavor=untied"]
    for path in ("dcp", "hf", "torch.pt"):
        options = ["--prompt=Once", "--temperature=0", "--max_new_tokens=8", "--tokenizer_path=tiny"]
        main([str(tmp_path / path), *options, *model])
        assert capsys.readouterr().out == f"Once{text}\n"


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(strong_model(UNTIED), tmp_path, "untied")
    assert named("untied").model.flavor == "untied"
    for arguments, words in (
        (["--temperature=-1"], "--temperature of at least 0"),
        (
            [
                "--model.name=tiny",
                "--experimental.custom_import=tests.distributed.tiny_models",
                "--model.flavor=untied",
            ],
            "",
        ),
    ):
        with pytest.raises(SystemExit) as end:
            main([str(tmp_path / "torch.pt"), *arguments])
        assert end.value.code == 2
        assert (words or "the model has 101 rows, the tokenizer (bytes, embedded) 258 ids") in capsys.readouterr().err
