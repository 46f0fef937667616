"""What train.py says beforehand, on devices that only pretend."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from tests.distributed.runs import TINY, train_here
from tests.distributed.world import Worlds
from titan.config.loader import load_and_check
from titan.estimation.closed_form import analytic_layout
from titan.estimation.hardware import PROFILES
from titan.observability import device as device_module
from titan.observability.device import Device, MemoryUse
from titan.observability.logging import logger
from titan.observability.prediction import Prediction, predict
from titan.parallelisms.parallel_dims import ParallelDims

GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"


@dataclasses.dataclass(frozen=True)
class Accelerator(Device):
    """One that says what it is told to say of its memory."""

    reserved: int = 0

    def memory(self) -> MemoryUse:
        return MemoryUse(self.reserved, round(79.1 * GIB))


def accelerator(name: str, reserved: int = 0) -> Accelerator:
    return Accelerator("accelerator", torch.device("meta"), "gloo", name, reserved)


def predicted(device: Device, *arguments: str, ranks: int = 8, pp_rank: int = 0) -> Prediction:
    config = load_and_check(["--job.config_file=llama3_8b.toml", *arguments], ranks).config
    return predict(config, ParallelDims.from_config(config.parallelism, ranks), pp_rank, device)


def test_memory_and_speed_of_a_device_that_is_known() -> None:
    found = predicted(accelerator(H100))
    memory, speed = found.lines
    config = load_and_check(["--job.config_file=llama3_8b.toml"], 1).config
    (expected,) = analytic_layout(config, 8)
    assert found.reserved_bytes == expected.peak_reserved_bytes
    assert memory == (
        f"predicted: every rank reserves up to {expected.peak_reserved_bytes / GIB:.1f} of 79.1 GiB, peak at loss"
    )
    assert speed == "predicted: 1.4 (1.1 to 1.8) s per step, 5,700 (4,300 to 7,100) tokens/s per device, ± 25%"


def test_no_speed_of_an_unknown_device() -> None:
    found = predicted(accelerator("NVIDIA H100 NVL"))
    assert found.reserved_bytes is not None
    assert found.lines[1:] == ["no prediction of speed: no hardware profile is of NVIDIA H100 NVL"]


def test_what_was_measured_stands_beside_it() -> None:
    made = Prediction([], reserved_bytes=round(31.5 * GIB))
    assert made.beside(accelerator(H100, round(33.39 * GIB))) == (
        "memory reserved: predicted 31.50 GiB, measured 33.39 GiB, difference +1.89 GiB (+6.0%)"
    )


def test_each_rank_of_a_pipeline_has_its_own() -> None:
    arguments = ("--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=8")
    ranks = [predicted(accelerator(H100), *arguments, ranks=2, pp_rank=rank) for rank in (0, 1)]
    assert ranks[0].reserved_bytes != ranks[1].reserved_bytes
    assert ranks[0].lines == ranks[1].lines  # of the rank that needs most


def test_on_a_cpu_nothing_is_compared() -> None:
    found = predicted(Device("cpu", torch.device("cpu"), "gloo", "a CPU"))
    (line,) = found.lines
    assert line.startswith("predicted for an accelerator: ") and line.endswith("a CPU's operators take others")
    assert found.beside(Device("cpu", torch.device("cpu"), "gloo", "a CPU")) is None


@pytest.mark.parametrize("error", [ZeroDivisionError("division by zero"), KeyError("x")])
def test_it_never_breaks_a_run(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr("titan.estimation.closed_form.estimate", broken)
    found = predicted(accelerator(H100))
    assert found.lines == [f"no prediction: {type(error).__name__}: {error}"]
    assert found.beside(accelerator(H100)) is None


def test_another_family_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.estimation.from_config._NEEDED", ("dim", "experts"))
    (line,) = predicted(accelerator(H100)).lines
    assert line.startswith("no prediction: ") and "the closed form knows blocks like those of Llama" in line


def test_none_where_attention_takes_what_isnt_counted() -> None:
    (line,) = predicted(accelerator(H100), "--training.mixed_precision_param=float32").lines
    assert line.startswith("no prediction: in float32 attention holds whole matrices of scores")


def logged_by_a_run(arguments: list[str]) -> list[str]:
    """What train.py logs on a device that says it had reserved 3 GiB of 80."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "reserves_memory", True)
        patch.setattr(Device, "memory", lambda _: MemoryUse(3 * GIB, 80 * GIB))
        patch.setattr(logger, "info", lines.append)
        train_here(arguments)
    return [line for line in lines if "predict" in line]


def test_a_run_logs_both(worlds: Worlds, tmp_path: Path) -> None:
    arguments = [*TINY, f"--job.dump_folder={tmp_path}", "--training.steps=3", "--training.local_batch_size=2"]
    arguments += ["--training.mixed_precision_param=bfloat16", "--training.dataset=python_stdlib"]
    before, speed, compared = worlds(1).run(logged_by_a_run, arguments)[0]
    assert before.startswith("predicted: every rank reserves up to ") and " of 80.0 GiB, peak at " in before
    assert speed.startswith("no prediction of speed")
    assert compared.startswith("memory reserved: predicted ") and " measured 3.00 GiB, difference +" in compared


def test_it_costs_no_time() -> None:
    predicted(accelerator(H100))
    started = time.process_time()
    predicted(accelerator(H100))
    assert time.process_time() - started < 0.25  # with the config's own checks


def test_profiles_that_devices_have_exist() -> None:
    named = {product.profile for product in device_module._PRODUCTS if product.profile}
    assert named == PROFILES.keys() - {"h100-500w"}  # which calls itself nothing that is known
    assert accelerator("NVIDIA A100-SXM4-40GB").hardware_profile() == "a100-40gb"
    assert accelerator("NVIDIA A100-PCIE-40GB").hardware_profile() is None
