"""The dry run of every shipped config: its totals are golden, and the two methods agree."""

from __future__ import annotations

import json

import pytest

from tests.estimation.golden_totals import FOLDER, ROOT, RUNS, totals


def test_every_shipped_config_has_totals() -> None:
    shipped = {path.stem for path in (ROOT / "train_configs").glob("*.toml")}
    assert shipped == RUNS.keys() == {path.stem for path in FOLDER.glob("*.json")}


# Not debug: in float32 an accelerator has no flash kernel for grouped heads, and the closed form knows no other.
@pytest.mark.parametrize("name", [name for name in RUNS if name != "debug"])
def test_methods_agree_on_the_totals(name: str) -> None:
    found = json.loads((FOLDER / f"{name}.json").read_text())
    for closed, traced in zip(found["analytic"], found["trace"], strict=True):
        assert traced["parameters"] == closed["parameters"]
        assert traced["hardware_flops"] == pytest.approx(closed["hardware_flops"], rel=1e-3)
        assert traced["peak_active_bytes"] == pytest.approx(closed["peak_active_bytes"], rel=0.05)
        assert traced["peak_reserved_bytes"] == pytest.approx(closed["peak_reserved_bytes"], rel=0.06)
        for over, sent in closed["sent_bytes"].items():
            assert traced["sent_bytes"][over] == pytest.approx(sent, rel=1e-3, abs=1000), over


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RUNS])
def test_totals_are_golden(name: str) -> None:
    assert totals(name) == (FOLDER / f"{name}.json").read_text(encoding="utf-8")
