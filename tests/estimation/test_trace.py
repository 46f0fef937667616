"""A traced step against the same step run for real on CPUs: products, messages, bytes alive; and published peaks."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
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

GIB = 2**30


def real_run(arguments: list[str]) -> tuple[SmallRun, Callable[[], object]]:
    """A run that has done a step, and what does the next one, without labels to ignore."""
    run = SmallRun(*arguments, lr=None)
    tokens = torch.zeros(
        global_batch_size(run.config, run.dims.batch_degree), run.config.training.seq_len, dtype=torch.int64
    )
    run.step(1, tokens, tokens)
    mine = tokens[: len(tokens) // run.dims.batch_degree].split(run.config.training.local_batch_size)
    return run, lambda: run.steps.run(2, [Microbatch(part, part) for part in mine], valid_tokens=tokens.numel())


def traced(arguments: list[str], ranks: int) -> Any:
    job = load_and_check([*ARGUMENTS, *arguments], ranks).config
    return trace_step(job, ranks, model_sizes(job).n_layers, 1).trace


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
    calls: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for counts in traced(arguments, ranks).messages.values():
        for message, count in counts.items():
            if message.bytes > 16:  # the real count leaves out a step's few numbers
                calls[message.collective] += count
                size[message.collective] += count * message.bytes
    assert worlds(ranks).run(real_messages, arguments)[0] == (dict(calls), dict(size))


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operators have made, until nobody holds them any more."""

    def __init__(self, already: int) -> None:
        super().__init__()
        self.now = self.peak = already
        self._sizes: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._resize = torch.UntypedStorage.resize_

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


def real_peak(arguments: list[str]) -> int:
    run, step = real_run(arguments)
    storages = {}
    states = [tensor for state in run.optimizer.state.values() for tensor in state.values()]
    for tensor in [*run.parameters(), *run.model.buffers(), *states]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storages[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    with LiveBytes(sum(storages.values())) as live:
        step()
    return live.peak


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_bytes_alive_are_those_of_a_real_step(worlds: Worlds, mode: str) -> None:
    """With a norm that is one operator on CPUs, too."""
    arguments = [*ARGUMENTS, "--model.flavor=wide", "--training.mixed_precision_param=bfloat16"]
    arguments += [f"--activation_checkpoint.mode={mode}", "--activation_checkpoint.selective_ac_option=op"]
    trace = traced(arguments, 1)
    (expected,) = worlds(1).run(real_peak, arguments)
    assert find_peak(classify(trace.events, trace.categories)).active_bytes == pytest.approx(expected, rel=0.01)


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


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["parallelism.context_parallel_degree=2", "training.mixed_precision_param=float32"], "mixed_precision_param"),
        (
            ["parallelism.context_parallel_degree=2", "parallelism.context_parallel_rotate_method=alltoall"],
            "context_parallel_rotate_method",
        ),
    ],
)
def test_refuses_what_it_would_get_wrong(settings: list[str], key: str) -> None:
    job = load_and_check([*ARGUMENTS, *(f"--{setting}" for setting in settings)], 4).config
    with pytest.raises(UserError, match=key):
        trace_layout(job, 4)


@pytest.mark.slow
def test_compiled_step_multiplies_as_much() -> None:
    """With the same results kept, as much is computed again."""
    job = [load_and_check([*ARGUMENTS, *extra], 2).config for extra in ([], ["--compile.enable"])]
    eager, compiled = (trace_layout(config, 2)[0] for config in job)
    assert compiled.hardware_flops == eager.hardware_flops
    assert compiled.traffic == eager.traffic


# (GPUs, rows per GPU, compiled, GiB): torchtitan's published peaks of reserved memory, Llama 3 8B at 8,192 tokens,
# FSDP, selective checkpointing by operator. From its documents of 2024-12 (tables 1 and 3), its issues and its pull
# requests.
PUBLISHED = [
    (8, 2, False, 82.4),
    (8, 2, True, 77.0),
    (128, 2, False, 67.0),
    (8, 1, False, 49.59),
    (8, 1, False, 49.41),
    (8, 1, False, 49.58),
    (8, 1, False, 47.38),
    (8, 1, False, 47.82),
    (8, 1, True, 47.65),
]


@pytest.mark.slow
def test_published_peaks() -> None:
    errors = []
    for gpus, rows, compiled, gib in PUBLISHED:
        settings = ["--model.flavor=8B", "--model.vocab_size=128256", "--training.seq_len=8192"]
        settings += [f"--training.local_batch_size={rows}", "--activation_checkpoint.mode=selective"]
        settings += ["--compile.enable"] if compiled else []
        job = load_and_check(["--model.name=llama3", *settings], gpus).config
        (estimate,) = trace_layout(job, gpus, compat=True)
        errors.append(estimate.peak_reserved_bytes / GIB / gib - 1)
        print(
            f"{gpus} GPUs, {rows} rows: {estimate.peak_reserved_bytes / GIB:.1f} GiB, {gib} measured, {errors[-1]:+.1%}"
        )
    magnitudes = sorted(abs(error) for error in errors)
    assert magnitudes[len(magnitudes) // 2] < 0.025
    assert magnitudes[-1] < 0.10
