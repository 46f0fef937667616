"""config.json against transformers' own reading of it, and against published files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig

from tests.models.test_llama import SCALING, TINY
from titan.config.errors import UserError
from titan.models.llama.huggingface import from_config, to_config
from titan.models.llama.sizes import LlamaSizes
from titan.models.spec import model_families

LLAMA3 = model_families()["llama3"].flavors

# What the published config.json of Llama 3.2 1B says of the model.
PUBLISHED_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}

# And that of Llama 2 7B, which is silent about what was not thought of yet.
PUBLISHED_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


def test_published_files_are_the_published_sizes() -> None:
    assert from_config(PUBLISHED_1B) == LLAMA3["3.2-1B"]
    assert from_config(PUBLISHED_7B) == model_families()["llama2"].flavors["7B"]
    ours = to_config(LLAMA3["3.2-1B"])
    assert {key: PUBLISHED_1B[key] for key in ours} == ours


@pytest.mark.parametrize("sizes", [*LLAMA3.values(), TINY, dataclasses.replace(TINY, tied=True, norm_eps=1e-6)])
def test_sizes_come_back(sizes: LlamaSizes) -> None:
    assert from_config(json.loads(json.dumps(to_config(sizes)))) == sizes


@pytest.mark.parametrize("sizes", [TINY, dataclasses.replace(TINY, tied=True, rope_scaling=SCALING)])
def test_transformers_reads_the_sizes_and_writes_them(sizes: LlamaSizes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(to_config(sizes)))
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, LlamaConfig)
    assert (config.hidden_size, config.head_dim, config.num_key_value_heads) == (64, 32, 2)
    assert config.rope_parameters["rope_theta"] == 10_000.0
    assert config.rope_parameters["rope_type"] == ("default" if sizes.rope_scaling is None else "llama3")
    assert config.rope_parameters.get("original_max_position_embeddings") == (
        None if sizes.rope_scaling is None else 32
    )
    config.save_pretrained(tmp_path / "again")  # in the form of its own version
    assert from_config(json.loads((tmp_path / "again" / "config.json").read_text())) == sizes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_type = 'linear'", "'llama3'"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["rope_type = 'yarn'"]),
        ({"attention_bias": True}, ["attention_bias = True", "False only"]),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "'silu' only"]),
        ({"hidden_size": "wide"}, ["isn't a number"]),
    ],
)
def test_what_the_family_has_not_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        from_config(PUBLISHED_7B | changes)
    assert [word for word in words if word not in str(caught.value)] == []


def test_what_is_missing_is_named() -> None:
    config = {key: value for key, value in PUBLISHED_7B.items() if key != "rms_norm_eps"}
    with pytest.raises(UserError, match="rms_norm_eps is missing"):
        from_config(config)


@pytest.mark.parametrize("norm_type", ["layernorm", "np_layernorm"])
def test_other_norms_are_refused(norm_type: str) -> None:
    with pytest.raises(UserError, match=f'norm_type = "{norm_type}".*no norm but rmsnorm'):
        to_config(dataclasses.replace(TINY, norm_type=norm_type))
