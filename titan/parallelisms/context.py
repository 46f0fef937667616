"""Context parallelism: the tokens of every sequence are cut over the ranks of the cp dimension.

All layers but attention look at one token at a time and need nothing but their tokens' positions. Attention needs the
keys and values of every earlier token, and gets them in one of two ways:

- "allgather": one collective brings all keys and values to every rank, before anything is computed (the Llama 3 paper,
  arXiv 2407.21783, section 3.3.2). With grouped heads they are small beside the queries, and any mask is possible; but
  each attention keeps those of the whole sequence for its backward.
- "alltoall": blocks of keys and values go round the ring of ranks while others are computed (ring_attention.py). A rank
  keeps its own block and holds two more, however long the sequence.

What one attention sends per rank with "allgather", for E = B * H_kv * S/cp * D elements of a key block in a dtype of
w bytes (a ring algorithm's count; what a rank receives is the same):

    forward     1 all-gather of 2Ew per rank: 2Ew * (cp - 1) bytes; with documents another: 8B * S/cp * (cp - 1)
    backward    1 reduce-scatter of 2Ew * cp in all: 2Ew * (cp - 1) bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan.config.errors import UserError
from titan.models.layers.attention import CausalAttention, causal_mask, masked_attention
from titan.parallelisms.ring_attention import flash_refusal, ring_attention


@dataclass(frozen=True)
class SequenceShards:
    """Which tokens of a sequence a rank holds.

    A later token attends to more keys, so with one chunk each the first rank would idle while the last one works.
    Balanced, the sequence is cut into 2 * degree chunks and rank r holds an early and a late one: r and
    2 * degree - 1 - r.
    """

    rank: int
    degree: int
    balanced: bool

    @property
    def n_chunks(self) -> int:
        """Chunks of a whole sequence: its length must be a multiple of this."""
        return 2 * self.degree if self.balanced else self.degree

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks of `rank`, ascending, as they lie in its memory."""
        return (rank, 2 * self.degree - 1 - rank) if self.balanced else (rank,)

    def take(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's tokens of `x` `[B, S]` → `[B, S/cp]`, contiguous, a copy.

        Raises:
            ValueError: S is not a multiple of the number of chunks.
        """
        if x.shape[dim] % self.n_chunks:
            raise ValueError(f"a sequence of {x.shape[dim]} tokens can't be cut into {self.n_chunks} equal chunks")
        pieces = x.chunk(self.n_chunks, dim)
        return torch.cat([pieces[chunk] for chunk in self.chunks(self.rank)], dim)

    def positions(self, seq_len: int, device: torch.device | None = None) -> torch.Tensor:
        """Global positions of this rank's tokens in local order, `[S/cp]` int64."""
        return self.take(torch.arange(seq_len, device=device), dim=0)

    def join(self, shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """What every rank took, by rank → the whole in the order of the sequence."""
        pieces: list[torch.Tensor | None] = [None] * self.n_chunks
        for rank, shard in enumerate(shards):
            chunks = self.chunks(rank)
            for chunk, piece in zip(chunks, shard.chunk(len(chunks), dim), strict=True):
                pieces[chunk] = piece
        return torch.cat([piece for piece in pieces if piece is not None], dim)


class ContextParallelAttention(nn.Module):
    """`CausalAttention` over a sequence that is cut over the ranks of `mesh`. Collective: all ranks call it alike."""

    def __init__(self, mesh: DeviceMesh, rotate_method: Literal["allgather", "alltoall"], balanced: bool) -> None:
        super().__init__()
        self.group = mesh.get_group()
        self.shards = SequenceShards(mesh.get_local_rank(), mesh.size(), balanced)
        self.rotate_method = rotate_method

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`query` `[B, H, S/cp, D]`, `key` and `value` `[B, H_kv, S/cp, D]` → `[B, H, S/cp, D]`.

        Args:
            documents: `[B, S/cp]`, the number of each token's document; a token then sees only its own document.

        Raises:
            UserError: documents with "alltoall", or a dtype or a size of heads that it can't compute with.
        """
        if self.rotate_method == "alltoall":
            if documents is not None:
                raise UserError(
                    'parallelism.context_parallel_rotate_method = "alltoall" can\'t keep documents apart: set it to '
                    '"allgather", or let tokens see earlier documents'
                )
            return ring_attention(query, key, value, self.group, self.shards.balanced)
        keys, values = self._gather(torch.stack((key, value)), dim=-2).unbind()
        all_documents = None if documents is None else self._gather(documents, dim=-1)
        chunks = self.shards.chunks(self.shards.rank)
        out = []
        for chunk, part in zip(chunks, query.chunk(len(chunks), dim=2), strict=True):
            end = (chunk + 1) * part.shape[2]  # no query of this chunk sees a key from here on
            seen = None if all_documents is None else all_documents[:, :end]
            out.append(attend(part, keys[:, :, :end], values[:, :, :end], seen))
        return torch.cat(out, dim=2)

    def _gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """`x` with S/cp tokens on `dim` → S tokens in the order of the sequence; its backward is a reduce-scatter.

        The functional collective is differentiable and torch.compile sees it; `wait_tensor`, unlike the result's own
        `.wait()`, keeps the gradient.
        """
        gathered = funcol.wait_tensor(funcol.all_gather_single(x.unsqueeze(0).contiguous(), 0, self.group))
        return self.shards.join(gathered.unbind(), dim)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """Causal attention of the last n of m tokens, `[B, H, n, D]`, to all m, `[B, H_kv, m, D]`.

    Args:
        documents: `[B, m]`, when tokens see only their own document.
    """
    n, m = query.shape[2], key.shape[2]
    if documents is None and n == m:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    if documents is None and query.device.type != "cpu" and flash_refusal(query) is None:
        # For n < m this operator's causal mask ends at the lower right, where scaled_dot_product_attention's begins at
        # the upper left. torch.nn.attention.bias.causal_lower_right does the same, but torch.compile can't trace it.
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
    if documents is None:
        documents = torch.zeros(1, m, dtype=torch.int64, device=query.device)  # all of one
    return masked_attention(query, key, value, causal_mask(documents, n))


def apply_context_parallel(
    model: nn.Module, mesh: DeviceMesh, rotate_method: Literal["allgather", "alltoall"], balanced: bool
) -> None:
    """Put a `ContextParallelAttention` in the place of every `CausalAttention` of `model`, in place.

    The model must then be called with this rank's part of the tokens and their positions, as `SequenceShards` of the
    same mesh and `balanced` takes them.

    Args:
        mesh: the cp dimension alone. Over one rank nothing is replaced.
    """
    if mesh.size() == 1:
        return
    for name, module in list(model.named_modules()):
        if isinstance(module, CausalAttention):
            model.set_submodule(name, ContextParallelAttention(mesh, rotate_method, balanced))
