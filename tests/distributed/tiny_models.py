"""Families of tiny Llamas with awkward sizes, registered as a user's own module would (experimental.custom_import)."""

from dataclasses import replace

from titan.models.llama.sizes import LlamaSizes
from titan.models.spec import ModelSpec, model_families, register_model

UNTIED = LlamaSizes(
    dim=48,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=80,
    vocab_size=263,  # a prime: no number of ranks divides it
    max_seq_len=128,
    rope_theta=10_000.0,
)

_llama = model_families()["llama3"]
SPEC = ModelSpec(
    "tiny",
    {"untied": UNTIED, "tied": replace(UNTIED, tied=True), "layernorm": replace(UNTIED, norm_type="layernorm")},
    _llama.build,
    _llama.parallelize,
    _llama.flops_per_token,
)
register_model(SPEC)
