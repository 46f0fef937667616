"""Llama as a plain torch module: no parallelism, no device, no initial values here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from titan.models.layers.attention import Attention
from titan.models.layers.feed_forward import FeedForward
from titan.models.layers.head import Head, Labels
from titan.models.layers.norms import build_norm
from titan.models.layers.rotary import RotaryEmbedding, inverse_frequencies, stretch_frequencies
from titan.models.llama.sizes import LlamaSizes
from titan.models.spec import Constant, Normal


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then h + feed_forward(norm(h))."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.attention_norm = build_norm(sizes.norm_type, sizes.dim, sizes.norm_eps)
        self.attention = Attention(sizes.dim, sizes.n_heads, sizes.n_kv_heads, sizes.head_dim)
        self.ffn_norm = build_norm(sizes.norm_type, sizes.dim, sizes.norm_eps)
        self.feed_forward = FeedForward(sizes.dim, sizes.ffn_dim)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, documents: Any | None = None
    ) -> torch.Tensor:
        """`x` `[B, S, dim]`, rotary tables `[S, D/2]` or `[B, S, D/2]` → `[B, S, dim]`."""
        h = x + self.attention(self.attention_norm(x), cos, sin, documents)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """Embedding, blocks, norm, head.

    The blocks are a ModuleDict keyed by their number, so that a part of them keeps its names. In a pipeline stage the
    modules of other stages are None or missing, and what goes in and out is the residual stream.
    """

    # The documents of a batch as the attention kernel wants them, made once for all blocks (layers/attention.py).
    prepare_documents: Callable[[torch.Tensor], Any] = staticmethod(lambda documents: documents)

    tok_embeddings: nn.Embedding | None
    norm: nn.Module | None
    output: Head | None

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.tok_embeddings = nn.Embedding(sizes.vocab_size, sizes.dim)
        frequencies = inverse_frequencies(sizes.head_dim, sizes.rope_theta)
        if (scaling := sizes.rope_scaling) is not None:
            frequencies = stretch_frequencies(
                frequencies,
                scaling.factor,
                scaling.low_freq_factor,
                scaling.high_freq_factor,
                scaling.original_max_seq_len,
            )
        self.rotary = RotaryEmbedding(frequencies, sizes.max_seq_len)
        self.layers = nn.ModuleDict({str(layer): TransformerBlock(sizes) for layer in range(sizes.n_layers)})
        self.norm = build_norm(sizes.norm_type, sizes.dim, sizes.norm_eps)
        self.output = Head(sizes.dim, sizes.vocab_size)
        self.tie_weights()

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor | None = None,
        labels: Labels | None = None,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens `[B, S]` → logits `[B, S, V]`, or → the sum of the labels' losses, a scalar.

        Args:
            x: tokens; in a pipeline stage without the embedding, the stream `[B, S, dim]`.
            positions: of the tokens, `[B, S]`; 0 … S − 1 when None.
            labels: without them logits are returned; a stage without the head has no use for them.
            documents: the number of each token's document, `[B, S]`; a token then sees only its own document.
        """
        h = x if self.tok_embeddings is None else self.tok_embeddings(x)
        cos, sin = self.rotary(x.shape[1], positions)
        seen = None if documents is None else self.prepare_documents(documents)
        for block in self.layers.values():
            h = block(h, cos, sin, seen)
        h = h if self.norm is None else self.norm(h)
        return h if self.output is None else self.output(h, labels)

    def parameter_init(self, name: str) -> Normal | Constant:
        """Initial values of the parameter of this full name.

        Matrices: standard deviation 0.02; those that add to the residual stream (wo, w2) of layer l are smaller by
        √(2(l + 1)), which keeps the stream's variance from growing with depth. Head (and an embedding tied to it):
        1 / (4√dim), so that the first logits have variance 1/16 at any width and the first loss is ln V + 1/32.
        """
        if "norm" in name:
            return Constant(0.0 if name.endswith("bias") else 1.0)
        if name == "output.weight" or (name == "tok_embeddings.weight" and self.sizes.tied):
            return Normal(0.25 * self.sizes.dim**-0.5)
        if name.endswith(("wo.weight", "w2.weight")):
            layer = int(name.split(".")[1])
            return Normal(0.02 * (2 * (layer + 1)) ** -0.5)
        return Normal(0.02)

    def init_buffers(self, device: torch.device) -> None:
        """Rebuild the rotary tables."""
        self.rotary.fill(device)

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's, where the sizes say so."""
        if self.sizes.tied and self.output is not None and self.tok_embeddings is not None:
            self.output.weight = self.tok_embeddings.weight
