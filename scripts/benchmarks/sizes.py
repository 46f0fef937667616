"""Llamas for benchmarks, registered by `--experimental.custom_import scripts.benchmarks.sizes` as family "benchmark".

S, M and L are for CPUs: as in larger models, most of a step is products. "8B-6layers" is Llama 3 8B cut until it fits a
single GPU: a layer's work, and the head's, are the whole model's. "toy" is for trying a table out.
"""

from dataclasses import replace

from titan.models.llama.sizes import LLAMA3_FLAVORS, LlamaSizes
from titan.models.spec import model_families, register_model


def _small(dim: int, n_layers: int, n_heads: int, ffn_dim: int, vocab_size: int) -> LlamaSizes:
    return LlamaSizes(
        dim,
        n_layers,
        n_heads,
        n_kv_heads=4,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        max_seq_len=8192,
        rope_theta=500_000.0,
    )


_FLAVORS = {
    "toy": _small(64, 2, 4, 128, 264),
    "S": _small(256, 6, 8, 768, 2_048),
    "M": _small(512, 8, 8, 1_536, 32_000),
    "L": _small(768, 12, 12, 2_048, 128_256),
    "8B-6layers": replace(LLAMA3_FLAVORS["8B"], n_layers=6),
}

register_model(replace(model_families()["llama3"], name="benchmark", flavors=_FLAVORS))
