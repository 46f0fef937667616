"""A traced step against the same step run for real on CPUs: products, messages, bytes alive."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._C import DispatchKey, DispatchKeySet
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.distributed.runs import SmallRun
from tests.distributed.traffic import Traffic
from tests.distributed.world import Worlds
from tests.estimation.traced_models import ARGUMENTS, SMALL
from titan.config.derived import global_batch_size, model_sizes
from titan.config.errors import UserError
from titan.config.loader import load_and_check
from titan.data.microbatch import Microbatch
from titan.estimation.dry_step import trace_step
from titan.estimation.peak import classify, find_peak
from titan.estimation.trace import trace_layout


def real_run(arguments: list[str]) -> tuple[SmallRun, Callable[[], object]]:
    """A run that has done a step, and what does the next one, without labels to ignore."""
    run = SmallRun(*arguments, lr=None)
    tokens = torch.zeros(
        global_batch_size(run.config, run.dims.batch_degree), run.config.training.seq_len, dtype=torch.int64
    )
    run.step(1, tokens, tokens)
    mine = tokens[: len(tokens) // run.dims.batch_degree].split(run.config.training.local_batch_size)
    return run, lambda: run.steps.run(2, [Microbatch(part, part) for part in mine], valid_tokens=tokens.numel())


def traced(arguments: list[str], ranks: int, rank: int = 0) -> Any:
    job = load_and_check([*ARGUMENTS, *arguments], ranks).config
    return trace_step(job, ranks, model_sizes(job).n_layers, 1, rank=rank).trace


def real_flops(arguments: list[str]) -> int:
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    def forward(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return sdpa_flop_count(query, key, value)

    def backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return sdpa_backward_flop_count(grad, query, key, value)

    attention = "_scaled_dot_product_flash_attention_for_cpu"  # which the counter doesn't know by itself
    kernels = {getattr(torch.ops.aten, attention): forward, getattr(torch.ops.aten, f"{attention}_backward"): backward}
    _, step = real_run(arguments)
    with FlopCounterMode(display=False, custom_mapping=kernels) as counter:
        step()
    return counter.get_total_flops()


@pytest.mark.parametrize("mode", ["none", "full"])
def test_flops_are_those_of_a_real_step(worlds: Worlds, mode: str) -> None:
    arguments = [*ARGUMENTS, "--model.flavor=two", "--training.mixed_precision_param=bfloat16"]
    arguments.append(f"--activation_checkpoint.mode={mode}")
    (expected,) = worlds(1).run(real_flops, arguments)
    assert sum(traced(arguments, 1).flops.values()) == expected


def test_flops_by_formula() -> None:
    """A product costs 2 FLOPs per weight and token, three times; attention 4 S per head's width, and 2.5 times that."""
    ranks, tokens = 4, 2 * 128
    arguments = ["--activation_checkpoint.mode=none"]
    job = load_and_check([*ARGUMENTS, *arguments], ranks).config
    width, keys = SMALL.n_heads * 16, SMALL.n_kv_heads * 16
    weights = 2 * SMALL.dim * (width + keys) + 3 * SMALL.dim * SMALL.ffn_dim
    products = 6 * tokens * (SMALL.n_layers * weights + SMALL.dim * SMALL.vocab_size)
    attention = SMALL.n_layers * 4 * tokens * 128 * width * 3.5
    (estimate,) = trace_layout(job, ranks)
    assert estimate.hardware_flops == products + attention
    assert estimate.parameters == SMALL.n_layers * (weights + 2 * SMALL.dim) + SMALL.dim * (2 * SMALL.vocab_size + 1)


def real_messages(arguments: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    _, step = real_run(arguments)
    with Traffic() as traffic:
        step()
    return dict(traffic.calls), dict(traffic.bytes)


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, []),
        pytest.param(
            4,
            ["parallelism.data_parallel_replicate_degree=2", "training.global_batch_size=16"],
            marks=pytest.mark.slow,
        ),
        pytest.param(2, ["parallelism.tensor_parallel_degree=2"], marks=pytest.mark.slow),
        pytest.param(2, ["parallelism.context_parallel_degree=2"], marks=pytest.mark.slow),
    ],
)
def test_messages_are_those_of_a_real_step(worlds: Worlds, ranks: int, settings: list[str]) -> None:
    arguments = [*ARGUMENTS, "--model.flavor=two", "--training.mixed_precision_param=bfloat16"]
    arguments += ["--activation_checkpoint.mode=selective", *(f"--{setting}" for setting in settings)]
    assert worlds(ranks).run(real_messages, arguments)[0] == traced_messages(arguments, ranks, 0)


def traced_messages(arguments: list[str], ranks: int, rank: int) -> tuple[dict[str, int], dict[str, int]]:
    calls: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for counts in traced(arguments, ranks, rank).messages.values():
        for message, count in counts.items():
            if message.bytes > 16:  # the real count leaves out a step's few numbers
                calls[message.collective] += count
                size[message.collective] += count * message.bytes
    return dict(calls), dict(size)


PIPELINE = [
    "--training.mixed_precision_param=bfloat16",
    "--training.local_batch_size=4",
    "--parallelism.pipeline_parallel_degree=2",
    "--parallelism.pipeline_parallel_schedule=1F1B",
]


def test_messages_of_a_pipeline_are_those_of_a_real_step(worlds: Worlds) -> None:
    arguments = [*ARGUMENTS, *PIPELINE, "--model.flavor=two"]
    real = worlds(2).run(real_messages, arguments)
    assert real == [traced_messages(arguments, 2, rank) for rank in range(2)]
    assert {*real[0][0]} >= {"send", "recv"}


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operators have made, until nobody holds them any more."""

    def __init__(self, already: int) -> None:
        super().__init__()
        self.now = self.peak = already
        self._sizes: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._resize = torch.UntypedStorage.resize_

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("titan::"):  # its own operators hide from modes what they are made of
            with self:
                return func.redispatch(DispatchKeySet(DispatchKey.CPU), *args, **(kwargs or {}))
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it first turns its operator into those of plain tensors
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        for result in tree_iter(out):
            if isinstance(result, torch.Tensor):
                storage = result.untyped_storage()
                if storage._cdata not in self._sizes and storage._cdata not in given:
                    self.watch(storage)
        return out

    def watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._sizes[key] = 0
        self._references[key] = weakref.ref(storage, lambda _: self._set(key, 0, gone=True))
        self._set(key, storage.nbytes())

    def _set(self, key: int, size: int, *, gone: bool = False) -> None:
        self.now += size - self._sizes[key]
        self.peak = max(self.peak, self.now)
        self._sizes[key] = size
        if gone:
            del self._sizes[key]

    def __enter__(self) -> LiveBytes:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            if storage._cdata not in self._sizes:
                self.watch(storage)
            self._set(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]


def pipeline_stages(run: SmallRun) -> list[Any]:
    schedule = getattr(run.stages, "_schedule", None)
    return [] if schedule is None else [schedule._stage]


def receiving(stage: Any) -> list[Any]:
    """What a stage knows of each tensor that it receives, and the memory for it, which it keeps."""
    per_microbatch = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
    return [info for infos in per_microbatch for info in infos if info.buffer is not None]


def real_peak(arguments: list[str]) -> int:
    run, step = real_run(arguments)
    storages = {}
    received = [info.buffer for stage in pipeline_stages(run) for info in receiving(stage)]
    states = [tensor for state in run.optimizer.state.values() for tensor in state.values()]
    for tensor in [*run.parameters(), *run.model.buffers(), *states, *received]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storages[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    with LiveBytes(sum(storages.values())) as live:
        step()
    return live.peak


@pytest.mark.parametrize(
    ("ranks", "mode"),
    [
        (1, "none"),
        (1, "selective"),
        (1, "full"),
        (2, "selective"),
        pytest.param(2, "none", marks=pytest.mark.slow),
        pytest.param(2, "full", marks=pytest.mark.slow),
    ],
)
def test_bytes_alive_are_those_of_a_real_step(worlds: Worlds, ranks: int, mode: str) -> None:
    """With a norm that is one operator on CPUs, too. On two ranks FSDP gathers and sums."""
    arguments = [*ARGUMENTS, "--model.flavor=wide", "--training.mixed_precision_param=bfloat16"]
    arguments += [f"--activation_checkpoint.mode={mode}", "--activation_checkpoint.selective_ac_option=op"]
    trace = traced(arguments, ranks)
    expected = worlds(ranks).run(real_peak, arguments)[0]
    assert find_peak(classify(trace.events, trace.categories)).active_bytes == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("mode", ["full", pytest.param("none", marks=pytest.mark.slow)])
def test_bytes_alive_in_a_pipeline_are_those_of_a_real_step(worlds: Worlds, mode: str) -> None:
    arguments = [*ARGUMENTS, *PIPELINE, "--model.flavor=wide", f"--activation_checkpoint.mode={mode}"]
    traces = [traced(arguments, 2, rank) for rank in range(2)]
    peaks = [find_peak(classify(trace.events, trace.categories)) for trace in traces]
    assert [peak.active_bytes for peak in peaks] == pytest.approx(worlds(2).run(real_peak, arguments), rel=0.01)
    assert all(peak.breakdown["communication"] > 0 and peak.breakdown["gradients"] > 0 for peak in peaks)


def test_process_is_left_as_it_was() -> None:
    def state() -> list[object]:
        return [F.rms_norm, F.scaled_dot_product_attention, torch.Tensor.to, torch.UntypedStorage.resize_]

    before = state()
    job = load_and_check([*ARGUMENTS], 8).config
    (estimate,) = trace_layout(job, 8)
    assert state() == before
    assert not dist.is_initialized()
    assert trace_layout(job, 8) == [estimate]
    assert sum(estimate.breakdown.values()) == estimate.peak_active_bytes <= estimate.peak_reserved_bytes


def trace_here() -> str:
    try:
        trace_layout(load_and_check([*ARGUMENTS], 1).config, 1)
    except UserError as error:
        return str(error)
    return ""


def test_refuses_within_a_job(worlds: Worlds) -> None:
    assert "running job" in worlds(1).run(trace_here)[0]


@pytest.mark.slow
def test_compiled_step_multiplies_as_much() -> None:
    """With the same results kept, as much is computed again."""
    job = [load_and_check([*ARGUMENTS, *extra], 2).config for extra in ([], ["--compile.enable"])]
    eager, compiled = (trace_layout(config, 2)[0] for config in job)
    assert compiled.hardware_flops == eager.hardware_flops
    assert compiled.traffic == eager.traffic
