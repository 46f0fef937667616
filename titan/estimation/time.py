"""How long a step takes: a roofline per pass of a block, and what of the communication it can't hide.

An honest band, not a promise. The constants were fitted on published rows of H100s (tests/estimation holds them out in
turn); the same configuration has become a third faster within nine months of software, and a network of other make, or
of more than about a thousand devices, isn't known. `Calibration` scales all of it by one run that was measured.

    pass       χ · max(compute, FSDP's exchange), forward and backward of a block
    compute    linears/R + attention/R_a + bytes/(η·BW) + exchanges of TP and CP that nothing hides
    pipeline   p · slowest rank · (m·v + pp − 1)/v
    besides    head and loss, the first gather and the last reduce-scatter, 28 bytes per weight of the update
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from titan.estimation.communication import group_shapes, stream_exchanges
from titan.estimation.estimate import Traffic
from titan.estimation.flops import block_passes, head_flops
from titan.estimation.hardware import Hardware
from titan.estimation.layout import BYTES, Layout, Stage
from titan.estimation.schedule import bubble

BAND = 0.25  # of nine held-out rows in ten the error is smaller
UNSURE_RANKS = 1000  # beyond which congestion and stragglers count that no constant here knows
_OPEN_REPLICAS = 0.5  # of the sum over copies; a guess, as the next two: bytes/s of a rank's share of its host
_HOST_LINK, _HOST_MEMORY = 25e9, 12e9

_NAMES = {size: name for name, size in reversed(BYTES.items())}  # bfloat16 rather than float16


def rounded(value: float) -> str:
    """Two significant digits."""
    if abs(value) < 1e-3:
        return "<0.001" if value else "0"
    digits = 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.{max(0, digits)}f}"


def banded(value: float) -> str:
    """Two digits, with how far it may be off."""
    return f"{rounded(value)} ({rounded(value * (1 - BAND))} to {rounded(value * (1 + BAND))})"


@dataclass(frozen=True)
class Constants:
    """Which part of a peak is reached.

    Attributes:
        linear, linear_float8, attention, memory, link, network: shares of the peaks.
        attention_backward: speed of attention's backward over that of its forward.
        exposed_async: share of TP's exchanges that async TP leaves in the open.
        overlap: a block's pass over the larger of compute and exchange.
        eager: time of compute without torch.compile over that with it.
        pipeline: time of a pipeline over that of its schedule.
        step_seconds: of a step, for all that isn't named.
        few_tokens: of a product, at which it has half its speed. A guess: no published row has fewer than 8,192.
        hop_seconds: of a ring's step within a node, and between nodes. A guess as well.
    """

    linear: float = 0.61
    linear_float8: float = 0.50
    attention: float = 0.23
    attention_backward: float = 0.8
    memory: float = 0.92
    link: float = 0.77
    network: float = 0.85
    exposed_async: float = 0.67
    overlap: float = 1.045
    eager: float = 1.23
    pipeline: float = 1.04
    step_seconds: float = 0.010
    few_tokens: float = 512
    hop_seconds: tuple[float, float] = (1e-6, 5e-6)


CONSTANTS = Constants()


@dataclass(frozen=True)
class StepTime:
    """A step's time and what of it is communication.

    Attributes:
        seconds: of the step.
        bubble: share of it that a pipeline's ranks idle.
        exposed: share, 0 to 1, of each dimension's exchanges that nothing hides.
        scale: what a measured run multiplied the model's seconds by; 1 without one.
        unsure: beyond what the constants were fitted on.
    """

    seconds: float
    bubble: float
    exposed: dict[str, float]
    scale: float = 1.0
    unsure: bool = False

    def scaled(self, factor: float) -> StepTime:
        """By a run that was measured."""
        return replace(self, seconds=self.seconds * factor, scale=factor)


def bandwidth(layout: Layout, hardware: Hardware, dim: str, constants: Constants = CONSTANTS) -> float:
    """Bytes/s that a rank sends in a collective over a dimension of the mesh.

    Within a node over its links. Else every node's ring goes through the adapters of as many ranks as the group has
    there: with tp 1 all of them, with tp 8 one.
    """
    inner, size = _place(layout, dim)
    link = constants.link * hardware.link_bandwidth
    if inner * size <= hardware.ranks_per_node:
        return link
    in_node = max(1, hardware.ranks_per_node // inner)
    adapters = in_node if dim != "pp" else 1
    return min(link, adapters * constants.network * hardware.network_bandwidth)


def latency(layout: Layout, hardware: Hardware, dim: str, constants: Constants = CONSTANTS) -> float:
    """Seconds of a ring of a dimension's ranks however little it carries."""
    inner, size = _place(layout, dim)
    return constants.hop_seconds[inner * size > hardware.ranks_per_node] * (size - 1)


def _place(layout: Layout, dim: str) -> tuple[int, int]:
    """Ranks between neighbours of a group, and the ranks of the group."""
    inner = {"tp": 1, "cp": layout.tp, "fsdp": layout.tp, "dp_replicate": layout.tp * layout.shards, "loss": layout.tp}
    size = {"tp": layout.tp, "cp": layout.cp, "fsdp": layout.shards, "dp_replicate": layout.dp_replicate}
    size["loss"] = layout.dp_replicate * layout.shards
    if dim == "pp":
        return layout.world_size // layout.pp, layout.pp
    return inner[dim], size[dim]


def step_time(layout: Layout, hardware: Hardware, constants: Constants = CONSTANTS) -> StepTime:
    """The time of a step."""
    block = _Block(layout, hardware, constants)
    kinds = {(sum(s.layers for s in stages), any(s.head for s in stages)) for stages in layout.stages}
    slowest = max(block.seconds(layers, head) for layers, head in kinds)
    passes = layout.microbatches * layout.accumulation
    idle = bubble(layout)
    computing = slowest * passes / (1 - idle) * (constants.pipeline if layout.pp > 1 else 1)
    edges = block.gather + block.scatter
    shard = layout.model.parameters / (layout.tp * layout.pp * layout.shards)
    touched = (4 * layout.weight + 3 * layout.moment) * shard
    update = touched / (constants.memory * hardware.memory_bandwidth)
    if layout.cpu_offload:
        update = touched / _HOST_MEMORY + 2 * layout.weight * shard * passes / _HOST_LINK
    replicas = 0.0
    if (copies := layout.dp_replicate) > 1:  # beside the last backward pass, which hides about half
        sent = 2 * (copies - 1) / copies * layout.reduce * shard
        replicas = _OPEN_REPLICAS * sent / bandwidth(layout, hardware, "dp_replicate", constants)
    seconds = computing + edges + update + replicas + constants.step_seconds
    return StepTime(seconds, idle, block.exposed, unsure=layout.world_size > UNSURE_RANKS)


def exchange_seconds(layout: Layout, hardware: Hardware, row: Traffic, constants: Constants = CONSTANTS) -> float:
    """How long what a rank sends takes, hidden or not."""
    return row.bytes / bandwidth(layout, hardware, row.dim, constants)


class _Block:
    """Seconds of a block and a microbatch."""

    def __init__(self, layout: Layout, hardware: Hardware, constants: Constants) -> None:
        self.layout, self.constants = layout, constants
        peaks = hardware.peak_flops
        half = peaks.get(_NAMES[layout.element], peaks["bfloat16"])
        busy = layout.tokens / (layout.tokens + constants.few_tokens)
        self.linear = busy * constants.linear * half
        float8 = layout.float8 and "float8" in peaks
        linears = busy * constants.linear_float8 * peaks["float8"] if float8 else self.linear
        self.memory = constants.memory * hardware.memory_bandwidth
        attention = constants.attention * half
        flops = block_passes(layout)
        link = bandwidth(layout, hardware, "tp", constants) if layout.tp > 1 else 1.0
        stream = layout.element * layout.tokens * layout.model.dim * (layout.tp - 1) / layout.tp
        exposed = constants.exposed_async if layout.async_tp else 1.0
        gathers, scatters, gathers_back, scatters_back = stream_exchanges(layout)
        slow = 1.0 if layout.compiled else constants.eager
        forward_bytes, backward_bytes = _memory_traffic(layout)
        again = layout.checkpointing.mode == "full"
        exchanges = constants.hop_seconds[0] * (layout.tp - 1)
        self.forward = (
            slow * (flops.linear_forward / linears + forward_bytes / self.memory)
            + flops.attention_forward / 2 / attention
            + exposed * (gathers + scatters) * (stream / link + exchanges)
        )
        self.backward = (
            slow * (flops.linear_backward / linears + (backward_bytes + (forward_bytes if again else 0)) / self.memory)
            + flops.attention_backward / 2 / (attention * constants.attention_backward)
            + exposed * (gathers_back + scatters_back) * (stream / link + exchanges)
        )
        keys = 2 * layout.element * layout.tokens * layout.model.key / layout.tp * (layout.cp - 1)
        if layout.cp > 1:  # nothing hides it
            seconds = keys / bandwidth(layout, hardware, "cp", constants) + latency(layout, hardware, "cp", constants)
            self.forward += seconds
            self.backward += (2 if again else 1) * seconds
        shapes = sum(rows * columns[0] if columns else rows for rows, *columns in _one_block(layout))
        network = bandwidth(layout, hardware, "fsdp", constants)
        share = (layout.shards - 1) / layout.shards if layout.wrapped else 0.0
        width = 1 if layout.float8_gather else layout.element
        hops = latency(layout, hardware, "fsdp", constants) if share else 0.0
        self.gather = width * shapes * share / network + hops
        self.scatter = layout.reduce * shapes * share / network + hops

    def seconds(self, layers: int, head: bool) -> float:
        """Of a microbatch in so many blocks, and in the head with its loss."""
        layout, seconds = self.layout, layers * sum(self.both_passes())
        if not head:
            return seconds
        logits = layout.tokens * layout.vocabulary
        touched = (40 if layout.reference and not layout.compiled_loss else 20) * logits
        return seconds + head_flops(layout) / self.linear + touched / self.memory

    @property
    def exposed(self) -> dict[str, float]:
        """Share of each dimension's exchanges that nothing hides."""
        late = sum(self.both_passes()) - self.constants.overlap * (self.forward + self.backward)
        weights = self.gather * (2 if self.layout.reshards else 1) + self.scatter
        fsdp = min(1.0, late / weights) if weights and late > 1e-9 else 0.0
        tp = self.constants.exposed_async if self.layout.async_tp else 1.0
        return {"fsdp": fsdp, "tp": tp, "cp": 1.0, "pp": 0.0, "dp_replicate": _OPEN_REPLICAS, "loss": 1.0}

    def both_passes(self) -> tuple[float, float]:
        """Forward and backward, with what FSDP's exchanges add where they are the longer."""
        scatter = self.scatter / self.layout.microbatches  # once per batch of a pipeline
        again = self.gather if self.layout.reshards else 0.0
        gather = again or self.gather / self.layout.microbatches
        overlap = self.constants.overlap
        return max(overlap * self.forward, gather), max(overlap * self.backward, again + scatter)


def _one_block(layout: Layout) -> list[tuple[int, ...]]:
    return group_shapes(layout, Stage(1, False, False))[0]


def _memory_traffic(layout: Layout) -> tuple[float, float]:
    """Bytes that a block reads and writes, forward and backward.

    Weights are read in both passes and their gradients written; a pipeline's microbatches add theirs up.
    """
    model, share = layout.model, layout.tokens / layout.tp
    eager = 0 if layout.compiled else 52 * model.dim + 40 * (model.query + model.key)
    forward = 18 * model.dim + 8 * model.query + 4 * model.key + 6 * model.ffn_dim + eager
    backward = 28 * model.dim + 12 * model.query + 4 * model.key + 10 * model.ffn_dim + eager
    weights = layout.element * sum(model.products.values()) / layout.tp
    adding = (2 * layout.reduce + layout.element) / layout.element if layout.microbatches > 1 else 0
    return share * forward + weights, share * backward + (2 + adding) * weights
