"""Causal self-attention with grouped key and value heads (GQA, arXiv 2305.13245)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from titan.models.layers.rotary import apply_rotary


class CausalAttention(nn.Module):
    """softmax(q kᵀ / √D) v, where a token sees itself and what came before it. Has no weights.

    A module of its own, so that a technique (context parallelism) can put another in its place.
    """

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`query` `[B, H, S, D]`, `key` and `value` `[B, H_kv, S, D]` → `[B, H, S, D]`."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


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

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`x` `[B, S, dim]`, `cos` and `sin` `[S, D/2]` or `[B, S, D/2]` → `[B, S, dim]`."""
        query, key, value = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))  # [B, H, S, D]
        out = self.core(query, key, value)
        out = out.transpose(1, 2).flatten(-2)
        return self.wo(out)
