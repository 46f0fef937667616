"""What a model family supplies, and the register of families.

A family is one `ModelSpec`. `titan/models/llama/` registers llama2 and llama3; a module named by
`experimental.custom_import` registers more (docs/models.md). This file imports no torch, so that a config can be
checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from titan.config.job_config import JobConfig
    from titan.parallelisms.parallel_dims import ParallelDims
    from titan.parallelisms.pipeline import Pipeline


class Normal(NamedTuple):
    """Initial values: normal with mean 0 and this standard deviation, values clipped at three of them."""

    std: float


class Constant(NamedTuple):
    """Initial values: all the same."""

    value: float


class FlopsPerToken(NamedTuple):
    """Model FLOPs of one token, forward and backward (NUMERICS: 6·P + 12·L·H·D·S; attention halved when causal)."""

    full: float
    causal: float


class Sizes(Protocol):
    """What the rest of titan reads of a family's sizes; families add their own. Must be a dataclass."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_seq_len(self) -> int: ...

    @property
    def norm_type(self) -> str: ...

    @property
    def dim(self) -> int:
        """Width of the residual stream."""

    @property
    def n_layers(self) -> int: ...

    @property
    def tied(self) -> bool:
        """The head shares the embedding's weight."""


S = TypeVar("S", bound=Sizes)


class Stages(NamedTuple):
    """The top-level modules of a model in the order of the forward pass, for cutting it into pipeline stages.

    Attributes:
        first: what goes before the layers.
        layers: the names of the layers.
        last: what comes after them.
    """

    first: tuple[str, ...]
    layers: tuple[str, ...]
    last: tuple[str, ...]


@dataclass(frozen=True)
class HuggingFaceFormat(Generic[S]):
    """How a family's weights lie in a Hugging Face folder: which tensor is which, and what config.json says.

    Attributes:
        model_type: what config.json calls the family.
        names: sizes → the stored name of each of the model's tensors, in the order of the forward pass. A weight that
            is tied is there once.
        copies: sizes → stored names that may be there as well, each with the one whose values it must repeat.
        ignored: ends of stored names that aren't weights.
        vocabulary: the model's names of tensors that have a row per token id.
        config: sizes → what config.json says of them. Raises UserError for sizes that the format doesn't have.
        sizes: config.json → sizes. Raises UserError for what the family doesn't have.
    """

    model_type: str
    names: Callable[[S], Mapping[str, str]]
    copies: Callable[[S], Mapping[str, str]]
    ignored: tuple[str, ...]
    vocabulary: tuple[str, ...]
    config: Callable[[S], dict[str, Any]]
    sizes: Callable[[Mapping[str, Any]], S]


@dataclass(frozen=True)
class ModelSpec(Generic[S]):
    """A model family.

    Attributes:
        name: what `model.name` calls it.
        flavors: sizes by the name that `model.flavor` gives.
        build: makes the model; called under `torch.device("meta")`. The model takes tokens `[B, S]`, and `positions`
            `[B, S]` when they aren't 0 … S − 1, and gives logits `[B, S, V]`; with `labels`, what its `Head` makes of
            them, the loss. A parameter `documents`, `[B, S]`, says that it can keep them apart. It has the methods of
            `TrainableModel`.
        parallelize: `(model, world_mesh, parallel_dims, job_config)` spreads a model or a pipeline stage of it over the
            ranks, in place, before its weights exist.
        flops_per_token: FLOPs at a sequence length.
        stages: how the model may be cut into pipeline stages; a part without some modules has None in their place.
            None: this family has no pipeline.
        pipeline: `(model, world_mesh, parallel_dims, job_config, device)` makes this rank's stages of a model.
        divisible_by_tp: sizes, by their names, that the tensor parallel degree must divide; empty where a family has
            no tensor parallelism.
        huggingface: how its weights are stored for transformers; None where they can't be.
    """

    name: str
    flavors: Mapping[str, S]
    build: Callable[[S], nn.Module]
    parallelize: Callable[[nn.Module, DeviceMesh, ParallelDims, JobConfig], None]
    flops_per_token: Callable[[S, int], FlopsPerToken]
    stages: Callable[[S], Stages] | None = None
    pipeline: Callable[[nn.Module, DeviceMesh, ParallelDims, JobConfig, torch.device], Pipeline] | None = None
    divisible_by_tp: Callable[[S], Mapping[str, int]] = lambda sizes: {}
    huggingface: HuggingFaceFormat[S] | None = None


class TrainableModel(Protocol):
    """What titan asks of a model beyond `nn.Module`."""

    def parameter_init(self, name: str) -> Normal | Constant:
        """How the parameter of this full name starts."""

    def init_buffers(self, device: torch.device) -> None:
        """Fill every buffer; called after the weights got memory, on every path (fresh, resumed, loaded)."""

    def tie_weights(self) -> None:
        """Make tied weights one tensor again, after each module got its own memory. Does nothing when none are."""


_FAMILIES: dict[str, ModelSpec[Any]] = {}


def register_model(spec: ModelSpec[Any]) -> None:
    """Make a family known by its name.

    Raises:
        ValueError: the name is taken by another family.
    """
    if _FAMILIES.get(spec.name, spec) is not spec:
        raise ValueError(f"a model family named {spec.name!r} is registered already")
    _FAMILIES[spec.name] = spec


def model_families() -> Mapping[str, ModelSpec[Any]]:
    """All families by name; titan's own are always there."""
    import titan.models.llama  # noqa: F401  (registers llama2 and llama3)

    return _FAMILIES
