"""A step that is run for real on CPUs, and the same step's trace, in the same figures."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from tests.distributed.runs import SmallRun
from tests.distributed.traffic import Traffic
from tests.estimation.test_trace import LiveBytes
from titan.config.derived import global_batch_size, model_sizes
from titan.config.loader import load_and_check
from titan.data.microbatch import Microbatch
from titan.estimation.dry_step import trace_step
from titan.estimation.peak import classify, find_peak


class Figures(NamedTuple):
    """Of a rank's step: FLOPs of products, calls and bytes handed in by collective, and the most bytes alive."""

    flops: int
    calls: dict[str, int]
    bytes: dict[str, int]
    peak: int


def traced_figures(arguments: list[str], ranks: int, rank: int = 0) -> Figures:
    """Of the trace; memory of the host counts as the device's does, which on a CPU it is."""
    job = load_and_check(arguments, ranks).config
    trace = trace_step(job, ranks, model_sizes(job).n_layers, 1, rank=rank).trace
    calls: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for counts in trace.messages.values():
        for message, count in counts.items():
            if message.bytes > 24:  # the real count leaves out a step's few numbers
                calls[message.collective] += count
                size[message.collective] += count * message.bytes
    anywhere = [event._replace(stream=0) if hasattr(event, "stream") else event for event in trace.events]
    peak = find_peak(classify(anywhere, trace.categories)).active_bytes
    return Figures(sum(trace.flops.values()), dict(calls), dict(size), peak)


def real_figures(arguments: list[str]) -> Figures:
    """Of a run's steps after the first."""
    gc.unfreeze()
    earlier = {storage._cdata for storage in _storages()}
    run = SmallRun(*arguments, lr=None)
    config = run.config
    tokens = torch.zeros(global_batch_size(config, run.dims.batch_degree), config.training.seq_len, dtype=torch.int64)
    run.step(1, tokens, tokens)
    mine = tokens[: len(tokens) // run.dims.batch_degree].split(config.training.local_batch_size)
    apart = config.model.attn_mask == "document"
    batches = [Microbatch(part, part, *([part, part] if apart else [])) for part in mine]
    with Products() as products:
        run.steps.run(2, batches, valid_tokens=tokens.numel())
    with Traffic() as traffic:
        run.steps.run(3, batches, valid_tokens=tokens.numel())
    with LiveBytes(0) as live:
        for storage in _storages():
            if storage._cdata not in earlier:
                live.watch(storage)
        del storage
        run.steps.run(4, batches, valid_tokens=tokens.numel())
    gc.freeze()
    return Figures(products.flops, dict(traffic.calls), dict(traffic.bytes), live.peak)


def _storages() -> Iterator[torch.UntypedStorage]:
    """Of all tensors of this process, each once."""
    gc.collect()
    seen = set()
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # isinstance would wake up lazy modules
            local = thing._local_tensor if isinstance(thing, DTensor) else thing
            if not is_traceable_wrapper_subclass(local) and (storage := local.untyped_storage())._cdata not in seen:
                seen.add(storage._cdata)
                yield storage


class Products(TorchDispatchMode):
    """FLOPs as torch's counter counts them, which itself can't watch a backward pass that is in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # DTensor and the like first turn their operator into those of plain tensors
        if func.name().startswith("titan::"):  # its own operators hide from modes what they are made of
            with self:
                return func.redispatch(DispatchKeySet(DispatchKey.CPU), *args, **kwargs)
        out = func(*args, **kwargs)
        name = func.name().partition("::")[2]
        if name == "_scaled_dot_product_flash_attention_for_cpu":
            self.flops += sdpa_flop_count(*(x.shape for x in args[:3]))
        elif name == "_scaled_dot_product_flash_attention_for_cpu_backward":
            self.flops += sdpa_backward_flop_count(*(x.shape for x in args[:4]))
        elif func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        return out
