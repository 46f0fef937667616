"""Accelerators and the networks between them, as far as an estimate needs them. Imports no torch.

Peaks are dense ones, memory is what torch reports as the device's whole, links are per device and direction.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.config.errors import UserError
from titan.config.machine import Machine
from titan.config.nearest import did_you_mean

GIB = 2**30
FIT_SHARE = 0.94  # of the memory that may be reserved: cards of 95 GiB were seen to train with 90.3 reserved
NOT_RESERVED = "the CUDA context, NCCL and cuBLAS take another 1 to 3 GiB (an assumption, within the other 6 %)"


@dataclass(frozen=True)
class Hardware:
    """What ranks run on.

    Attributes:
        memory_gib: of one device.
        memory_bandwidth: bytes/s.
        link_bandwidth: bytes/s that a device sends to others of its node.
        network_bandwidth: bytes/s that a device sends to other nodes.
        ranks_per_node: devices that the links join.
        peak_flops: FLOP/s by type of the operands: bfloat16, float16, float32, float8.
    """

    name: str
    memory_gib: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    ranks_per_node: int
    peak_flops: Mapping[str, float]

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * GIB)

    @property
    def fit_bytes(self) -> int:
        """The most that a run may reserve."""
        return round(FIT_SHARE * self.memory_bytes)

    @property
    def machine(self) -> Machine:
        """What a config is checked for."""
        return Machine(self.name, accelerates=True, multiplies_float8="float8" in self.peak_flops)


def _half(peak: float, single: float, float8: float | None = None) -> dict[str, float]:
    peaks = {"bfloat16": peak, "float16": peak, "float32": single}
    return peaks if float8 is None else peaks | {"float8": float8}


_HOPPER = _half(989e12, 67e12, 1979e12)

PROFILES = {
    # NVIDIA A100 Tensor Core GPU data sheet (nvidia-us-2188504), SXM; DGX A100: NVLink 600 GB/s both ways, a 200 Gb/s
    # adapter per GPU. Memory as torch reports it.
    "a100-40gb": Hardware("a100-40gb", 39.4, 1.555e12, 300e9, 25e9, 8, _half(312e12, 19.5e12)),
    "a100-80gb": Hardware("a100-80gb", 79.1, 2.039e12, 300e9, 25e9, 8, _half(312e12, 19.5e12)),
    # NVIDIA H100 Tensor Core GPU data sheet (2430615), SXM at 700 W; DGX H100: NVLink 900 GB/s both ways, a 400 Gb/s
    # adapter per GPU.
    "h100": Hardware("h100", 79.1, 3.35e12, 450e9, 50e9, 8, _HOPPER),
    # The H100 of Grand Teton hosts that PyTorch's published tables were measured on: 96 GB of HBM2e at 2.4 TB/s, capped
    # at 500 W; 8 per host, 400 Gb/s RDMA per GPU (arXiv 2410.06511, appendix; arXiv 2407.21783, section 3.3.1).
    "h100-500w": Hardware("h100-500w", 95.0, 2.4e12, 450e9, 50e9, 8, _HOPPER),
    # NVIDIA H200 Tensor Core GPU data sheet (3002446), SXM.
    "h200": Hardware("h200", 139.8, 4.8e12, 450e9, 50e9, 8, _HOPPER),
    # NVIDIA DGX B200 data sheet, per GPU: 180 GB, 8 TB/s, fifth-generation NVLink at 1.8 TB/s both ways.
    "b200": Hardware("b200", 178.0, 8e12, 900e9, 50e9, 8, _half(2250e12, 75e12, 4500e12)),
    # AMD Instinct MI300X data sheet: 192 GB, 5.3 TB/s, Infinity Fabric to 7 peers at 128 GB/s both ways each.
    "mi300x": Hardware("mi300x", 191.7, 5.3e12, 448e9, 50e9, 8, _half(1307e12, 163e12, 2615e12)),
}


def find_hardware(name: str) -> Hardware:
    """A profile by its name, or a user's own by the path of its TOML file, which has the fields of `Hardware`.

    Raises:
        UserError: there is no such profile or file, or the file isn't one of hardware.
    """
    if name in PROFILES:
        return PROFILES[name]
    key = f'estimation.hardware = "{name}"'
    path = Path(os.path.expanduser(name))  # of a user that there isn't, it stays
    if not name.endswith(".toml"):
        raise UserError(
            f"{key}: no such profile; there are {', '.join(PROFILES)}, or a TOML file of your own"
            f"{did_you_mean(name, PROFILES)}"
        )
    try:
        return _from_table(path.stem, _read(path))
    except OSError as error:
        raise UserError(f"{key}: {error.strerror}") from error
    except (ValueError, UserError) as error:
        raise UserError(f"{key}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _from_table(name: str, table: dict[str, Any]) -> Hardware:
    """A profile of a file's keys; `name` is the file's when it has none."""
    given = {"name": name} | table
    fields = {field.name for field in dataclasses.fields(Hardware)}
    if unknown := sorted(given.keys() - fields):
        raise UserError(f"unknown key {unknown[0]}{did_you_mean(unknown[0], fields)}")
    if missing := sorted(fields - given.keys()):
        raise UserError(f"{missing[0]} is missing; a profile has {', '.join(sorted(fields))}")
    peaks = given["peak_flops"]
    if not isinstance(peaks, dict) or "bfloat16" not in peaks:
        raise UserError("peak_flops: expected a table with FLOP/s by type, bfloat16 at least")
    numbers = {key: value for key, value in given.items() if key not in ("name", "peak_flops")} | peaks
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise UserError(f"{key} = {value}: expected a number above 0")
    if not isinstance(given["ranks_per_node"], int):
        raise UserError(f"ranks_per_node = {given['ranks_per_node']}: expected a whole number")
    return Hardware(**given)
