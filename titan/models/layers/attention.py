"""Causal self-attention with grouped key and value heads (GQA, arXiv 2305.13245)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titan.models.layers.rotary import apply_rotary


class CausalAttention(nn.Module):
    """softmax(q kᵀ / √D) v, where a token sees itself and what came before it. Has no weights.

    A module of its own, so that a technique (context parallelism, another kernel) can put another in its place.
    """

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`query` `[B, H, S, D]`, `key` and `value` `[B, H_kv, S, D]` → `[B, H, S, D]`.

        Args:
            documents: `[B, S]`, the number of each token's document; a token then sees only its own document.
        """
        if documents is None:
            return causal_attention(query, key, value)
        return masked_attention(query, key, value, causal_mask(documents, query.shape[2]))


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of each token to itself and all before it, by a fused kernel."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def causal_mask(documents: torch.Tensor, queries: int) -> torch.Tensor:
    """Which of m tokens the last n of them see: themselves and those before them in their own document.

    Args:
        documents: `[B, m]`, the number of each token's document.
        queries: n.

    Returns:
        `[B, 1, n, m]`, bool.
    """
    tokens = documents.shape[1]
    causal = torch.ones(queries, tokens, dtype=torch.bool, device=documents.device).tril(tokens - queries)
    return causal & (documents[:, None, tokens - queries :, None] == documents[:, None, None, :])


def masked_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention of `query` `[B, H, n, D]` to those of `key` and `value` `[B, H_kv, m, D]` that `mask` lets it see."""
    # On accelerators no fused kernel takes a mask and grouped heads at once; the unfused one stores H * n * m scores.
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class Attention(nn.Module):
    """Multi-head attention; query head h reads key and value head h // (n_heads / n_kv_heads).

    The number of heads is read from the weights' local output at run time, so that a rank that holds a part of the
    heads needs no other module.
    """

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)
        self.core = CausalAttention()

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, documents: Any | None = None
    ) -> torch.Tensor:
        """`x` `[B, S, dim]`, `cos` and `sin` `[S, D/2]` or `[B, S, D/2]` → `[B, S, dim]`.

        Args:
            documents: what `core` takes, when tokens see only their own document.
        """
        query, key, value = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))  # [B, H, S, D]
        out = self.core(query, key, value, documents)
        out = out.transpose(1, 2).flatten(-2)
        return self.wo(out)
