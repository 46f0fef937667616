"""Activation offloading: what checkpointed blocks keep for the backward pass waits for it in host memory.

On accelerators copies run on a stream of their own, beside the one that computes:

    computes    block 0 │ block 1      │ block 2      │ … │ block 2 again │ block 1 again │ block 0 again
    copies              │ out: block 0 │ out: block 1 │ … │ back: block 1 │ back: block 0 │

While a block computes, what the one before it kept is on its way out. When the backward pass reaches a block, what the
one before it kept starts on its way back. So the device holds two blocks' worth at most. What came before is remembered
call by call: a pipeline sends several microbatches through a block before the first of them comes back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titan.config.job_config import ActivationCheckpoint

_LEAST_BYTES = 1024  # a smaller tensor stays: its copy costs more than it does


def offload_activations(blocks: Sequence[nn.Module], settings: ActivationCheckpoint) -> None:
    """Let what each block's `forward` saves wait in host memory, in place. After all else that wraps `forward`.

    Args:
        blocks: checkpointed blocks of a model, or of a pipeline stage.
    """
    calls = Calls(Copies(beside=settings.offload_use_streams))
    for block in blocks:
        block.forward = partial(calls.run, block, block.forward)


class Copies:
    """Copies between a device and the host: at once, or beside what the device computes."""

    def __init__(self, beside: bool) -> None:
        self.beside = beside
        self._stream: torch.Stream | None = None

    def start(self, target: torch.Tensor, source: torch.Tensor, device: torch.device) -> torch.Event | None:
        """Copy, after all that is queued on the device's computing stream so far.

        Returns:
            The end of a copy that runs beside the computation. Before the computing stream waits for it, nobody may use
            `target` or free either tensor: the allocator knows of no stream but the computing one. None: it is over.
        """
        if not self.beside or device.type == "cpu":
            target.copy_(source)
            return None
        if self._stream is None:
            self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        with self._stream:
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, end: torch.Event, device: torch.device) -> None:
        """Let what is queued on the computing stream from now on run after the end of a copy."""
        torch.accelerator.current_stream(device).wait_event(end)


class _Saved:
    """A tensor that a call saved: on the host; on the device too while it leaves, and once it has come back."""

    def __init__(self, tensor: torch.Tensor) -> None:
        local = _local(tensor)
        self.device = local.device
        self.on_device: torch.Tensor | None = local
        self.on_host = torch.empty_strided(
            local.shape, local.stride(), dtype=local.dtype, pin_memory=local.device.type != "cpu"
        )
        self._restore: Callable[[torch.Tensor], torch.Tensor] = lambda local: local
        if isinstance(tensor, DTensor):
            self._restore = partial(
                DTensor.from_local,
                device_mesh=tensor.device_mesh,
                placements=tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )

    def take(self) -> torch.Tensor:
        """The tensor. It is the taker's: freed with the taker's last reference."""
        local, self.on_device = self.on_device, None
        assert local is not None
        return self._restore(local)


class _Call:
    """What one forward call of one block left for its backward.

    It lives as long as its part of the graph, which holds its hooks. Host memory stays filled until then, so that a
    second backward pass through the graph can fetch again.
    """

    def __init__(self, calls: Calls, previous: _Call | None, held_elsewhere: set[int]) -> None:
        """
        Args:
            previous: the call before this one, which the backward pass comes to after it.
            held_elsewhere: storages that stay on the device in any case.
        """
        self._calls, self._held_elsewhere = calls, held_elsewhere
        self.previous = weakref.ref(previous) if previous else None
        self._saved: list[_Saved] = []
        self._end: torch.Event | None = None  # of the last copy that is under way; they end in order
        self._arrived = False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        """Start to move a tensor to the host, or leave it where it is."""
        local = _local(tensor)
        whole = not is_traceable_wrapper_subclass(local)  # its memory isn't that of tensors within it
        movable = whole and 0 not in local.stride() and local.nbytes > _LEAST_BYTES
        if not movable or local.untyped_storage()._cdata in self._held_elsewhere:
            return tensor
        saved = _Saved(tensor)
        self._saved.append(saved)
        self._end = self._calls.copies.start(saved.on_host, local, local.device)
        if self._end is None:
            saved.on_device = None
        return saved

    def unpack(self, packed: torch.Tensor | _Saved) -> torch.Tensor:
        """What was packed, for the backward pass."""
        if not isinstance(packed, _Saved):
            return packed
        if packed.on_device is None or not self._arrived:
            self._calls.reach(self)
        return packed.take()

    def fetch(self) -> None:
        """Start to bring back what isn't on the device."""
        for saved in self._saved:
            if saved.on_device is None:
                host = saved.on_host
                saved.on_device = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=saved.device)
                self._end, self._arrived = self._calls.copies.start(saved.on_device, host, saved.device), False

    def wait(self) -> None:
        """Let the device's computation wait for the copies under way."""
        if self._end is not None:
            self._calls.copies.wait(self._end, self._saved[0].device)
        self._end, self._arrived = None, True

    def leave_device(self) -> None:
        """Free the device's memory once copies under way have ended."""
        self.wait()
        for saved in self._saved:
            saved.on_device = None


class Calls:
    """The calls of the blocks of a model, or of a pipeline stage, and which of them has copies under way."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._last: weakref.ref[_Call] | None = None
        # Held here: their memory must not be freed before their copies have ended, whatever becomes of the graph.
        self._leaving: _Call | None = None
        self._coming: _Call | None = None

    def run(self, block: nn.Module, forward: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """`forward(*args)`, with what it saves on its way to the host when it ends."""
        previous = self._last() if self._last else None
        call = _Call(self, previous, _held_elsewhere(block, args))
        with saved_tensors_hooks(call.pack, call.unpack):
            out = forward(*args)
        if self._leaving is not None:
            self._leaving.leave_device()
        self._leaving, self._last = call, weakref.ref(call)
        return out

    def reach(self, call: _Call) -> None:
        """The backward pass has reached a call: have its tensors on the device, and those of the one before coming."""
        call.fetch()
        call.wait()
        if self._leaving is call:
            self._leaving = None  # each of its tensors is freed when it was used
        if self._coming is not None and self._coming is not call:
            self._coming.leave_device()  # the backward pass went elsewhere
        self._coming = call.previous() if call.previous and self.copies.beside else None
        if self._coming is not None:
            self._coming.fetch()


def _held_elsewhere(block: nn.Module, args: tuple[Any, ...]) -> set[int]:
    """Storages of weights and buffers, and of arguments without gradient, such as rotary tables, which blocks share."""
    shared = [arg for arg in args if isinstance(arg, torch.Tensor) and not arg.requires_grad]
    tensors = [*block.parameters(), *block.buffers(), *shared]
    return {_local(tensor).untyped_storage()._cdata for tensor in tensors}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, outside of the graph."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
