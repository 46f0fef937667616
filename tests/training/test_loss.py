import pytest
import torch

from titan.training.loss import IGNORED, cross_entropy_sum


def logits_with_losses(losses: list[float], vocab: int = 7) -> torch.Tensor:
    """Logits `[1, S, V]` whose −log p of label 0 is given: p0 by its logit, the rest shared evenly."""
    p = torch.tensor(losses, dtype=torch.float64).neg().exp()
    rest = ((1 - p) / (vocab - 1)).unsqueeze(-1).expand(-1, vocab - 1)
    return torch.cat([p.unsqueeze(-1), rest], dim=-1).log().float().unsqueeze(0)


def test_loss_validation_batches_are_weighted_by_their_tokens() -> None:
    """Sums 2 (one token) and 90 (nine tokens) average to 9.2, not to the mean of their means, 6.0."""
    first, second = logits_with_losses([2.0]), logits_with_losses([10.0] * 9)
    total = cross_entropy_sum(first, torch.zeros(1, 1, dtype=torch.int64))
    total += cross_entropy_sum(second, torch.zeros(1, 9, dtype=torch.int64))
    assert (total / 10).item() == pytest.approx(9.2, rel=1e-5)


def test_only_ignored_labels_give_zero_and_finite_gradients() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((2, 3), IGNORED))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None and torch.equal(logits.grad, torch.zeros_like(logits))


def test_loss_is_fp32_whatever_the_logits_are() -> None:
    logits = torch.randn(2, 64, 101).bfloat16()
    labels = torch.randint(0, 101, (2, 64))
    labels[0, :9] = IGNORED
    loss = cross_entropy_sum(logits, labels)
    picked = logits.double().log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-picked[labels != IGNORED].sum().item(), rel=1e-6)
