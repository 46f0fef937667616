"""Models that are small to run and large enough that rounding to blocks of 512 bytes doesn't matter."""

from dataclasses import replace

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

register_model(
    replace(
        model_families()["llama3"],
        name="traced",
        flavors={
            "eight": SMALL,
            "sixteen": replace(SMALL, n_layers=16),
            "eleven": replace(SMALL, n_layers=11),
            "two": replace(SMALL, n_layers=2, n_kv_heads=4),
            "wide": replace(
                SMALL, n_layers=3, n_kv_heads=4, dim=256, head_dim=64, ffn_dim=512, norm_type="np_layernorm"
            ),
        },
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
