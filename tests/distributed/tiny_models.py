"""Tiny Llamas and a tokenizer with awkward sizes, registered as a user's module does (experimental.custom_import)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from titan.data.tokenizer import Tokenizer, register_tokenizer
from titan.models.llama.sizes import LlamaSizes
from titan.models.spec import model_families, register_model

UNTIED = LlamaSizes(
    dim=48,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=80,
    vocab_size=101,  # a prime: no number of ranks divides it
    max_seq_len=128,
    rope_theta=10_000.0,
)

# All sizes of the linears, and halves of them, are multiples of 16, which float8 products ask for; but for the head's.
SIXTEENS = replace(UNTIED, dim=64, head_dim=16, ffn_dim=128)

_llama = model_families()["llama3"]
SPEC = replace(
    _llama,
    name="tiny",
    flavors={
        "untied": UNTIED,
        "tied": replace(UNTIED, tied=True),
        "layernorm": replace(UNTIED, norm_type="layernorm"),
        "deep": replace(UNTIED, n_layers=4, n_kv_heads=4),
        "sixteens": SIXTEENS,
        "tied_deep": replace(UNTIED, n_layers=4, n_kv_heads=4, tied=True),
    },
)
register_model(SPEC)


class TinyTokenizer(Tokenizer):
    """Bytes folded into 99 ids, BOS and EOS: as many ids as the tiny models have."""

    vocab_size, bos_id, eos_id = 101, 99, 100
    fingerprint = description = "tiny"

    def encode(self, text: str) -> Any:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) % 99

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(int(i) for i in ids).decode("ascii", errors="replace")


register_tokenizer("tiny", TinyTokenizer)
