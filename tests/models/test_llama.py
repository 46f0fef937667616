"""Llama against published sizes and against transformers' own implementation."""

import dataclasses
import math
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from titan.models.llama.model import Llama
from titan.models.llama.sizes import LlamaSizes, RopeScaling
from titan.models.spec import model_families
from titan.training.initialize import initialize_weights, materialize

# Published parameter counts, embeddings once each, a tied head once.
PARAMETERS = {
    ("llama2", "7B"): 6_738_415_616,
    ("llama2", "13B"): 13_015_864_320,
    ("llama2", "34B"): 33_743_970_304,
    ("llama2", "70B"): 68_976_648_192,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("llama3", "3.1-8B"): 8_030_261_248,
    ("llama3", "3.1-70B"): 70_553_706_496,
    ("llama3", "3.1-405B"): 405_853_388_800,
    ("llama3", "3.2-1B"): 1_235_814_400,
    ("llama3", "3.2-3B"): 3_212_749_824,
}

# Model FLOPs per token at 8,192 tokens: full attention, causal.
FLOPS = {"8B": (57.914e9, 51.472e9), "70B": (481.443e9, 449.230e9), "405B": (2625.449e9, 2523.981e9)}

TINY = LlamaSizes(
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,  # not dim / n_heads, on purpose
    ffn_dim=112,
    vocab_size=101,
    max_seq_len=64,
    rope_theta=10_000.0,
)


def build(sizes: LlamaSizes, seed: int = 0) -> Llama:
    with torch.device("meta"):
        model = Llama(sizes)
    materialize(model, torch.device("cpu"))
    initialize_weights(model, seed)
    return model


@pytest.mark.parametrize(("family", "flavor"), PARAMETERS)
def test_mx_params_every_published_size(family: str, flavor: str) -> None:
    start = time.perf_counter()
    with torch.device("meta"):
        model = Llama(model_families()[family].flavors[flavor])
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[family, flavor]
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("flavor", FLOPS)
def test_flops_per_token_are_the_published_ones(flavor: str) -> None:
    spec = model_families()["llama3"]
    flops = spec.flops_per_token(spec.flavors[flavor], 8192)
    assert (round(flops.full, -6), round(flops.causal, -6)) == FLOPS[flavor]


def transformers_twin(model: Llama) -> LlamaForCausalLM:
    sizes = model.sizes
    rope: dict[str, object] = {"rope_theta": sizes.rope_theta, "rope_type": "default"}
    if sizes.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": sizes.rope_scaling.factor,
            "low_freq_factor": sizes.rope_scaling.low_freq_factor,
            "high_freq_factor": sizes.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": sizes.rope_scaling.original_max_seq_len,
        }
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.dim,
        intermediate_size=sizes.ffn_dim,
        num_hidden_layers=sizes.n_layers,
        num_attention_heads=sizes.n_heads,
        num_key_value_heads=sizes.n_kv_heads,
        head_dim=sizes.head_dim,
        rms_norm_eps=sizes.norm_eps,
        max_position_embeddings=sizes.max_seq_len,
        tie_word_embeddings=sizes.tied,
        rope_parameters=rope,
    )
    twin = LlamaForCausalLM(config).eval()
    names = {
        "tok_embeddings.": "model.embed_tokens.",
        "layers.": "model.layers.",
        "attention.w": "self_attn.w",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "wq": "q_proj",
        "wk": "k_proj",
        "wv": "v_proj",
        "wo": "o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "output.": "lm_head.",
    }
    state = {}
    for name, weight in model.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        state["model.norm.weight" if name == "norm.weight" else name] = weight
    twin.load_state_dict(state, strict=True)
    return twin


# A short original context makes scaling act on positions that the test reaches.
SCALING = RopeScaling(factor=8.0, original_max_seq_len=32)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaling", [None, SCALING])
def test_logits_equal_transformers(tied: bool, scaling: RopeScaling | None) -> None:
    model = build(dataclasses.replace(TINY, tied=tied, rope_scaling=scaling))
    with torch.no_grad():  # weights far from their small initial values, so that every part of the model matters
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
        tokens = torch.randint(0, TINY.vocab_size, (2, 48), generator=torch.Generator().manual_seed(1))
        ours, theirs = model(tokens), transformers_twin(model)(tokens).logits
    assert theirs.abs().max() > 1
    assert (ours - theirs).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("head_dim", "factor", "kept", "blended"),
    [
        (128, 8.0, 29, [0.828168, 0.643743, 0.493507, 0.371122, 0.271425, 0.190211]),
        (64, 32.0, 15, [0.605573, 0.303743, 0.103448]),
    ],
)
def test_num_rope_scaling(head_dim: int, factor: float, kept: int, blended: list[float]) -> None:
    plain = dataclasses.replace(TINY, head_dim=head_dim, rope_theta=500_000.0)
    with torch.device("meta"):
        frequencies = Llama(dataclasses.replace(plain, rope_scaling=RopeScaling(factor))).rotary.frequencies
        ratio = frequencies / Llama(plain).rotary.frequencies
    slow = head_dim // 2 - kept - len(blended)
    assert ratio.tolist() == pytest.approx([1.0] * kept + blended + [1 / factor] * slow, abs=1e-6)


def test_num_meta_buffers_are_rebuilt_without_initialising_weights() -> None:
    reference = build(TINY)
    with torch.device("meta"):
        model = Llama(TINY)
    materialize(model, torch.device("cpu"))
    model.load_state_dict(reference.state_dict(), strict=True)  # as a resume does: no initial weights are drawn
    tokens = torch.arange(20).reshape(2, 10)
    assert torch.equal(model(tokens), reference(tokens))
    assert model.rotary.cos.dtype == torch.float32


def test_rotary_tables_stay_exact_when_the_model_is_bf16() -> None:
    model = build(dataclasses.replace(TINY, max_seq_len=8192))
    cos, _ = model.rotary(8192)
    exact = torch.outer(torch.arange(8192, dtype=torch.float64), model.rotary.frequencies).cos()
    assert (cos - exact).abs().max() < 1e-7
    out = model.layers["0"].to(torch.bfloat16)(torch.randn(1, 16, 64, dtype=torch.bfloat16), cos[:16], cos[:16])
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("norm_type", ["rmsnorm", "layernorm", "np_layernorm"])
def test_norm_types_build_and_start_as_the_identity(norm_type: str) -> None:
    model = build(dataclasses.replace(TINY, norm_type=norm_type))
    names = [name for name, _ in model.named_parameters() if "norm" in name]
    per_norm = {"rmsnorm": 1, "layernorm": 2, "np_layernorm": 0}[norm_type]
    assert len(names) == per_norm * (2 * TINY.n_layers + 1)
    x = torch.randn(4, 64)
    expected = x / x.pow(2).mean(-1, keepdim=True).sqrt() if norm_type == "rmsnorm" else None
    if expected is None:
        expected = (x - x.mean(-1, keepdim=True)) / x.var(-1, keepdim=True, correction=0).sqrt()
    assert torch.allclose(model.norm(x), expected, atol=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_first_loss_is_the_logarithm_of_the_vocabulary(tied: bool) -> None:
    sizes = dataclasses.replace(TINY, vocab_size=128_256, dim=256, n_heads=8, tied=tied)
    model = build(sizes)
    tokens = torch.randint(0, sizes.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, sizes.vocab_size, (64,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(tokens)[0], labels)
    assert loss.item() == pytest.approx(math.log(128_256), rel=0.01)


def test_residual_projections_shrink_with_depth() -> None:
    model = build(dataclasses.replace(TINY, dim=256, n_layers=4))
    std = [model.layers[str(layer)].feed_forward.w2.weight.std().item() for layer in range(4)]
    assert std == pytest.approx([0.02 / math.sqrt(2 * (layer + 1)) for layer in range(4)], rel=0.05)


def test_positions_given_explicitly_equal_the_default() -> None:
    model = build(TINY)
    tokens = torch.arange(24).reshape(2, 12)
    assert torch.equal(model(tokens, torch.arange(12).expand(2, 12)), model(tokens))
