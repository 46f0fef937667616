"""Activation checkpointing: a block forgets most of what it computed and computes it again in its backward pass.

- full: a block keeps its input (arXiv 1604.06174)
- selective, "N": every N-th layer of the model does so, the others keep everything
- selective, "op": a block also keeps results that are dear to compute, and small beside what lies between them
  (arXiv 2205.05198)
- memory_budget: torch.compile chooses what to keep within a share of the memory

No module is wrapped, only a block's `forward`, so that no parameter changes its name. estimation/memory.py says what
each mode keeps, in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._C._autograd import SavedTensor, _get_current_graph_task_keep_graph, _make_saved_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from titan.config.job_config import ActivationCheckpoint

Forward = Callable[..., torch.Tensor]
Contexts = Callable[[], tuple[TorchDispatchMode, TorchDispatchMode]]  # for the first pass, and for each later one

# By name, so that operators of techniques that aren't in use needn't be registered.
_PRODUCTS = frozenset({"aten::mm", "aten::addmm"})
_KEPT = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "titan::ring_attention_forward",
        "torch_attn::_varlen_attn",
        "flex_attention",
        # Sums over ranks: slow to get, and with sequence parallelism a rank has only its part. What was gathered is
        # larger than what it came from, so it is gathered again.
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_reduce",
    }
)


def checkpoint_within_blocks(layers: nn.ModuleDict, settings: ActivationCheckpoint) -> None:
    """The modes that choose within a block, "op" and memory_budget: in place, before blocks are compiled.

    Args:
        layers: the model's blocks, or a pipeline stage's, keyed by their number in the whole model.
    """
    from torch._functorch import config

    # Of the whole process. Set for every mode, so that no earlier model's is left.
    config.activation_memory_budget = settings.memory_budget if settings.mode == "memory_budget" else 1.0
    if settings.mode == "selective" and settings.selective_ac_option == "op":
        for block in layers.values():
            # Stopping early, or the last product would be computed again for nobody.
            again = _checkpointed(block.forward, settings, early_stop=True)
            products = sum(isinstance(module, nn.Linear) for module in block.modules())
            contexts = _contexts_to_compile(products)
            block.forward = partial(_keep_results, again, products, contexts)


def checkpoint_whole_blocks(layers: nn.ModuleDict, settings: ActivationCheckpoint) -> None:
    """The modes that forget a block as a whole, "full" and "N": in place, after blocks are compiled.

    A compiled block is then computed again by the same compiled code. Compiling what is checkpointed, the other way
    round, fails with tensor parallelism.
    """
    if settings.mode == "full" or (settings.mode == "selective" and settings.selective_ac_option != "op"):
        for block in checkpointed_blocks(layers, settings):
            block.forward = _checkpointed(block.forward, settings, settings.early_stop)


def checkpointed_blocks(layers: nn.ModuleDict, settings: ActivationCheckpoint) -> list[nn.Module]:
    """The blocks that forget something; for "N" every N-th of the whole model, wherever a pipeline has put it."""
    if settings.mode == "none":
        return []
    counted = settings.mode == "selective" and settings.selective_ac_option != "op"
    every = int(settings.selective_ac_option) if counted else 1
    return [block for number, block in layers.items() if (int(number) + 1) % every == 0]


def _checkpointed(forward: Forward, settings: ActivationCheckpoint, early_stop: bool) -> Forward:
    return partial(
        checkpoint,
        forward,
        use_reentrant=False,
        early_stop=early_stop,
        preserve_rng_state=settings.preserve_rng_state,
        determinism_check=settings.determinism_check,
    )


class _Choice:
    """Which results of one pass through a block are kept, asked for one operator after the other.

    Every second matrix product, attention, and sums over ranks. Not the last product: it is added to the residual
    stream, and neither it nor what comes after it is needed for any gradient.
    """

    def __init__(self, products: int) -> None:
        """
        Args:
            products: how many matrix products the block has.
        """
        self._products, self._seen = products, 0

    def __call__(self, operator: Any) -> bool:
        name = operator.name()
        is_product = name in _PRODUCTS
        self._seen += is_product
        return self._seen < self._products and (self._seen % 2 == 1 if is_product else name in _KEPT)


def _keep_results(again: Forward, products: int, contexts: Contexts, *args: Any) -> torch.Tensor:
    """`checkpoint`, but for the chosen results."""
    if torch.compiler.is_compiling():
        return again(*args, context_fn=contexts)
    first = _Keep(products)
    out = again(*args, context_fn=lambda: (first, _Reuse(products, first)))
    first.save()
    return out


@cache
def _contexts_to_compile(products: int) -> Contexts:
    """Tells torch.compile of the choice. One object for equal blocks, or each of them would be compiled by itself."""

    def contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
        choice = _Choice(products)
        return create_selective_checkpoint_contexts(lambda context, operator, *args, **kwargs: choice(operator))

    return contexts


class _Keep(TorchDispatchMode):
    """The first pass through a block: keeps the chosen results.

    Torch's own pair of modes hides what it keeps from hooks on saved tensors, which offloading needs, and gives it back
    once, where schedules with a split backward go through a block twice.
    """

    def __init__(self, products: int) -> None:
        super().__init__()
        self._keeps = _Choice(products)
        self.results: list[tuple[Any, Any]] = []  # operator, what it gave

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        if self._keeps(operator):
            self.results.append((operator, tree_map_only(torch.Tensor, torch.Tensor.detach, out)))  # without the graph
        return out

    def save(self) -> None:
        """Save the results as autograd saves tensors; to be called where the hooks around the block are in force."""
        self.results = tree_map_only(torch.Tensor, partial(_make_saved_tensor, is_output=False), self.results)


class _Reuse(TorchDispatchMode):
    """Each later pass: gives those results instead of computing them."""

    def __init__(self, products: int, first: _Keep) -> None:
        super().__init__()
        self._products, self._first = products, first

    def __enter__(self) -> _Reuse:
        self._keeps = _Choice(self._products)
        self._left = self._first.results[::-1]
        if not _get_current_graph_task_keep_graph():  # the last pass: each result is freed after its use
            self._first.results = []
        super().__enter__()
        return self

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._keeps(operator):
            return operator(*args, **(kwargs or {}))
        kept_of, result = self._left.pop() if self._left else (None, None)
        if kept_of is not operator:
            raise RuntimeError(f"a checkpointed block ran {operator} where it ran {kept_of} the first time")
        # Detached, or the results would keep the graph of this pass.
        return tree_map_only(SavedTensor, lambda saved: saved.unpack().detach(), result)
