"""Sizes of the Llama models, as published (arXiv 2307.09288, arXiv 2407.21783, model cards of 3.1 and 3.2)."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary frequencies.

    Wavelengths up to original_max_seq_len / high_freq_factor keep their frequency, those beyond
    original_max_seq_len / low_freq_factor have it divided by `factor`; those between are blended.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True)
class LlamaSizes:
    """Sizes of one Llama.

    Attributes:
        dim: width of the residual stream.
        n_kv_heads: key and value heads, each shared by n_heads / n_kv_heads query heads (GQA).
        ffn_dim: width of the gated feed-forward.
        max_seq_len: positions that the rotary table covers.
        head_dim: width of a head; dim / n_heads when unset.
        tied: the head shares the embedding's weight.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int
    rope_theta: float
    head_dim: int = 0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    norm_type: str = "rmsnorm"
    tied: bool = False

    def __post_init__(self) -> None:
        if self.head_dim == 0:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)


def _llama2(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn_dim: int) -> LlamaSizes:
    return LlamaSizes(
        dim, n_layers, n_heads, n_kv_heads, ffn_dim, vocab_size=32_000, max_seq_len=4096, rope_theta=10_000.0
    )


def _llama3(dim: int, n_layers: int, n_heads: int, ffn_dim: int) -> LlamaSizes:
    return LlamaSizes(
        dim,
        n_layers,
        n_heads,
        n_kv_heads=8,
        ffn_dim=ffn_dim,
        vocab_size=128_256,
        max_seq_len=8192,
        rope_theta=500_000.0,
    )


def _stretched(sizes: LlamaSizes, factor: float, tied: bool = False) -> LlamaSizes:
    return replace(sizes, max_seq_len=131_072, rope_scaling=RopeScaling(factor), tied=tied)


# About 2 M parameters for bytes: divisible enough for tp 4, pp 6, and small enough for a minute on a CPU.
_debug = LlamaSizes(
    dim=192,
    n_layers=6,
    n_heads=8,
    n_kv_heads=4,
    ffn_dim=384,
    vocab_size=264,
    max_seq_len=8192,
    rope_theta=10_000.0,
)

LLAMA2_FLAVORS = {
    "debugmodel": _debug,
    "7B": _llama2(4096, 32, 32, 32, 11_008),
    "13B": _llama2(5120, 40, 40, 40, 13_824),
    "34B": _llama2(8192, 48, 64, 8, 22_016),
    "70B": _llama2(8192, 80, 64, 8, 28_672),
}

_8b = _llama3(4096, 32, 32, 14_336)
_70b = _llama3(8192, 80, 64, 28_672)
_405b = _llama3(16_384, 126, 128, 53_248)

LLAMA3_FLAVORS = {
    "debugmodel": replace(_debug, rope_theta=500_000.0),
    "8B": _8b,
    "70B": _70b,
    "405B": _405b,
    "3.1-8B": _stretched(_8b, 8.0),
    "3.1-70B": _stretched(_70b, 8.0),
    "3.1-405B": _stretched(_405b, 8.0),
    "3.2-1B": _stretched(_llama3(2048, 16, 32, 8192), 32.0, tied=True),
    "3.2-3B": _stretched(_llama3(3072, 28, 24, 8192), 32.0, tied=True),
}
