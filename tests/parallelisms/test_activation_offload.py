"""Activation offloading: what moves, that it comes back, and that no memory is freed while it is being copied.

Without an accelerator copies are over at once. What copies beside the computation must obey is shown with copies that
run as late as they may, when somebody waits for them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.parallelisms.test_activation_checkpoint import SIZES, TOKENS, apply, assert_equal, gradients, llama
from titan.models.llama.model import Llama
from titan.parallelisms import activation_offload

Copies = activation_offload.Copies


class Weak:
    """A tensor that may be freed meanwhile."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.ref = StorageWeakRef(tensor.untyped_storage())
        self.dtype, self.place = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

    def get(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)
        assert storage is not None, "freed before its copy had ended"
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.place)


class Late(Copies):
    """Copies that run when their end is waited for. Until then the target holds no numbers."""

    def __init__(self, beside: bool = True) -> None:
        super().__init__(beside)
        self.started: list[tuple[Weak, Weak]] = []
        self.ended = 0

    def start(self, target: torch.Tensor, source: torch.Tensor, device: torch.device) -> Any:
        target.fill_(torch.nan)
        self.started.append((Weak(target), Weak(source)))
        return len(self.started)

    def wait(self, end: Any, device: torch.device) -> None:
        for target, source in self.started[self.ended : end]:
            target.get().copy_(source.get())
        self.ended = max(self.ended, end)

    def finish(self) -> None:
        """All copies that are under way could still run."""
        self.wait(len(self.started), torch.device("cpu"))


class Recorded(Copies):
    """Copies at once, and the shapes of their sources, by direction."""

    def __init__(self, beside: bool = True) -> None:
        super().__init__(beside)
        self.shapes: list[tuple[int, ...]] = []

    def start(self, target: torch.Tensor, source: torch.Tensor, device: torch.device) -> torch.Event | None:
        self.shapes.append(tuple(source.shape))
        return super().start(target, source, device)


def offloaded(monkeypatch: pytest.MonkeyPatch, copies: Copies, model: Llama | None = None, **settings: Any) -> Llama:
    monkeypatch.setattr(activation_offload, "Copies", lambda beside: copies)
    return apply(model or llama(), offload=True, **settings)


MODES: list[dict[str, Any]] = [{"mode": "full"}, {"mode": "selective"}]
BATCHES = [TOKENS, TOKENS.flip(0) + 0, 100 - TOKENS]


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return gradients(llama())


@pytest.fixture(scope="module")
def expected_of_batches() -> dict[str, torch.Tensor]:
    return in_flight(llama())


def in_flight(model: Llama) -> dict[str, torch.Tensor]:
    """Gradients of three microbatches, all of whose forward passes come first."""
    model.zero_grad()
    losses = [model(batch).logsumexp(-1).sum() for batch in BATCHES]
    while losses:
        losses.pop(0).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("settings", MODES, ids=str)
@pytest.mark.parametrize("copies", [Late, Copies])
def test_ac_offload_gradients_with_microbatches_in_flight(
    settings: dict[str, Any], copies: type[Copies], expected_of_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = offloaded(monkeypatch, copies(True), **settings)
    for _ in range(2):
        assert_equal(in_flight(model), expected_of_batches)


@pytest.mark.parametrize("settings", MODES, ids=str)
def test_ac_offload_a_forward_without_backward_changes_nothing(
    settings: dict[str, Any], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Recorded()
    model = offloaded(monkeypatch, copies, **settings)
    assert_equal(gradients(model), expected)
    before = len(copies.shapes)
    with torch.no_grad():
        model(TOKENS)
    assert len(copies.shapes) == before
    model(TOKENS)  # with gradient, but nobody asks for it
    assert_equal(gradients(model), expected)


@pytest.mark.parametrize("settings", MODES, ids=str)
def test_graphs_that_are_dropped_leave_no_copy_without_memory(
    settings: dict[str, Any], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Late()
    model = offloaded(monkeypatch, copies, **settings)
    stream: list[torch.Tensor] = []
    hook = model.layers["3"].register_forward_pre_hook(lambda module, args: stream.append(args[0]))
    dropped = model(TOKENS).logsumexp(-1).sum()
    hook.remove()
    loss = model(TOKENS).logsumexp(-1).sum()
    torch.autograd.grad(dropped, stream)  # the last block's backward pass alone, while the third one's tensors come
    stream.clear()
    del dropped
    loss.backward()
    assert_equal({name: parameter.grad for name, parameter in model.named_parameters()}, expected)
    copies.finish()


def test_a_second_backward_pass_fetches_again(expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = offloaded(monkeypatch, Late(), mode="full")
    loss = model(TOKENS).logsumexp(-1).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert_equal({n: p.grad for n, p in model.named_parameters()}, {n: 2 * grad for n, grad in expected.items()})


@pytest.mark.parametrize(("copies", "left"), [(Copies, []), (Late, ["3"])])
def test_the_device_is_left(copies: type[Copies], left: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a forward pass no block's input is on the device, or, while it is being copied, only the last one's."""
    inputs: dict[str, StorageWeakRef] = {}
    model = offloaded(monkeypatch, copies(True), mode="full")
    for number, block in model.layers.items():
        block.register_forward_pre_hook(
            lambda module, args, number=number: inputs.update({number: StorageWeakRef(args[0].untyped_storage())})
        )
    loss = model(TOKENS).sum()
    assert [number for number, ref in inputs.items() if not ref.expired()] == left
    loss.backward()


class Logged(Copies):
    """The order of copies, of waiting for them, and of whatever else is logged."""

    def __init__(self) -> None:
        super().__init__(beside=True)
        self.log: list[str] = []
        self._hosts: dict[int, int] = {}

    def start(self, target: torch.Tensor, source: torch.Tensor, device: torch.device) -> Any:
        target.copy_(source)
        back = self._hosts.get(source.data_ptr())
        if back is None:
            self._hosts[target.data_ptr()] = len(self._hosts)
        else:
            self.log.append(f"back {back}")
        return 0 if back is None else back

    def wait(self, end: Any, device: torch.device) -> None:
        pass


def test_what_comes_next_is_fetched_while_a_block_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two microbatches in flight: block b of microbatch m is call 4m + b."""
    copies = Logged()
    model = offloaded(monkeypatch, copies, mode="full")
    losses = [model(batch).sum() for batch in BATCHES[:2]]
    for number, block in model.layers.items():
        block.ffn_norm.register_forward_pre_hook(lambda *_, number=number: copies.log.append(f"block {number}"))
    for loss in losses:
        loss.backward()
    first = ["back 3", "back 2", "block 3", "back 1", "block 2", "back 0", "block 1", "block 0"]
    second = ["back 6", "block 3", "back 5", "block 2", "back 4", "block 1", "block 0"]  # the last had not left yet
    assert copies.log == first + second


LONG = torch.cat([TOKENS, TOKENS], dim=1)  # with rotary tables that are large enough to move
STREAM = (*LONG.shape, SIZES.dim)
KEPT = [STREAM, (LONG.numel(), 48), (LONG.numel(), 48), (2, 4, 64, 12), (2, 4, 64), (LONG.numel(), 80)]


@pytest.mark.parametrize(
    ("settings", "blocks", "shapes"),
    [
        ({"mode": "full"}, 4, [STREAM]),
        ({"mode": "selective", "selective_ac_option": "2"}, 2, [STREAM]),
        ({"mode": "selective"}, 4, KEPT),
        ({"mode": "selective", "compiled": True}, 4, KEPT),
    ],
    ids=str,
)
def test_what_moves(settings: dict[str, Any], blocks: int, shapes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights, no rotary tables; of blocks that aren't checkpointed nothing."""
    copies = Recorded()
    model = offloaded(monkeypatch, copies, **settings)
    loss = model(LONG).sum()
    assert Counter(copies.shapes) == Counter(blocks * shapes)
    loss.backward()
    assert Counter(copies.shapes) == Counter(2 * blocks * shapes)  # out, and back


def test_what_is_queued_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls, in order; that they do what they say is for a machine with an accelerator to show."""
    computing, beside = MagicMock(spec=torch.Stream), MagicMock(spec=torch.Stream)
    monkeypatch.setattr(torch, "Stream", lambda device: beside)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: computing)
    accelerator, target, source = torch.device("meta"), torch.zeros(3), torch.ones(3)
    copies = Copies(beside=True)
    end = copies.start(target, source, accelerator)
    in_stream = [call.__enter__(), call.__exit__(None, None, None)]
    assert beside.mock_calls == [call.wait_stream(computing), *in_stream, call.record_event()]
    assert torch.equal(target, source) and end is beside.record_event.return_value
    copies.wait(end, accelerator)
    assert computing.mock_calls == [call.wait_event(end)]
    assert Copies(beside=False).start(target, source, accelerator) is None
