"""The device that a process trains on: the only file of titan that may know accelerators by name."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed import Backend

from titan.config.errors import UserError

_CPU_BACKEND = "gloo"

# Parameters of mallopt(3): the most chunks that are mapped on their own, and the free memory at the heap's end from
# which on it is given back (-1: never).
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1


class _Product(NamedTuple):
    """An accelerator as it calls itself.

    The whole name must match: a part of it also fits slower relatives (MIG slices, "H200 NVL", "A100-SXM-64GB",
    "GH200"), whose figures differ.

    Attributes:
        name: a regular expression.
        half_peak: dense half-precision peak in FLOP/s, from the vendors' data sheets (NUMERICS.md).
        profile: of titan/estimation/hardware.py; None where its links or its memory are others.
    """

    name: str
    half_peak: float
    profile: str | None = None


_PRODUCTS = (
    _Product(r"(NVIDIA )?A100-SXM4?-40GB", 312e12, "a100-40gb"),
    _Product(r"(NVIDIA )?A100-SXM4?-80GB", 312e12, "a100-80gb"),
    _Product(r"(NVIDIA )?A100-PCIE-(40|80)GB", 312e12),
    _Product(r"(NVIDIA )?A100 80GB PCIe", 312e12),
    _Product(r"(NVIDIA )?H100 80GB HBM3", 989e12, "h100"),  # how the SXM module calls itself
    _Product(r"(NVIDIA )?H100 PCIe", 756e12),
    _Product(r"(NVIDIA )?H100 NVL", 835e12),
    _Product(r"(NVIDIA )?H200", 989e12, "h200"),
    _Product(r"(NVIDIA )?B200", 2250e12, "b200"),
    _Product(r"(AMD Instinct )?MI300X( OAM)?", 1307e12, "mi300x"),
)


class MemoryUse(NamedTuple):
    """Memory of a device in bytes.

    Attributes:
        peak_bytes: the most that this process had reserved since the last reset; on CPU, its largest resident set.
        capacity_bytes: what the device has in all (on CPU: the machine, shared by its processes); None when unknown.
    """

    peak_bytes: int
    capacity_bytes: int | None


@dataclass(frozen=True)
class Device:
    """Where this process computes.

    Attributes:
        type: "cpu", or an accelerator's type as torch calls it.
        torch_device: what tensors are created on; has an index on accelerators.
        backend: for `torch.distributed.init_process_group`. On accelerators CPU tensors travel over gloo beside it.
        name: the product's name, for people and for the table of peaks.
    """

    type: str
    torch_device: torch.device
    backend: str
    name: str

    def peak_flops(self, dtype_name: str) -> float | None:
        """Dense peak in FLOP/s for matrix products of a type such as "bfloat16"; None when unknown, never a guess."""
        if self.type == "cpu" or dtype_name not in ("bfloat16", "float16"):
            return None
        return None if (product := self._product()) is None else product.half_peak

    def hardware_profile(self) -> str | None:
        """What titan/estimation/hardware.py calls this device; None when its figures aren't there, never a guess."""
        product = None if self.type == "cpu" else self._product()
        return None if product is None else product.profile

    def _product(self) -> _Product | None:
        return next((product for product in _PRODUCTS if re.fullmatch(product.name, self.name)), None)

    def multiplies_float8(self) -> bool:
        """Whether matrix products take float8 operands: NVIDIA's from Ada and Hopper on, AMD's from MI300 on."""
        if self.type != "cuda":
            return False
        least = (8, 9) if torch.version.hip is None else (9, 4)
        return torch.cuda.get_device_capability(self.torch_device) >= least

    def memory(self) -> MemoryUse:
        """How much memory was used at most, and how much there is."""
        if self.type == "cpu":
            return MemoryUse(_peak_resident_bytes(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        _, capacity = torch.accelerator.get_memory_info(self.torch_device)
        return MemoryUse(torch.accelerator.max_memory_reserved(self.torch_device), capacity)

    @property
    def reserves_memory(self) -> bool:
        """Whether `memory` counts what a caching allocator has reserved for tensors, which can be predicted."""
        return self.type != "cpu"

    def reset_peak_memory(self) -> None:
        """Measure the peak anew from here. Does nothing on CPU, where the system keeps one peak per process."""
        if self.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self.torch_device)

    def synchronize(self) -> None:
        """Wait until the device has done all that was queued. Does nothing on CPU."""
        if self.type != "cpu":
            torch.accelerator.synchronize(self.torch_device)


def find_device() -> Device:
    """The accelerator number LOCAL_RANK of this machine, made torch's current device; the CPU where there is none.

    Raises:
        UserError: this machine has fewer accelerators than torchrun started processes.
    """
    if (usable := _usable_accelerator()) is None:
        return Device("cpu", torch.device("cpu"), _CPU_BACKEND, _cpu_name())
    accelerator, collectives = usable
    index = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.accelerator.device_count()
    if index >= count:
        raise UserError(
            f"LOCAL_RANK is {index}, but this machine shows {count} {accelerator} device(s), numbered from 0: "
            f"start at most one process per device, torchrun --nproc-per-node={count}"
        )
    torch.accelerator.set_device_index(index)
    backend = f"{accelerator}:{collectives},cpu:{_CPU_BACKEND}"
    return Device(accelerator, torch.device(accelerator, index), backend, _accelerator_name(accelerator, index))


def _usable_accelerator() -> tuple[str, str] | None:
    """Type and collectives of this machine's accelerator; None where there is none that a job can use.

    One without collectives of its own (Apple's mps) is passed over, since gloo can't reach its memory.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    collectives = Backend.default_device_backend_map.get(accelerator.type) if accelerator else None
    if accelerator is None or collectives is None or collectives == _CPU_BACKEND:
        return None
    return accelerator.type, collectives


def pins_memory(device_type: str) -> bool:
    """Whether the CPU's memory can be pinned, so that copies to and from a device of this type overlap with work."""
    return device_type != "cpu"


def pin_memory_of(tensor: torch.Tensor) -> None:
    """Pin the CPU memory of a tensor where it is, shared memory too. It stays pinned for as long as the process lives.

    Raises:
        RuntimeError: the system allows no more of it.
    """
    from torch.cuda._pin_memory_utils import pin_memory

    if tensor.nbytes:
        pin_memory(tensor.data_ptr(), tensor.nbytes)


def driver_versions(device: Device) -> dict[str, str]:
    """Versions of what a device needs beside torch, by name: its driver, and its library of collectives."""
    found = {}
    for path in (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")):
        if device.type != "cpu" and path.exists():
            text = path.read_text(encoding="utf-8", errors="replace").splitlines()[0]
            version = re.search(r"\b\d+(\.\d+)+\b", text)
            found["driver"] = version[0] if version else text.strip()
    if device.type == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def variables_of_libraries() -> dict[str, str]:
    """The environment variables that steer torch, its collectives and its kernels, and mean the same on every rank."""
    read = ("NCCL_", "RCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "HIP_", "HSA_", "CUBLAS_", "OMP_", "MKL_", "UCX_")
    of_a_rank = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    return {name: value for name, value in os.environ.items() if name.startswith(read) and name not in of_a_rank}


def records_memory(device: Device) -> bool:
    """Whether torch can record what this device's memory is used for."""
    return device.type == "cuda"


def record_memory(events: int) -> None:
    """From here on remember this many of the last allocations and frees of the accelerator, with Python's stacks."""
    torch.cuda.memory._record_memory_history(max_entries=events, stacks="python")


def write_memory_snapshot(path: Path) -> None:
    """Write what the accelerator's memory holds, and what is remembered of before, as a pickle.

    Raises:
        OSError: the file can't be written.
    """
    torch.cuda.memory._dump_snapshot(str(path))


def is_collective_kernel(name: str) -> bool:
    """Whether a kernel of this name is one of NCCL's, RCCL's or oneCCL's, which sends rather than computes."""
    return re.search(r"(nccl|rccl|oneccl)", name, re.IGNORECASE) is not None


def configure_allocator() -> None:
    """Set up the allocators of the accelerator and of the CPU for tensors that come and go alike in every step.

    Must be called before the accelerator is first used. Settings that the user made, also under older names, stay.

    - An accelerator's may grow its segments, which avoids running out of memory by fragmentation.
    - On CPU glibc's keeps what a step frees for the next one, see `_keep_freed_memory`.
    """
    older_names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if not any(name in os.environ for name in older_names):
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if _usable_accelerator() is None:
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Make glibc's malloc take all memory from its heap, and keep what is freed.

    By default it maps each large tensor anew, and the system fills a page of it with zeros whenever one is first
    touched: over 1 GB in every step of a model of 60 million parameters. Does nothing with another C library, or where
    the environment chooses an allocator or its settings.
    """
    chosen = [name for name in os.environ if name.startswith("MALLOC_")]
    chosen += [name for name in ("LD_PRELOAD", "GLIBC_TUNABLES") if "malloc" in os.environ.get(name, "")]
    if chosen or platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1)):
        mallopt(parameter, value)


def measure_peak_flops(device: Device, dtype: torch.dtype) -> float:
    """The speed in FLOP/s of square matrix products `[N, N]` of this type; takes about half a second.

    N doubles until a product takes long enough for the clock; the fastest N's median counts. On CPU this is the speed
    of this process's threads.
    """
    best = 0.0
    for size in (128, 256, 512, 1024, 2048, 4096, 8192):
        seconds = matmul_seconds(device, dtype, size)
        best = max(best, 2 * size**3 / seconds)
        if seconds > 0.005:  # the next size takes eight times as long
            break
    return best


def matmul_seconds(device: Device, dtype: torch.dtype, size: int, repeats: int = 5) -> float:
    """Median time in seconds of one product of two `[size, size]` matrices, after a warm-up."""
    # A generator of its own leaves the run's random numbers as they were.
    generator = torch.Generator(device.torch_device).manual_seed(0)
    matrix = torch.rand(size, size, device=device.torch_device, generator=generator).to(dtype)
    result = torch.empty_like(matrix)
    times = []
    for _ in range(1 + repeats):
        device.synchronize()
        start = time.perf_counter()
        torch.mm(matrix, matrix, out=result)
        device.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def _accelerator_name(device_type: str, index: int) -> str:
    module = torch.get_device_module(device_type)
    return str(module.get_device_name(index)) if hasattr(module, "get_device_name") else device_type


def _cpu_name() -> str:
    try:
        description = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        description = ""
    model = re.search(r"^model name\s*:\s*(.+)$", description, re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()
