"""Copies of tensors in the host's memory, to be written while training goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from titan.observability.device import pin_memory_of, pins_memory


class Staging:
    """Copies into buffers that are kept for the next time: fresh memory costs as much as the copy.

    Args:
        for_another_process: keep the buffers in memory that is shared between processes, pinned where a device can
            write to it on its own.
    """

    def __init__(self, *, for_another_process: bool) -> None:
        self._shared = for_another_process
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors as they are once all work that is queued on their device is done; this waits for it.

        Returns:
            By the same names, tensors or DTensors of the same layout, until the next call overwrites them.
        """
        staged = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        for device in {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        return staged

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (local.shape, local.dtype):
            buffer = self._buffers[name] = self._allocate(local)
        buffer.copy_(local, non_blocking=True)
        if not isinstance(tensor, DTensor):
            return buffer
        # DTensor.from_local would move it back to the mesh's device.
        return DTensor(buffer, tensor._spec, requires_grad=False)

    def _allocate(self, local: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty_like(local, device="cpu", memory_format=torch.contiguous_format)
        if self._shared:
            buffer.share_memory_()
            if pins_memory(local.device.type):
                pin_memory_of(buffer)
        return buffer
