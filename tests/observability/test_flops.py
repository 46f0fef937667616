"""FLOPs and MFU: the formula, and the formula against torch's own count of a toy model."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from titan.models.llama.model import Llama
from titan.models.llama.sizes import LlamaSizes
from titan.models.spec import FlopsPerToken, model_families
from titan.observability.flops import CONVENTION, describe_flops, model_flops_utilization, tflops_per_device

LLAMA3_8B_AT_8K = FlopsPerToken(full=57.914e9, causal=51.472e9)


def test_mx_mfu_by_hand() -> None:
    # 57.914 GFLOPs × 7,000 tokens a second = 405.398 TFLOP/s; ÷ 989 = 0.40991.
    assert tflops_per_device(7000.0, LLAMA3_8B_AT_8K) == pytest.approx(405.398)
    assert model_flops_utilization(7000.0, LLAMA3_8B_AT_8K, 989e12) == pytest.approx(0.40991, abs=5e-6)


def test_mx_mfu_is_none_without_a_peak() -> None:
    assert model_flops_utilization(7000.0, LLAMA3_8B_AT_8K, None) is None


def test_mx_mfu_the_convention_is_stated() -> None:
    known = describe_flops(LLAMA3_8B_AT_8K, 989e12)
    assert known.startswith("57.91 GFLOPs per token (51.47 with attention counted as causal)")
    assert "989 TFLOP/s" in known and CONVENTION in known
    assert "MFU is n/a" in describe_flops(LLAMA3_8B_AT_8K, None)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("n_kv_heads", [2, 4])
def test_mx_mfu_agrees_with_torchs_flop_counter(tied: bool, n_kv_heads: int) -> None:
    sizes = LlamaSizes(
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=n_kv_heads,
        head_dim=16,
        ffn_dim=48,
        vocab_size=101,
        max_seq_len=24,
        rope_theta=10_000.0,
        tied=tied,
    )
    batch, seq_len = 3, 24
    model = Llama(sizes)
    model.init_buffers(torch.device("cpu"))
    # The math backend computes the full square of scores, which is what the formula's first number counts.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(batch, seq_len, dtype=torch.int64)).sum().backward()

    # The formula counts a norm's gains as parameters that multiply; torch counts matrix products only.
    gains = (2 * sizes.n_layers + 1) * sizes.dim
    formula = model_families()["llama3"].flops_per_token(sizes, seq_len)
    assert counter.get_total_flops() == (formula.full - 6 * gains) * batch * seq_len
    attention = 12 * sizes.n_layers * sizes.n_heads * sizes.head_dim * seq_len
    assert formula.full - formula.causal == attention / 2


def test_mx_mfu_an_embedding_table_does_not_count() -> None:
    """Tied or not, the same products are computed: the FLOPs are equal, and one vocab × dim is in them."""
    family = model_families()["llama3"]
    sizes = {tied: LlamaSizes(8, 1, 2, 2, 16, 100, 16, 1e4, tied=tied) for tied in (False, True)}
    assert family.flops_per_token(sizes[False], 16) == family.flops_per_token(sizes[True], 16)
    twice = LlamaSizes(8, 1, 2, 2, 16, 200, 16, 1e4)
    assert family.flops_per_token(twice, 16).full - family.flops_per_token(sizes[False], 16).full == 6 * 100 * 8
