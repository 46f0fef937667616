"""Llama as transformers' LlamaForCausalLM stores it: names of tensors, and sizes to config.json and back.

titan's rotary pairs are Hugging Face's, so that a tensor has another name there, and the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan.config.errors import UserError
from titan.models.llama.sizes import LlamaSizes, RopeScaling
from titan.models.spec import HuggingFaceFormat

_IN_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}

# What config.json must say, where it says it at all: titan's Llama has nothing else.
_FIXED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
}


def tensor_names(sizes: LlamaSizes) -> dict[str, str]:
    """Our name of each tensor → the stored one."""
    names = {"tok_embeddings.weight": "model.embed_tokens.weight"}
    for layer in range(sizes.n_layers):
        for ours, theirs in _IN_LAYER.items():
            names[f"layers.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    names["norm.weight"] = "model.norm.weight"
    if not sizes.tied:
        names["output.weight"] = "lm_head.weight"
    return names


def _copies(sizes: LlamaSizes) -> dict[str, str]:
    return {"lm_head.weight": "model.embed_tokens.weight"} if sizes.tied else {}


def to_config(sizes: LlamaSizes) -> dict[str, Any]:
    """What config.json says of the sizes.

    The rotary settings are written as transformers 4.45 reads them, `rope_theta` beside `rope_scaling`; 5 turns them
    into its own `rope_parameters`.

    Raises:
        UserError: LlamaForCausalLM has no such norm.
    """
    if sizes.norm_type != "rmsnorm":
        raise UserError(
            f'model.norm_type = "{sizes.norm_type}": LlamaForCausalLM has no norm but rmsnorm, so this model can\'t be '
            "written for it; a titan checkpoint and a torch file can hold it"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.dim,
        "intermediate_size": sizes.ffn_dim,
        "num_hidden_layers": sizes.n_layers,
        "num_attention_heads": sizes.n_heads,
        "num_key_value_heads": sizes.n_kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.max_seq_len,
        "rms_norm_eps": sizes.norm_eps,
        "rope_theta": sizes.rope_theta,
        "rope_scaling": None if sizes.rope_scaling is None else _to_scaling(sizes.rope_scaling),
        "tie_word_embeddings": sizes.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
    }


def _to_scaling(scaling: RopeScaling) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }


def from_config(config: Mapping[str, Any]) -> LlamaSizes:
    """The sizes that a config.json says.

    Raises:
        UserError: it lacks one, or says what titan's Llama doesn't have.
    """
    # transformers 5 writes all that is rotary as rope_parameters, older ones the scaling alone as rope_scaling.
    rope = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    for key, value in _FIXED.items():
        if rope.get(key, value) != value:
            raise UserError(f"config.json: {key} = {rope[key]!r}: titan's Llama has {value!r} only")
    try:
        n_heads, dim = int(config["num_attention_heads"]), int(config["hidden_size"])
        return LlamaSizes(
            dim=dim,
            n_layers=int(config["num_hidden_layers"]),
            n_heads=n_heads,
            n_kv_heads=int(config.get("num_key_value_heads") or n_heads),
            ffn_dim=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            max_seq_len=int(config["max_position_embeddings"]),
            rope_theta=float(rope.get("rope_theta") or 10_000.0),
            head_dim=int(config.get("head_dim") or dim // n_heads),
            rope_scaling=_from_scaling(rope),
            norm_eps=float(config["rms_norm_eps"]),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise UserError(f"config.json: {error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"config.json: a value isn't a number ({error})") from None


def _from_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(f"config.json: rope_type = {kind!r}: titan's Llama has 'default' and 'llama3'")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_seq_len=int(rope["original_max_position_embeddings"]),
    )


HUGGING_FACE = HuggingFaceFormat(
    model_type="llama",
    names=tensor_names,
    copies=_copies,
    ignored=("rotary_emb.inv_freq",),  # older files hold the frequencies
    vocabulary=("tok_embeddings.weight", "output.weight"),
    config=to_config,
    sizes=from_config,
)
