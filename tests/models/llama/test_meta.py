"""Meta's params.json against published files, and its order of rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.models.test_llama import SCALING, TINY
from titan.config.errors import UserError
from titan.models.llama.meta import params_from_sizes, sizes_from_params, to_half_split, to_interleaved
from titan.models.llama.sizes import LLAMA2_FLAVORS, LLAMA3_FLAVORS, LlamaSizes, RopeScaling

KNOWN = [*LLAMA2_FLAVORS.values(), *LLAMA3_FLAVORS.values()]

# Published params.json files, with the flavor that each is of.
PUBLISHED: list[tuple[dict[str, Any], LlamaSizes]] = [
    (
        {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-05, "vocab_size": -1},
        LLAMA2_FLAVORS["7B"],
    ),
    (
        {
            "dim": 8192,
            "ffn_dim_multiplier": 1.3,
            "multiple_of": 4096,
            "n_heads": 64,
            "n_kv_heads": 8,
            "n_layers": 80,
            "norm_eps": 1e-05,
            "vocab_size": -1,
        },
        LLAMA2_FLAVORS["70B"],
    ),
    (
        {
            "dim": 2048,
            "ffn_dim_multiplier": 1.5,
            "multiple_of": 256,
            "n_heads": 32,
            "n_kv_heads": 8,
            "n_layers": 16,
            "norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "use_scaled_rope": True,
            "vocab_size": 128256,
        },
        LLAMA3_FLAVORS["3.2-1B"],
    ),
]


def ffn_dim(params: dict[str, Any]) -> int:
    """As Meta's code computes it (llama-models, FeedForward)."""
    hidden = int(2 * (4 * params["dim"]) / 3)
    if params.get("ffn_dim_multiplier") is not None:
        hidden = int(params["ffn_dim_multiplier"] * hidden)
    multiple: int = params["multiple_of"]
    return multiple * ((hidden + multiple - 1) // multiple)


@pytest.mark.parametrize(("params", "sizes"), PUBLISHED)
def test_published_files_are_the_published_sizes(params: dict[str, Any], sizes: LlamaSizes) -> None:
    assert ffn_dim(params) == sizes.ffn_dim
    assert sizes_from_params(params, sizes.ffn_dim, sizes.vocab_size, KNOWN) == sizes


@pytest.mark.parametrize("sizes", [*KNOWN, *(dataclasses.replace(TINY, head_dim=16, ffn_dim=n) for n in (1, 112, 171))])
def test_sizes_come_back(sizes: LlamaSizes) -> None:
    params = params_from_sizes(sizes)
    assert ffn_dim(params) == sizes.ffn_dim
    again = sizes_from_params(params, sizes.ffn_dim, sizes.vocab_size, KNOWN)
    assert again == dataclasses.replace(sizes, max_seq_len=again.max_seq_len)


def test_an_unknown_factor_is_not_guessed() -> None:
    params = params_from_sizes(dataclasses.replace(TINY, head_dim=16, rope_scaling=RopeScaling(8.0)))
    del params["rope_scaling_factor"]
    with pytest.raises(UserError, match=r"by which factor.*--model\.flavor"):
        sizes_from_params(params, TINY.ffn_dim, TINY.vocab_size, KNOWN)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 32}, "head_dim 32 isn't dim 64 / n_heads 4"),
        ({"norm_type": "layernorm"}, "no norm but rmsnorm"),
        ({"head_dim": 16, "rope_scaling": SCALING}, "knows the factor"),
    ],
)
def test_what_meta_has_no_word_for_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        params_from_sizes(dataclasses.replace(TINY, **changes))


def test_rows_of_rotary_pairs() -> None:
    """Of two heads of width 6: neighbours 0 1, 2 3, 4 5 become 0 3, 1 4, 2 5."""
    interleaved = torch.tensor([0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]).unsqueeze(1)
    half_split = to_half_split(interleaved, 6)
    assert half_split.flatten().tolist() == [0, 2, 4, 1, 3, 5, 10, 12, 14, 11, 13, 15]
    assert torch.equal(to_interleaved(half_split, 6), interleaved)
