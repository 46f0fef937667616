"""Adam (arXiv 1412.6980) and AdamW (arXiv 1711.05101) whose moments may have another type than the weights.

torch's own want one type for both, and round to it after every operation. Here all is computed in fp32, and rounded
once, when it is stored. The arithmetic is one function of one parameter, which may be compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from titan.training.gradients import local_part


class AdamW(torch.optim.Optimizer):
    """Adam, or AdamW with decoupled weight decay.

    State of a parameter, named as torch names it: `exp_avg` and `exp_avg_sq`, of the parameter's shape and layout, and
    `step`, a scalar on the CPU.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        *,
        decoupled: bool,
        state_dtype: torch.dtype,
        compile_backend: str | None = None,
    ) -> None:
        """
        Args:
            params: parameters, or groups of them, as for any optimizer of torch.
            decoupled: AdamW; otherwise weight decay is added to the gradient.
            state_dtype: of the moments.
            compile_backend: compile the arithmetic with this backend of torch.compile; None runs it eagerly.
        """
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._decoupled = decoupled
        self._state_dtype = state_dtype
        self._update: Callable[..., None] = _update if compile_backend is None else _compiled(compile_backend)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            numbers: dict[int, torch.Tensor] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group, numbers)

    def _step(self, parameter: torch.Tensor, group: dict[str, Any], numbers: dict[int, torch.Tensor]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self._state_dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self._state_dtype)
        state["step"] += 1
        weight, grad = local_part(parameter), local_part(parameter.grad)
        if weight.numel() == 0:  # this rank's part of a small one
            return
        step = int(state["step"])
        if step not in numbers:
            numbers[step] = _numbers(group, step, self._decoupled).to(weight.device, non_blocking=True)
        # Every element is by itself, so one dimension is as good as two: one graph then serves all shapes. `data`,
        # because torch.compile tells views of matrices from those of vectors.
        tensors = (weight, grad, local_part(state["exp_avg"]), local_part(state["exp_avg_sq"]))
        # Not for 0, which would make NaN of the gradient of an infinite weight.
        coupled = not self._decoupled and group["weight_decay"] > 0
        self._update(*(tensor.view(-1).data for tensor in tensors), numbers[step], coupled)


def _numbers(group: dict[str, Any], step: int, decoupled: bool) -> torch.Tensor:
    """What `_update` needs beside the tensors, computed in double precision.

    A tensor, because torch.compile makes numbers part of a graph: it would compile anew for every learning rate.
    """
    beta1, beta2 = group["betas"]
    lr, decay = group["lr"], group["weight_decay"]
    step_size = lr / (1 - beta1**step)
    root = math.sqrt(1 - beta2**step)
    kept = 1 - lr * decay if decoupled else 1.0
    numbers = [1 - beta1, beta2, 1 - beta2, step_size, root, group["eps"], kept, decay]
    return torch.tensor(numbers, dtype=torch.float32)


def _update(
    weight: torch.Tensor,
    grad: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    numbers: torch.Tensor,
    coupled: bool,
) -> None:
    """One step of a shard, in place. `weight`, `grad`, `mean` and `square` are `[N]`, of any float types.

    Args:
        numbers: of `_numbers`.
        coupled: weight decay is added to the gradient.
    """
    toward_grad, beta2, new_square, step_size, root, eps, kept, decay = numbers.unbind()
    w, g = weight.float(), grad.float()
    if coupled:
        g = g + decay * w
    m = torch.lerp(mean.float(), g, toward_grad)
    v = square.float() * beta2 + new_square * g * g
    weight.copy_(w * kept - step_size * (m / (v.sqrt() / root + eps)))
    mean.copy_(m)
    square.copy_(v)


@cache
def _compiled(backend: str) -> Callable[..., None]:
    return torch.compile(_update, backend=backend, dynamic=True, fullgraph=True)
