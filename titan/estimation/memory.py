"""What a Llama block keeps between its forward and its backward pass, in closed form.

Bytes on one rank, per layer and microbatch in flight. A rank has T tokens of a microbatch (rows · sequence / cp),
T_s = T / tp of them between products (T without sequence parallelism). An element has e bytes, t = tp; q, k, d, f are
the widths of queries, keys (and values), residual stream and feed-forward; h counts query heads:

    full    e·T_s·d                            the block's input
    op      full
            + e·T·(2q + k)/t + 4·T·h/t         results of wq, wv, attention, and attention's log-sum-exp
            + e·T·f/t + (e·T_s·d if t > 1)     results of w1, and of wo, summed over ranks
    none    2·e·T_s·d + 2·e·T_n·d + 8·T_s      of both norms: inputs, outputs (gathered: T_n = T if t > 1, else T_s),
                                               and a number per token
            + e·T·(2q + 2k)/t + 4·T·h/t        of attention: queries, keys, values, result, log-sum-exp
            + 4·e·T·f/t                        results of w1, of w3, of silu, and the product of the last two

"op" and "full" are the same in compiled blocks and with context parallelism. Of "none", a compiled block computes silu
again (3 instead of 4); with context parallelism the result of attention is there twice (3q), and keys and values that
were gathered are those of all ranks (2k·cp). Weights aren't counted, nor rotary tables, which all blocks share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class BlockShape:
    """A block's sizes, and what a rank has of a microbatch.

    Attributes:
        tokens: of a microbatch, on this rank: rows · sequence / cp.
        dim: width of the residual stream.
        n_heads, n_kv_heads, head_dim, ffn_dim: of the whole block.
        element: bytes of an element of the activations.
        tp: ranks that share each product.
        sequence_parallel: with tp, the stream is split over the sequence between products.
        cp: ranks that share each sequence.
        ring: with cp, keys and values go round instead of being gathered.
    """

    tokens: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    element: int = 2
    tp: int = 1
    sequence_parallel: bool = True
    cp: int = 1
    ring: bool = False


def saved_bytes(
    mode: Literal["none", "full", "op"], shape: BlockShape, *, compiled: bool = False, fused_norm: bool = True
) -> int:
    """Bytes that a block keeps from its forward to its backward pass.

    Args:
        mode: of activation checkpointing.
        compiled: by torch.compile, whose norm is fused on any device.
        fused_norm: the RMS norm is one operator, as on accelerators. On CPUs it is several, which keep its input and
            the input over its root mean square, both in float32, in place of the input.
    """
    split_tokens = shape.tokens // shape.tp if shape.sequence_parallel else shape.tokens
    stream = shape.element * split_tokens * shape.dim
    if mode == "full":
        return stream
    query = shape.element * shape.tokens * shape.n_heads * shape.head_dim // shape.tp
    key = shape.element * shape.tokens * shape.n_kv_heads * shape.head_dim // shape.tp
    log_sum_exp = 4 * shape.tokens * shape.n_heads // shape.tp
    hidden = shape.element * shape.tokens * shape.ffn_dim // shape.tp
    if mode == "op":
        return stream + 2 * query + key + log_sum_exp + hidden + (stream if shape.tp > 1 else 0)
    normed = shape.element * shape.tokens * shape.dim if shape.tp > 1 else stream
    norm = (stream if fused_norm or compiled else 8 * split_tokens * shape.dim) + 4 * split_tokens + normed
    results, everyones = (1, 1) if shape.cp == 1 else (2, 1 if shape.ring else shape.cp)
    attention = (1 + results) * query + 2 * key * everyones + log_sum_exp
    return 2 * norm + attention + (3 if compiled else 4) * hidden
