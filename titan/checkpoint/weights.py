"""A model's weights wherever they are: in this run's memory, spread over ranks, or in files of some format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from titan.checkpoint.state import TensorInfo, describe, described
from titan.config.errors import UserError
from titan.parallelisms.float8 import unwrapped


class Weights(Protocol):
    """Tensors by the model's names; one at a time is read."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """What there is. With a pipeline each rank has some."""

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor, whole, of this type."""


class LiveWeights:
    """A running model's.

    Args:
        tensors: this rank's, by parameter name; DTensors where they are sharded.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {name: unwrapped(tensor.detach()) for name, tensor in tensors.items()}
        self.infos = describe(self._tensors)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Collective over the ranks that hold the tensor."""
        from torch.distributed.tensor import DTensor

        tensor = self._tensors[name]
        if not isinstance(tensor, DTensor):
            return tensor.to(dtype)
        # Cast before it is gathered, so that no rank holds two whole ones. What is kept in the CPU's memory is gathered
        # where its mesh's collectives work.
        whole: torch.Tensor = tensor.to(device=tensor.device_mesh.device_type, dtype=dtype).full_tensor()  # type: ignore[attr-defined]
        return whole


@dataclass(frozen=True)
class StoredWeights:
    """A file's or a folder's.

    Attributes:
        infos: what there is.
        get: reads a tensor by its name, as it is stored.
    """

    infos: Mapping[str, TensorInfo]
    get: Callable[[str], torch.Tensor]

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.get(name).to(dtype)


def exported(info: TensorInfo, dtype: torch.dtype | None) -> TensorInfo:
    """What a tensor becomes when floating-point ones are cast to this type; None casts nothing."""
    return info if dtype is None or not info.dtype.is_floating_point else TensorInfo(info.shape, dtype)


def refuse_other_model(place: str, missing: Sequence[str], unexpected: Sequence[str], reshaped: Sequence[str]) -> None:
    """Refuse weights that aren't a model's.

    Args:
        place: where they are.
        missing, unexpected: names.
        reshaped: names with both shapes.

    Raises:
        UserError: any of these isn't empty; it lists the first few.
    """
    if found := described({"missing": missing, "not the model's": unexpected, "of another shape": reshaped}):
        raise UserError(f"the weights in {place} are of another model:\n" + "\n".join(found))
