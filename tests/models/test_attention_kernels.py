"""FlexAttention and variable-length attention give what SDPA with a mask gives, as far as a CPU can tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention

from tests.distributed.tiny_models import UNTIED
from titan.config.job_config import ActivationCheckpoint, Compile
from titan.models.layers import attention_kernels
from titan.models.layers.attention import CausalAttention
from titan.models.layers.attention_kernels import (
    FlexAttention,
    VarlenAttention,
    apply_attention_kernel,
    block_mask,
    cumulative_lengths,
)
from titan.models.llama.model import Llama
from titan.parallelisms.activation_checkpoint import checkpoint_within_blocks
from titan.parallelisms.compile import apply_compile
from titan.training.initialize import initialize_weights, materialize

# Lengths of the documents in each row of 160 tokens, more than a block of FlexAttention's (128).
ROWS = [[160], [1, 130, 29], [100, 28, 32]]


@pytest.fixture
def documents() -> torch.Tensor:
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in ROWS])


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    """Four heads of queries, two of keys and values."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(len(ROWS), 160, heads, 16, generator=generator).transpose(1, 2) for heads in (4, 2, 2)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_is_sdpa(inputs: list[torch.Tensor], documents: torch.Tensor) -> None:
    flex, sdpa = FlexAttention(), CausalAttention()
    torch.testing.assert_close(flex(*inputs), sdpa(*inputs))
    found, expected = flex(*inputs, block_mask(documents)), sdpa(*inputs, documents)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(expected, sdpa(*inputs), atol=1e-2)


def loss_and_norm(model: Llama, documents: torch.Tensor) -> tuple[float, float]:
    """Of tokens without meaning."""
    model.zero_grad()
    tokens = torch.arange(documents.numel()).reshape(documents.shape) ** 2 % 101
    loss = model(tokens, documents=documents).logsumexp(-1).mean()
    loss.backward()
    return loss.item(), torch.nn.utils.get_total_norm(p.grad for p in model.parameters()).item()  # type: ignore[misc]


def test_flex_in_compiled_and_checkpointed_blocks(documents: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also its backward, which works on CPUs but isn't offered there: it stores all scores."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    losses = []
    for flex in (False, True):
        torch._dynamo.reset()
        with torch.device("meta"):
            model = Llama(replace(UNTIED, max_seq_len=160))
        if flex:
            apply_attention_kernel(model, "flex")
            model.prepare_documents = block_mask
            checkpoint_within_blocks(model.layers, ActivationCheckpoint())
            apply_compile(model.layers.values(), Compile(backend="aot_eager"))
        materialize(model, torch.device("cpu"))
        initialize_weights(model, 0)
        losses.append([loss_and_norm(model, documents), loss_and_norm(model, documents.flip(1))])
    torch._dynamo.reset()
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-5)
    assert losses[1][1] == pytest.approx(losses[0][1], rel=1e-5)


def test_blocks_that_are_hidden_as_a_whole_are_left_out(documents: torch.Tensor) -> None:
    """Blocks of keys that each block of 128 queries sees: only in the last row does a document begin with a block."""
    mask = block_mask(documents)
    assert mask.full_kv_num_blocks is not None
    assert (mask.kv_num_blocks + mask.full_kv_num_blocks)[:, 0].tolist() == [[1, 2], [1, 2], [1, 1]]


def test_cumulative_lengths_run_over_all_rows(documents: torch.Tensor) -> None:
    found = cumulative_lengths(documents)
    assert found.dtype == torch.int32
    assert found.tolist() == [0, 160, 161, 291, 320, 420, 448, 480]


def each_alone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    most_queries: int,
    most_keys: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What varlen_attn is documented to give, a sequence at a time: `[T, H, D]` of all → the same."""
    assert query_ends.tolist() == key_ends.tolist() and query_ends.diff().max() <= min(most_queries, most_keys)
    assert window_size == (-1, 0) and enable_gqa
    parts: Any = zip(*(x.tensor_split(query_ends[1:-1].long()) for x in (query, key, value)), strict=True)
    outs = [CausalAttention()(*(x.transpose(0, 1).unsqueeze(0) for x in part)) for part in parts]
    return torch.cat([out.squeeze(0).transpose(0, 1) for out in outs])


def test_varlen_is_sdpa(inputs: list[torch.Tensor], documents: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "varlen_attn", each_alone)
    varlen, sdpa = VarlenAttention(), CausalAttention()
    torch.testing.assert_close(varlen(*inputs), sdpa(*inputs))
    found, expected = varlen(*inputs, cumulative_lengths(documents)), sdpa(*inputs, documents)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_every_core_is_replaced(documents: torch.Tensor) -> None:
    for backend, kernel in (("flex", FlexAttention), ("varlen", VarlenAttention)):
        model = nn.ModuleDict({"a": nn.ModuleDict({"core": CausalAttention()}), "b": nn.Linear(2, 2)})
        prepare = apply_attention_kernel(model, backend)  # type: ignore[arg-type]
        assert isinstance(model.get_submodule("a.core"), kernel)
        assert isinstance(model["b"], nn.Linear) and callable(prepare)
