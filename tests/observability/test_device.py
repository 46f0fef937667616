"""titan/observability/device.py, with accelerators played by monkeypatches."""

import inspect
import os
import platform
import re
import time
from pathlib import Path

import pytest
import torch

import titan
from scripts import benchmark
from titan.config.errors import UserError
from titan.observability import device as device_module
from titan.observability.device import (
    Device,
    configure_allocator,
    find_device,
    is_collective_kernel,
    measure_peak_flops,
    record_memory,
    records_memory,
    write_memory_snapshot,
)

LARGE_LOGITS = [
    "--experimental.custom_import=scripts.benchmarks.sizes",
    "--model.name=benchmark",
    "--model.flavor=toy",
    "--model.vocab_size=32000",
    "--training.seq_len=64",
    "--training.mixed_precision_param=float32",
    "--warmup=3",
    "--steps=3",
]


def gpu(name: str) -> Device:
    return Device("cuda", torch.device("cuda", 0), "cuda:nccl,cpu:gloo", name)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("A100-SXM4-40GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("AMD Instinct MI300X", 1307e12),
    ],
)
def test_mx_mfu_peaks_are_those_of_the_data_sheets(name: str, peak: float) -> None:
    assert gpu(name).peak_flops("bfloat16") == peak


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a slice of one
        "NVIDIA A100-SXM-64GB",  # another number of cores
        "NVIDIA A100X",
        "NVIDIA A10",
        "NVIDIA H20",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
        "NVIDIA H100 80GB HBM2e",
        "NVIDIA GeForce RTX 4090",
        "AMD Instinct MI300A",
        "",
    ],
)
def test_mx_mfu_an_unknown_device_has_no_peak(name: str) -> None:
    assert gpu(name).peak_flops("bfloat16") is None


def test_mx_mfu_the_peak_is_for_half_precision_only(cpu: Device) -> None:
    h100 = gpu("NVIDIA H100 80GB HBM3")
    assert h100.peak_flops("float16") == 989e12
    assert h100.peak_flops("float32") is None
    assert h100.peak_flops("float8_e4m3fn") is None
    assert cpu.peak_flops("bfloat16") is None
    assert Device("cpu", torch.device("cpu"), "gloo", "NVIDIA H100 PCIe").peak_flops("bfloat16") is None


@pytest.mark.parametrize(
    ("capability", "hip", "expected"),
    [((8, 0), None, False), ((8, 9), None, True), ((10, 0), None, True), ((9, 0), "6.4", False), ((9, 4), "6.4", True)],
)
def test_devices_that_multiply_float8(
    monkeypatch: pytest.MonkeyPatch, cpu: Device, capability: tuple[int, int], hip: str | None, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert gpu("any").multiplies_float8() is expected
    assert not cpu.multiplies_float8()


def test_find_device_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    monkeypatch.setenv("LOCAL_RANK", "7")
    device = find_device()
    assert (device.type, device.torch_device, device.backend) == ("cpu", torch.device("cpu"), "gloo")
    assert device.name


def play_accelerator(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> list[int]:
    """Pretend that the machine has accelerators; returns the indices made current."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(
        torch.get_device_module(kind), "get_device_name", lambda index: f"{kind} {index}", raising=False
    )
    return chosen


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "cuda:nccl,cpu:gloo"), ("xpu", "xpu:xccl,cpu:gloo")])
def test_find_device_takes_the_local_ranks_accelerator(
    monkeypatch: pytest.MonkeyPatch, kind: str, backend: str
) -> None:
    chosen = play_accelerator(monkeypatch, kind, 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert find_device() == Device(kind, torch.device(kind, 3), backend, f"{kind} 3")
    assert chosen == [3]


def test_find_device_passes_over_an_accelerator_without_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    play_accelerator(monkeypatch, "mps", 1)
    assert find_device().type == "cpu"


def test_more_processes_than_accelerators_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    play_accelerator(monkeypatch, "cuda", 4)
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(UserError, match=r"LOCAL_RANK is 4.* 4 cuda device.*--nproc-per-node=4"):
        find_device()


def test_memory_of_an_accelerator_is_what_was_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda device: 3)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (5, 8))
    assert gpu("any").memory() == (3, 8)


def test_memory_of_a_cpu_is_the_process(cpu: Device) -> None:
    cpu.reset_peak_memory()
    cpu.synchronize()
    before = cpu.memory()
    assert before.capacity_bytes is not None
    assert 2**24 < before.peak_bytes < before.capacity_bytes
    torch.ones(2**26)
    assert cpu.memory().peak_bytes >= before.peak_bytes


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_the_users_allocator_settings_stay(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", dict(environment))
    monkeypatch.setattr(device_module, "_keep_freed_memory", lambda: None)  # it would act on this whole process
    configure_allocator()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize(
    ("variables", "faults"),
    [
        pytest.param({}, range(1_000), marks=pytest.mark.slow),
        pytest.param({"MALLOC_MMAP_MAX_": "65536"}, range(10_000, 10**9), marks=pytest.mark.slow),
    ],
)
def test_a_cpu_run_faults_no_pages_in_unless_the_user_says_so(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], faults: range
) -> None:
    """Page faults per step after the warm-up, in a run whose logits and head are large."""
    for name in [*os.environ]:
        if name.startswith("MALLOC_") or name in ("LD_PRELOAD", "GLIBC_TUNABLES"):
            monkeypatch.delenv(name)
    variables = variables | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (figures,) = benchmark.measure(benchmark.plan(LARGE_LOGITS).rows, 1, time.monotonic() + 240).values()
    assert not isinstance(figures, benchmark.Failure)
    assert int(figures["page_faults_per_step"]) in faults


@pytest.mark.parametrize(("kind", "kept"), [("cuda", []), ("mps", [True])])
def test_malloc_is_set_up_for_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch, kind: str, kept: list[bool]) -> None:
    """Where the accelerator can't be used, too."""
    play_accelerator(monkeypatch, kind, 1)
    called: list[bool] = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(device_module, "_keep_freed_memory", lambda: called.append(True))
    configure_allocator()
    assert called == kept


def test_measured_peak_is_positive_and_leaves_the_random_numbers_alone(cpu: Device) -> None:
    state = torch.get_rng_state()
    assert measure_peak_flops(cpu, torch.float32) > 1e8
    assert torch.equal(torch.get_rng_state(), state)


def test_memory_is_recorded_where_torch_can(monkeypatch: pytest.MonkeyPatch, cpu: Device, tmp_path: Path) -> None:
    """Torch's functions for it take what they are given."""
    assert records_memory(gpu("NVIDIA H100 80GB HBM3")) and not records_memory(cpu)
    called: dict[str, dict[str, object]] = {}
    for name in ("_record_memory_history", "_dump_snapshot"):
        signature = inspect.signature(getattr(torch.cuda.memory, name))

        def stand_in(*args: object, name: str = name, signature: inspect.Signature = signature, **keys: object) -> None:
            called[name] = signature.bind(*args, **keys).arguments

        monkeypatch.setattr(torch.cuda.memory, name, stand_in)
    record_memory(10)
    write_memory_snapshot(tmp_path / "a.pickle")
    assert called == {
        "_record_memory_history": {"stacks": "python", "max_entries": 10},
        "_dump_snapshot": {"filename": str(tmp_path / "a.pickle")},
    }


@pytest.mark.parametrize(
    ("kernel", "sends"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_bf16(ncclDevComm*, unsigned long, ncclWork*)", True),
        ("oneccl_allreduce_kernel", True),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", False),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NTT", False),
    ],
)
def test_collectives_are_known_by_their_kernels(kernel: str, sends: bool) -> None:
    assert is_collective_kernel(kernel) == sends


def test_no_other_file_names_an_accelerator() -> None:
    root = Path(titan.__file__).parent
    device_name = re.compile(r"""["'](cuda|xpu|mps|hip|rocm)\b|torch\.(cuda|xpu|mps)\.""")
    offenders = [
        f"{path.relative_to(root)}:{number}"
        for path in sorted(root.rglob("*.py"))
        if path.name != "device.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if device_name.search(line)
    ]
    assert offenders == []
