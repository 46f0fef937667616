from __future__ import annotations

from pathlib import Path

import pytest

from titan.config.errors import ConfigError, UserError
from titan.config.loader import load_and_check, load_and_check_plan
from titan.config.startup import estimation_config
from titan.estimation.hardware import PROFILES, find_hardware
from titan.observability.device import Device

OWN = """
memory_gib = 24
memory_bandwidth = 1e12
link_bandwidth = 32e9
network_bandwidth = 12.5e9
ranks_per_node = 4
peak_flops = { bfloat16 = 165e12 }
"""


@pytest.mark.parametrize(
    ("profile", "name"),
    [
        ("a100-40gb", "NVIDIA A100-SXM4-40GB"),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("h200", "NVIDIA H200"),
        ("b200", "NVIDIA B200"),
        ("mi300x", "AMD Instinct MI300X"),
    ],
)
def test_peaks_are_those_that_a_run_measures_by(profile: str, name: str) -> None:
    device = Device("cuda", None, "nccl", name)  # type: ignore[arg-type]
    assert PROFILES[profile].peak_flops["bfloat16"] == device.peak_flops("bfloat16")


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "desk.toml"
    file.write_text(OWN)
    hardware = find_hardware(str(file))
    assert (hardware.name, hardware.ranks_per_node, hardware.fit_bytes) == ("desk", 4, round(0.94 * 24 * 2**30))
    assert not hardware.machine.multiplies_float8


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        (OWN + "\nnics = 2", "unknown key nics"),
        (OWN.replace("memory_gib = 24", ""), "memory_gib is missing"),
        (OWN.replace("24", "-1"), "memory_gib = -1: expected a number above 0"),
        (OWN.replace("= 4", "= 4.5"), "ranks_per_node = 4.5: expected a whole number"),
        (OWN.replace("bfloat16", "int8"), "peak_flops: expected a table"),
        ("x = ", "estimation.hardware"),
    ],
)
def test_a_wrong_profile_is_named(tmp_path: Path, text: str, mistake: str) -> None:
    file = tmp_path / "desk.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=mistake):
        find_hardware(str(file))


def test_an_unknown_profile_has_a_hint() -> None:
    for nowhere in ("nowhere.toml", "~nobody-of-this-name/own.toml"):
        with pytest.raises(UserError, match=f'"{nowhere}": No such file or directory'):
            find_hardware(nowhere)
    with pytest.raises(UserError, match=r'estimation.hardware = "h10": no such profile.*did you mean .*h100'):
        find_hardware("h10")


FLOAT8 = ["--model.flavor=8B", "--float8.enable_float8_linear", "--compile.enable"]


def planned(*arguments: str) -> tuple[list[str], int]:
    loaded, ranks = load_and_check_plan(arguments, 1, lambda name: find_hardware(name).machine)
    return loaded.warnings, ranks


def test_rules_ask_for_the_hardware_that_a_run_is_planned_for() -> None:
    with pytest.raises(ConfigError, match="needs a GPU that multiplies in float8"):
        load_and_check(FLOAT8, 1)
    assert planned(*FLOAT8, "--estimation.gpus=8")[1] == 8
    with pytest.raises(ConfigError, match=r"float8.*planned for a100-80gb"):
        planned(*FLOAT8, "--estimation.hardware=a100-80gb")
    needs_gpu = [
        "--model.flavor=8B",
        "--parallelism.enable_async_tensor_parallel",
        "--parallelism.tensor_parallel_degree=8",
        "--compile.enable",
        "--checkpoint.async_mode=async_with_pinned_mem",
        "--training.dataloader.pin_memory",
        "--activation_checkpoint.offload",
    ]
    assert planned(*needs_gpu, "--estimation.gpus=8") == ([], 8)
    with pytest.raises(ConfigError):
        load_and_check(needs_gpu, 8)


def test_files_of_the_run_neednt_be_here() -> None:
    elsewhere = ["--training.dataset=text", "--training.dataset_path=/nowhere", "--model.tokenizer_path=/nowhere"]
    with pytest.raises(ConfigError, match="/nowhere"):
        load_and_check(elsewhere, 1)
    assert planned(*elsewhere) == ([], 1)


def test_rules_of_the_layout_hold(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        estimation_config(["--model.flavor=8B", "--estimation.gpus=6", "--parallelism.tensor_parallel_degree=4"])
    assert ended.value.code == 2
    assert "world size = 6" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        estimation_config(["--estimation.hardware=h10", "--training.steps=x"])
    printed = capsys.readouterr().err
    assert "h10" in printed and "training.steps" in printed
