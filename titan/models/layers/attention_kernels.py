"""Attention kernels that skip what documents hide, where `CausalAttention` computes a mask's every score. For GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from titan.models.layers.attention import CausalAttention, causal_attention


class FlexAttention(nn.Module):
    """Blocks of a mask that are hidden as a whole are skipped (FlexAttention, arXiv 2412.05496). To be compiled."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: BlockMask | None = None
    ) -> torch.Tensor:
        """See `CausalAttention`.

        Args:
            documents: as `block_mask` makes it.
        """
        if documents is None:
            return causal_attention(query, key, value)
        out: torch.Tensor = flex_attention(query, key, value, block_mask=documents, enable_gqa=True)
        return out


class VarlenAttention(nn.Module):
    """Each document is a sequence of its own (FlashAttention for sequences of any lengths, arXiv 2307.08691)."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `CausalAttention`.

        Args:
            documents: as `cumulative_lengths` makes it.
        """
        if documents is None:
            return causal_attention(query, key, value)
        rows, _, longest, _ = query.shape  # to know the longest document the host would have to ask the device
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [B * S, H, D]
        past = (-1, 0)  # how many tokens are seen before, all of them, and after
        out = varlen_attn(query, key, value, documents, documents, longest, longest, window_size=past, enable_gqa=True)
        assert isinstance(out, torch.Tensor)
        return out.unflatten(0, (rows, longest)).transpose(1, 2)


def block_mask(documents: torch.Tensor, create: Callable[..., BlockMask] = create_block_mask) -> BlockMask:
    """The mask of documents `[B, S]`, by number, as blocks of tokens: hidden, seen in part, or seen as a whole.

    Args:
        create: `create_block_mask`, or compiled, when it doesn't hold a whole mask at any time.
    """

    def sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (documents[row, query] == documents[row, key])

    rows, tokens = documents.shape
    return create(sees, rows, None, tokens, tokens, device=documents.device)


def cumulative_lengths(documents: torch.Tensor) -> torch.Tensor:
    """Where each document `[B, S]`, by number, begins in all rows laid end to end, and where the last one ends.

    Their number is known to the device alone, so the host waits for it, once a forward pass.

    Returns:
        int32 `[documents + 1]`.
    """
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=documents.numel()).int()


def apply_attention_kernel(model: nn.Module, backend: Literal["flex", "varlen"]) -> Callable[[torch.Tensor], Any]:
    """Put the kernel in the place of every `CausalAttention` of `model`, in place.

    Returns:
        What makes of the documents of a batch, `[B, S]`, what the kernel takes: once for all layers.
    """
    kernel = FlexAttention if backend == "flex" else VarlenAttention
    for name, module in list(model.named_modules()):
        if isinstance(module, CausalAttention):
            model.set_submodule(name, kernel())
    if backend == "flex":
        return partial(block_mask, create=torch.compile(create_block_mask))
    return cumulative_lengths
