"""What float8 can't do is refused, with what would work; older names of it act."""

from __future__ import annotations

import importlib.util

import pytest

from tests.config.conftest import Load, Mistakes
from titan.observability import device

ON = ("--float8.enable_float8_linear", "--float8.emulate")
GATHER = "--float8.enable_fsdp_float8_all_gather"
PRECOMPUTE = "--float8.precompute_float8_dynamic_scale_for_fsdp"

REFUSED = [
    ((GATHER, "--float8.recipe_name=rowwise"), ["all_gather = true: recipe", 'recipe_name = "tensorwise"']),
    ((GATHER, "--float8.recipe_name=rowwise_with_gw_hp"), ['recipe "rowwise_with_gw_hp"']),
    ((PRECOMPUTE,), ["dynamic_scale_for_fsdp = true", "set both to true"]),
    (("--float8.filter_fqns=output,outputs",), ['no linear has "outputs" in its name; names end in', "mean output?"]),
    (("--float8.filter_fqns=auto_filter_small_kn,output",), ['no linear has "auto_filter_small_kn"']),
    (("--float8.filter_fqns=w2",), ['filter_fqns = ["w2"]', 'keep the head, "output"', 'add "output"']),
    (("--float8.filter_fqns=[]",), ["filter_fqns = []", 'add "output"']),
    (("--float8.filter_fqns=output,layers",), ["nothing is left to convert", "keeps 43 of 43 linears"]),
    (("--training.seq_len=17",), ["seq_len = 17: 8 window(s) * 17 tokens", "nearest legal: 16 or 18"]),
    (("--training.local_batch_size=1", "--training.seq_len=40"), ["nearest legal: 32 or 48"]),
    (("--float8.recipe_name=blockwise",), ['expected one of "tensorwise", "rowwise", "rowwise_with_gw_hp"']),
]


@pytest.mark.parametrize(("arguments", "expected"), REFUSED, ids=lambda value: " ".join(value))
def test_refused(arguments: tuple[str, ...], expected: list[str], mistakes: Mistakes) -> None:
    (mistake,) = mistakes("", *ON, *arguments)
    for text in expected:
        assert text in mistake


def test_products_of_tokens_in_high_precision_take_any_number(load: Load) -> None:
    load("", *ON, "--training.seq_len=17", "--float8.recipe_name=rowwise_with_gw_hp")


def test_without_the_hardware(mistakes: Mistakes, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.Device, "multiplies_float8", lambda _: False)
    (mistake,) = mistakes("", "--float8.enable_float8_linear")
    assert "compute capability 8.9" in mistake and device.find_device().name in mistake
    assert "float8.emulate = true" in mistake
    load("", *ON)
    monkeypatch.setattr(device.Device, "multiplies_float8", lambda _: True)
    load("", "--float8.enable_float8_linear")


def test_without_torchao(mistakes: Mistakes, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (mistake,) = mistakes("", *ON)
    assert mistake.endswith("torchao isn't installed: pip install 'titan[float8]'")
    load()


def test_slow_float8_warns(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.Device, "multiplies_float8", lambda _: True)
    (warning,) = load("", "--float8.enable_float8_linear").warnings
    assert "float8" in warning and "set compile.enable = true" in warning
    assert load("", "--float8.enable_float8_linear", "--compile.enable").warnings == []
    (warning,) = load("", *ON, "--compile.enable").warnings
    assert warning.startswith("float8.emulate = true")


def test_settings_without_float8_ask_for_nothing(load: Load) -> None:
    load("[float8]\nprecompute_float8_dynamic_scale_for_fsdp = true\nfilter_fqns = ['router']\nrecipe_name = 'rowwise'")


def test_older_names_act(load: Load) -> None:
    loaded = load(
        """
        [model]
        converters = ["quantize.linear.float8"]
        [quantize.linear.float8]
        enable_fsdp_float8_all_gather = true
        precompute_float8_dynamic_scale_for_fsdp = true
        filter_fqns = ["output", "wo"]
        emulate = true
        [float8]
        force_recompute_fp8_weight_in_bwd = true
        """
    )
    settings = loaded.config.float8
    assert settings.enable_float8_linear and settings.emulate and settings.enable_fsdp_float8_all_gather
    assert settings.precompute_float8_dynamic_scale_for_fsdp and settings.filter_fqns == ["output", "wo"]
