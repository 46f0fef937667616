"""A run in numbers: sizes, degrees, and what decides memory and time. Every closed form is a function of this.

No torch is needed. What stands here of one rank is rank 0's of its dimension, the largest where parts are unequal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from titan.estimation.memory import BlockShape, saved_bytes
from titan.models.spec import Stages
from titan.parallelisms.schedules import split_by_cost

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Mode = Literal["none", "full", "op"]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama, as titan/models/llama/sizes.py has them."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    tied: bool = False
    norm_type: str = "rmsnorm"

    @property
    def query(self) -> int:
        """Width of all queries."""
        return self.n_heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all keys."""
        return self.n_kv_heads * self.head_dim

    @property
    def gains(self) -> int:
        """Parameters of a norm."""
        return {"np_layernorm": 0, "layernorm": 2 * self.dim}.get(self.norm_type, self.dim)

    @property
    def products(self) -> dict[str, int]:
        """Parameters of each of a block's matrices."""
        attention = {"wq": self.query, "wk": self.key, "wv": self.key, "wo": self.query}
        widths = attention | dict.fromkeys(("w1", "w3", "w2"), self.ffn_dim)
        return {name: width * self.dim for name, width in widths.items()}

    @property
    def parameters(self) -> int:
        """Of the whole model; a tied weight counts once."""
        block = sum(self.products.values()) + 2 * self.gains
        return self.n_layers * block + self.gains + (1 if self.tied else 2) * self.vocab_size * self.dim


@dataclass(frozen=True)
class Stage:
    """A stage of the pipeline; the whole model is one with both ends."""

    layers: int
    embedding: bool = True
    head: bool = True


@dataclass(frozen=True)
class Checkpointing:
    """What blocks keep for the backward pass.

    Attributes:
        mode: of the blocks that are checkpointed.
        every: how far those are from each other; between them blocks keep everything.
        budget: share of what "none" keeps beyond "full"; None unless torch.compile chooses under a budget.
        offload: what is kept lies in host memory.
        early_stop: computing again ends once the backward pass has what it needs.
    """

    mode: Mode = "op"
    every: int = 1
    budget: float | None = None
    offload: bool = False
    early_stop: bool = False


@dataclass(frozen=True)
class Layout:
    """One step of a run.

    Attributes:
        stages: of every pipeline rank.
        rows: windows of a microbatch.
        microbatches: that go through the pipeline together; 1 without one.
        accumulation: how many times the local batch, or the pipeline's, is run per step.
        chunks: of the loss; 1 with whole logits.
        element, reduce, weight, moment: bytes of an element of what is computed with, of gradients while they are
            summed, of weights and of the optimizer's moments as they are kept.
        moments: that the optimizer keeps of a weight, a mean over weights.
        wrapped: FSDP gathers and casts; False on one process with one type.
        reference: this is the step of another trainer, whose published figures are compared: "torchtitan-2024" has
            whole logits in fp32, norms of several operators, DTensor's embedding, and keeps embedding and head in
            FSDP's root; "torchtitan-2025" has groups for these.
    """

    model: ModelShape
    stages: tuple[tuple[Stage, ...], ...]
    seq_len: int
    rows: int
    microbatches: int = 1
    accumulation: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    schedule: str = "1F1B"
    csv: str | None = None
    checkpointing: Checkpointing = Checkpointing()
    reshard: Literal["default", "always", "never"] = "default"
    chunks: int = 8
    compiled: bool = False
    compiled_loss: bool = False
    float8: bool = False
    float8_gather: bool = False
    async_tp: bool = False
    sequence_parallel: bool = True
    loss_parallel: bool = True
    ring: bool = False
    balanced: bool = True
    element: int = 2
    reduce: int = 4
    weight: int = 4
    moment: int = 4
    moments: float = 2
    wrapped: bool = True
    cpu_offload: bool = False
    early_step: bool = False
    reference: str | None = None

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the weights."""
        return self.dp_shard * self.cp

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def windows_per_step(self) -> int:
        """Of all ranks."""
        return self.rows * self.microbatches * self.accumulation * self.dp_replicate * self.dp_shard

    @property
    def tokens(self) -> int:
        """Of a microbatch, on one rank."""
        return self.rows * self.seq_len // self.cp

    @property
    def split_tokens(self) -> int:
        """Of the residual stream between products."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding and the head on one rank."""
        return -(-self.model.vocab_size // self.tp)

    @property
    def reshards(self) -> bool:
        """Blocks are freed after their forward pass."""
        return self.reshard == "always" or (self.reshard == "default" and self.pp == 1)

    @property
    def groups_ends(self) -> bool:
        """Embedding and head are groups of FSDP's; else they belong to its root, and stay gathered through the step."""
        return self.reference != "torchtitan-2024" and not self.model.tied

    @property
    def holds_scores(self) -> bool:
        """Attention holds whole matrices of scores, which no closed form counts: in float32 no kernel groups heads."""
        return self.element == 4 and self.model.n_kv_heads != self.model.n_heads

    @property
    def pools_gradients(self) -> bool:
        """Sharded gradients lie in the pool of the stream that computes (`config.derived.keeps_reduced_gradients`)."""
        whole_step = self.accumulation == 1 and self.reduce == self.weight
        return not self.wrapped or (whole_step and not (self.cpu_offload or self.early_step or self.reference))

    @property
    def holds_what_is_sent(self) -> bool:
        """A pipeline's transfers hold what they have sent until the step ends, which is when torch waits for them."""
        waits_soon = self.csv is None and self.schedule in ("GPipe", "1F1B")
        return self.pp > 1 and not waits_soon and self.reference is None

    @cached_property
    def block(self) -> BlockShape:
        model = self.model
        return BlockShape(
            tokens=self.tokens,
            dim=model.dim,
            n_heads=model.n_heads,
            n_kv_heads=model.n_kv_heads,
            head_dim=model.head_dim,
            ffn_dim=model.ffn_dim,
            element=self.element,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            cp=self.cp,
            ring=self.ring,
        )

    @cached_property
    def kept_by_block(self) -> float:
        """Bytes that a block of a microbatch keeps for its backward pass, a mean over blocks."""
        kept, own = self.kept("none"), self.checkpointing
        if own.budget is not None:
            return self.kept("full") + own.budget * (kept - self.kept("full"))
        return (self.kept(own.mode) + (own.every - 1) * kept) / own.every

    def kept(self, mode: Mode) -> int:
        """Bytes that a block of a microbatch keeps under this mode."""
        kept = saved_bytes(mode, self.block, compiled=self.compiled)
        if self.reference and mode == "op" and not self.compiled:  # the result of w2, and with tp that of wo twice
            kept += self.element * self.split_tokens * self.model.dim + self._partial_sum(2)
        return kept

    def _partial_sum(self, count: int) -> int:
        return count * self.element * self.split_tokens * self.model.dim if self.tp > 1 else 0

    def stages_per_rank(self) -> int:
        return max(len(stages) for stages in self.stages)


def even_stages(n_layers: int, ranks: int, per_rank: int) -> tuple[tuple[Stage, ...], ...]:
    """Stages of every rank with layers as even as `parallelisms.schedules.split_by_cost` makes them by default."""
    if ranks * per_rank == 1:
        return ((Stage(n_layers),),)
    modules = Stages(("first",), tuple(f"layers.{layer}" for layer in range(n_layers)), ("last",))
    parts = split_by_cost(modules, ranks * per_rank, 1, 1)
    stages = [Stage(sum("." in name for name in part), "first" in part, "last" in part) for part in parts]
    return tuple(tuple(stages[rank::ranks]) for rank in range(ranks))
