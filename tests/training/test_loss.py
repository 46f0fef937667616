"""The loss against torch's own, for whole logits and for chunks of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from titan.config.loader import load_and_check
from titan.models.layers.head import IGNORED, Head, Labels
from titan.parallelisms.parallel_dims import ParallelDims
from titan.training.cross_entropy import cross_entropy
from titan.training.loss import set_loss

DIM, VOCAB = 24, 101


def head(*arguments: str, dtype: torch.dtype = torch.float32, dim: int = DIM, vocab: int = VOCAB) -> Head:
    """A head with random weights and the loss that the arguments ask for, on one process."""
    torch.manual_seed(0)
    config = load_and_check(arguments, 1).config
    module = Head(dim, vocab).to(dtype)
    set_loss([module], config, ParallelDims.from_config(config.parallelism, 1))
    return module


def some_labels(rows: int, length: int, ignored: float, vocab: int = VOCAB) -> torch.Tensor:
    labels = torch.randint(0, vocab, (rows, length))
    return labels.masked_fill(torch.rand(rows, length) < ignored, IGNORED)


def gradients(module: Head, stream: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Loss, and its gradients for stream and weight when it is scaled as a step does."""
    stream = stream.detach().clone().requires_grad_()
    module.weight.grad = None
    value = loss(stream)
    (value / 7).backward()
    assert stream.grad is not None and module.weight.grad is not None
    return [value.detach(), stream.grad, module.weight.grad]


def torchs_own(module: Head, labels: torch.Tensor, z_loss: float = 0.0) -> Callable[[torch.Tensor], torch.Tensor]:
    def loss(stream: torch.Tensor) -> torch.Tensor:
        logits = F.linear(stream, module.weight).flatten(0, 1)
        total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
        squares = logits.logsumexp(-1).square()
        return total + z_loss * squares[labels.flatten() != IGNORED].sum()

    return loss


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("loss", ["cross_entropy", *(f"linear_cross_entropy {chunks}" for chunks in (1, 3, 8, 1000))])
def test_loss_and_gradients_are_torchs(loss: str, ignored: float, z_loss: float) -> None:
    """NUMERICS.md, Chunked loss; 2 · 19 tokens divide by no number of chunks."""
    name, _, chunks = loss.partition(" ")
    module = head(f"--loss.name={name}", f"--loss.num_chunks={chunks or 8}", f"--loss.z_loss={z_loss}")
    stream, labels = torch.randn(2, 19, DIM), some_labels(2, 19, ignored)
    ours = gradients(module, stream, lambda stream: module(stream, Labels(labels)))
    theirs = gradients(module, stream, torchs_own(module, labels, z_loss))
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6)


def test_chunked_loss_is_that_of_torchs_linear_cross_entropy() -> None:
    module = head()
    stream, labels = torch.randn(2, 19, DIM), some_labels(2, 19, 0.3)

    def oracle(stream: torch.Tensor) -> torch.Tensor:
        return F.linear_cross_entropy(
            stream.flatten(0, 1), module.weight, labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    ours = gradients(module, stream, lambda stream: module(stream, Labels(labels)))
    for mine, right in zip(ours, gradients(module, stream, oracle), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6)


def test_loss_validation_batches_are_weighted_by_their_tokens() -> None:
    """Sums 2 (one token) and 90 (nine tokens) average to 9.2, not to the mean of their means, 6.0."""
    first, second = logits_with_losses([2.0]), logits_with_losses([10.0] * 9)
    total = cross_entropy(first, torch.zeros(1, dtype=torch.int64), 0.0)[0]
    total += cross_entropy(second, torch.zeros(9, dtype=torch.int64), 0.0)[0]
    assert (total / 10).item() == pytest.approx(9.2, rel=1e-5)


def logits_with_losses(losses: list[float], vocab: int = 7) -> torch.Tensor:
    """Logits `[S, V]` whose −log p of label 0 is given: p0 by its logit, the rest shared evenly."""
    p = torch.tensor(losses, dtype=torch.float64).neg().exp()
    rest = ((1 - p) / (vocab - 1)).unsqueeze(-1).expand(-1, vocab - 1)
    return torch.cat([p.unsqueeze(-1), rest], dim=-1).log().float()


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_loss_is_fp32_whatever_the_stream_is(name: str) -> None:
    module = head(f"--loss.name={name}", dtype=torch.bfloat16)
    stream, labels = torch.randn(2, 64, DIM).bfloat16(), some_labels(2, 64, 0.1)
    loss = module(stream, Labels(labels))
    logits = F.linear(stream, module.weight).double().flatten(0, 1)
    right = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(right.item(), rel=1e-5)
    # The weight's gradient is the sum of chunks: summed in bfloat16 it would be off by a few per cent.
    loss.backward()
    wide = module.weight.detach().double().requires_grad_()
    F.cross_entropy(
        F.linear(stream.double(), wide).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    ).backward()
    assert wide.grad is not None and module.weight.grad is not None
    assert (module.weight.grad.double() - wide.grad).norm() < 0.01 * wide.grad.norm()


def test_a_forward_pass_without_gradients_keeps_and_computes_none() -> None:
    module = head()
    labels = some_labels(2, 19, 0.3)
    with torch.no_grad():
        loss = module(torch.randn(2, 19, DIM), Labels(labels))
    assert not loss.requires_grad


def test_gradients_may_be_asked_for_one_after_the_other() -> None:
    """As pipelines with split backward passes do: of the stream first, of the weight later."""
    module = head()
    stream, labels = torch.randn(2, 19, DIM, requires_grad=True), some_labels(2, 19, 0.3)
    expected = gradients(module, stream, torchs_own(module, labels))
    loss = module(stream, Labels(labels))
    (of_stream,) = torch.autograd.grad(loss / 7, stream, retain_graph=True)
    (of_weight,) = torch.autograd.grad(loss / 7, module.weight)
    torch.testing.assert_close(of_stream, expected[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(of_weight, expected[2], rtol=1e-6, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    """The most elements that any tensor made within had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, (list, tuple)) else [result]
        self.elements = max([self.elements, *(t.numel() for t in tensors if isinstance(t, torch.Tensor))])
        return result


def test_no_tensor_of_tokens_by_vocabulary_is_made() -> None:
    """Of 64 tokens and 8 chunks, 8 tokens by vocabulary are the most, and the weight's size, forward and backward."""
    dim, vocab = 16, 1001
    module = head("--loss.num_chunks=8", dim=dim, vocab=vocab)
    stream, labels = torch.randn(2, 32, dim, requires_grad=True), some_labels(2, 32, 0.1, vocab)
    with LargestTensor() as largest:
        (module(stream, Labels(labels)) / 7).backward()
    assert largest.elements == dim * vocab
    whole = head("--loss.name=cross_entropy", dim=dim, vocab=vocab)
    with LargestTensor() as largest:
        whole(stream, Labels(labels)).backward()
    assert largest.elements == 64 * vocab  # the test sees what it looks for


@pytest.mark.parametrize(("name", "graphs"), [("cross_entropy", 1), ("linear_cross_entropy", 3)])
def test_compiled_loss_is_the_eager_one(name: str, graphs: int) -> None:
    """Without breaks, and with few graphs for the many numbers of valid labels: in chunks one for all labels, which
    copies nothing, one for the first other number, and one for all others."""
    arguments = (f"--loss.name={name}", "--loss.num_chunks=3")
    eager = head(*arguments)
    compiled = head(*arguments, "--compile.enable", "--compile.backend=aot_eager", "--compile.components=loss")
    torch._dynamo.reset()  # graphs of other tests
    torch._dynamo.utils.counters.clear()
    for ignored in (0.0, 0.2, 0.4, 0.6):
        stream, labels = torch.randn(2, 19, DIM), some_labels(2, 19, ignored)
        right = gradients(eager, stream, lambda stream, labels=labels: eager(stream, Labels(labels)))
        ours = gradients(compiled, stream, lambda stream, labels=labels: compiled(stream, Labels(labels)))
        for mine, other in zip(ours, right, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
