"""Models that are small to run and large enough that rounding to blocks of 512 bytes doesn't matter."""

from dataclasses import dataclass, replace
from typing import Any

from titan.models.llama.model import Llama
from titan.models.llama.sizes import LlamaSizes
from titan.models.spec import model_families, register_model

SMALL = LlamaSizes(
    dim=64,
    n_layers=8,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    ffn_dim=192,
    vocab_size=512,
    max_seq_len=512,
    rope_theta=10_000.0,
)

_WIDE = replace(SMALL, n_layers=3, n_kv_heads=4, dim=256, head_dim=64, ffn_dim=512, norm_type="np_layernorm")

register_model(
    replace(
        model_families()["llama3"],
        name="traced",
        flavors={
            "eight": SMALL,
            "sixteen": replace(SMALL, n_layers=16),
            "twenty-six": replace(SMALL, n_layers=26),
            "eleven": replace(SMALL, n_layers=11),
            "two": replace(SMALL, n_layers=2, n_kv_heads=4),
            "wide": _WIDE,
            "wide four": replace(_WIDE, n_layers=4),
        },
    )
)


@dataclass(frozen=True)
class RenamedSizes:
    """Of a Llama, by names that a closed form doesn't know."""

    dim: int
    n_layers: int
    heads: int
    groups: int
    hidden: int
    vocab_size: int
    max_seq_len: int
    norm_type: str = "rmsnorm"
    tied: bool = False

    @property
    def llama(self) -> LlamaSizes:
        return replace(
            SMALL,
            dim=self.dim,
            n_layers=self.n_layers,
            n_heads=self.heads,
            n_kv_heads=self.groups,
            head_dim=self.dim // self.heads,
            ffn_dim=self.hidden,
            vocab_size=self.vocab_size,
            max_seq_len=self.max_seq_len,
        )


_llama: Any = model_families()["llama3"]
register_model(
    replace(
        _llama,
        name="renamed",
        flavors={"eight": RenamedSizes(64, 8, heads=4, groups=2, hidden=192, vocab_size=512, max_seq_len=512)},
        build=lambda sizes: Llama(sizes.llama),
        flops_per_token=lambda sizes, seq_len: _llama.flops_per_token(sizes.llama, seq_len),
        stages=lambda sizes: _llama.stages(sizes.llama),
    )
)

ARGUMENTS = (
    "--experimental.custom_import=tests.estimation.traced_models",
    "--model.name=traced",
    "--model.tokenizer_path=tiny",
    "--model.flavor=eight",
    "--training.seq_len=128",
    "--training.local_batch_size=2",
)
