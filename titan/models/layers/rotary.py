"""Rotary position embedding (arXiv 2104.09864), in real fp32 arithmetic whatever the model's dtype.

Pairs are (i, i + D/2), "half-split", as Hugging Face stores Llama, so that those weights load without permuting.
"""

from __future__ import annotations

import math

import torch
from torch import nn


def inverse_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """Angle per position of each pair, `[head_dim / 2]`: theta^(-2i / head_dim), in float64."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    return theta**-exponents


def stretch_frequencies(
    frequencies: torch.Tensor, factor: float, low_freq_factor: float, high_freq_factor: float, original_max_seq_len: int
) -> torch.Tensor:
    """Llama 3.1's scaling for long contexts: slow pairs are slowed by `factor`, fast ones are left alone.

    A pair turns `original_max_seq_len * frequency / 2π` times over the context the model was first trained on. More
    than high_freq_factor turns: unchanged. Fewer than low_freq_factor: divided by `factor`. Between: blended linearly
    in the number of turns.
    """
    turns = original_max_seq_len * frequencies / (2 * math.pi)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


class RotaryEmbedding(nn.Module):
    """Tables of cosine and sine for every position, `[max_seq_len, head_dim / 2]` in fp32.

    The tables are buffers that no checkpoint holds: `init_buffers` of the model rebuilds them on every path.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, frequencies: torch.Tensor, max_seq_len: int) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.max_seq_len = max_seq_len
        for name in ("cos", "sin"):
            self.register_buffer(
                name, torch.empty(max_seq_len, len(frequencies), dtype=torch.float32), persistent=False
            )

    def fill(self, device: torch.device) -> None:
        """Compute the tables, angles in float64: at position 131,071 an fp32 angle is off by up to 0.004 rad."""
        positions = torch.arange(self.max_seq_len, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, self.frequencies)
        self.cos = angles.cos().float().to(device)
        self.sin = angles.sin().float().to(device)

    def forward(self, seq_len: int, positions: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, each `[S, D/2]`, or `[B, S, D/2]` for given positions `[B, S]`."""
        if positions is None:
            return self.cos[:seq_len], self.sin[:seq_len]
        return self.cos[positions], self.sin[positions]


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs of `x` `[B, S, H, D]` by the angles of their positions; the result has x's dtype."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same for every head
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
