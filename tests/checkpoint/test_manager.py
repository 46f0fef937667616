"""When a run saves, and what it resumes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.toy import Run, load
from titan.checkpoint.folders import start_saving
from titan.config.errors import UserError

pytestmark = pytest.mark.usefixtures("alone")


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


def test_nothing_there_is_a_fresh_run(tmp_path: Path) -> None:
    assert Run(tmp_path).manager.load() is None
    assert list(tmp_path.iterdir()) == []
    assert Run(tmp_path, enable=False, load_step=3).manager.load() is None


def test_ck_load_step(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"load_step = 999: .*step-999.*Steps available: none"):
        Run(tmp_path, load_step=999).manager.load()
    Run(tmp_path).save(5, 10)
    with pytest.raises(UserError, match=r"load_step = 999: .*Steps available: 5, 10"):
        Run(tmp_path, load_step=999).manager.load()
    (tmp_path / "checkpoint" / "step-7").mkdir()
    (tmp_path / "checkpoint" / "step-7" / "notes").touch()
    with pytest.raises(UserError, match=r"step-7 can't be loaded: it has no manifest.json.*Steps available: 5, 10"):
        Run(tmp_path, load_step=7).manager.load()
    assert Run(tmp_path, load_step=5).manager.load() == {"step": 5}


def test_an_older_step_is_loaded_with_a_warning(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    Run(tmp_path).save(5, 10, 15)
    Run(tmp_path, load_step=5).manager.load()
    assert "resuming from step 5 though there are newer ones: 10, 15" in log.text


def test_ck_order(tmp_path: Path) -> None:
    Run(tmp_path, keep_latest_k=2).save(9, 10, 100)
    assert _names(tmp_path) == ["step-10", "step-100"]
    assert Run(tmp_path).manager.load() == {"step": 100}


def test_ck_counter(tmp_path: Path) -> None:
    state = {
        "step": 7,
        "tokens": 2_150_400_000,
        "samples": 2**53 + 1,
        "streams": [{"rows": 2**63 + 1, "lr": 0.1 + 0.2, "worst": float("nan"), "text": "é", "none": None, "on": True}],
    }
    Run(tmp_path).manager.save(7, state)
    loaded = Run(tmp_path).manager.load()
    assert repr(loaded) == repr(state)


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, torch.tensor(1), {1}], ids=str)
def test_a_train_state_that_json_would_change_is_refused(tmp_path: Path, value: Any) -> None:
    run = Run(tmp_path)
    with pytest.raises(RuntimeError, match=r"could not save step 1 .*TypeError"):
        run.manager.save(1, {"value": value})
    assert run.manager.due(1, last=True)
    assert Run(tmp_path).manager.load() is None


def test_ck_stale_object(tmp_path: Path) -> None:
    straight = Run(tmp_path / "straight")
    straight.train(0, 8)
    for start, stop in ((0, 4), (4, 8)):
        run = Run(tmp_path / "cut", seed=start)
        assert run.manager.load() == ({"step": start} if start else None)
        run.train(start, stop)
        run.save(stop)
    assert load(tmp_path / "cut", "plain") == ({"step": 8}, straight.contents())


def _saved_steps(run: Run, start: int, steps: int) -> list[int]:
    """The loop of a trainer, which asks after each step."""
    saved = []
    for step in range(start + 1, steps + 1):
        last = step == steps
        if run.manager.may_be_due(step, last=last) and run.manager.due(step, last=last):
            run.save(step)
            saved.append(step)
    # A run without a step left to do asks too.
    assert not run.manager.due(steps, last=True)
    return saved


@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        ({"interval": 5}, 7, [5, 7]),
        ({"interval": 5}, 10, [5, 10]),
        ({"interval": 100}, 3, [3]),
        ({"interval": 5, "enable_first_step_checkpoint": True}, 7, [1, 5, 7]),
        ({"interval": 1, "enable_first_step_checkpoint": True}, 2, [1, 2]),
    ],
)
def test_ck_last(tmp_path: Path, settings: dict[str, Any], steps: int, expected: list[int]) -> None:
    assert _saved_steps(Run(tmp_path, **settings), 0, steps) == expected
    resumed = Run(tmp_path, **settings)
    assert resumed.manager.load() == {"step": steps}
    assert _saved_steps(resumed, steps, steps) == []


def test_most_steps_ask_for_nothing(tmp_path: Path) -> None:
    manager = Run(tmp_path, interval=5).manager
    assert [step for step in range(1, 12) if manager.may_be_due(step, last=step == 11)] == [1, 5, 10, 11]
    assert Run(tmp_path, interval=5, interval_type="seconds").manager.may_be_due(2, last=False)
    assert not Run(tmp_path, enable=False).manager.may_be_due(5, last=True)


def test_nothing_is_saved_when_only_loading_or_when_off(tmp_path: Path) -> None:
    Run(tmp_path).save(1)
    for folder, settings in ((tmp_path, {"load_only": True}), (tmp_path / "new", {"enable": False})):
        run = Run(folder, interval=1, **settings)
        run.manager.load()
        assert not any(run.manager.due(step, last=True) for step in (1, 2, 3))


def test_a_run_that_only_loads_leaves_another_run_s_save_alone(tmp_path: Path) -> None:
    Run(tmp_path).save(1)
    start_saving(tmp_path / "checkpoint", 2, 1)
    assert Run(tmp_path, load_only=True).manager.load() == {"step": 1}
    assert _names(tmp_path) == ["step-1", "step-2"]


def test_retention_leaves_everything_else(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    for junk in ("step-1", "step-99x", "step-007", "notes", "step-3.aside"):
        (root / junk).mkdir(parents=True)
        (root / junk / "precious").touch()
    (root / "step-8").touch()
    Run(tmp_path, keep_latest_k=2).save(2, 4, 6)
    assert _names(tmp_path) == [
        "notes", "step-007", "step-1", "step-3.aside", "step-4", "step-6", "step-8", "step-99x",
    ]  # fmt: skip
    assert (root / "step-1" / "precious").exists()


def test_zero_keeps_all(tmp_path: Path) -> None:
    Run(tmp_path, keep_latest_k=0).save(*range(1, 13))
    assert len(_names(tmp_path)) == 12


def test_a_time_line_that_was_left_is_set_aside(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    first = Run(tmp_path)
    first.save(5, 10)
    first.train(0, 1)
    first.save(15, 20)

    second = Run(tmp_path, load_step=5, seed=3)
    second.manager.load()
    second.train(5, 6)
    second.save(15)
    assert _names(tmp_path) == ["step-10.aside", "step-15", "step-15.aside", "step-20.aside", "step-5"]
    assert "step-20 to step-20.aside: it is of the time line that was left after step 5" in log.text
    # A restart goes on from the new time line, though the old one went further.
    assert load(tmp_path, "plain") == ({"step": 15}, second.contents())


def test_ck_collide(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "checkpoint"
    for _ in range(2):
        (root / "step-10").mkdir(parents=True, exist_ok=True)
        (root / "step-10" / "__0_0.distcp").write_text("junk")
        run = Run(tmp_path)
        run.manager.load()
        run.save(10)
        assert "step-10: it has no manifest.json" in log.text
        assert Run(tmp_path).manager.load() == {"step": 10}
        (root / "step-10" / "manifest.json").unlink()
    assert _names(tmp_path) == ["step-10", "step-10.aside", "step-10.aside-2"]
    assert (root / "step-10.aside" / "__0_0.distcp").read_text() == "junk"


def test_another_model_is_refused_by_names_and_shapes(tmp_path: Path) -> None:
    Run(tmp_path).save(1)
    wide = Run(tmp_path, width=9)
    before = {name: tensor.clone() for name, tensor in wide.model.state_dict().items()}
    with pytest.raises(UserError, match=r"model.first.weight \(stored \[7, 5\], here \[9, 5\]\)"):
        wide.manager.load()
    assert all(torch.equal(tensor, before[name]) for name, tensor in wide.model.state_dict().items())

    other = Run(tmp_path)
    other.model.third = torch.nn.Linear(2, 2)
    del other.model.scale
    with pytest.raises(UserError) as raised:
        other.manager.load()
    assert "2 not in the checkpoint: model.third.weight, model.third.bias" in str(raised.value)
    assert "1 only in the checkpoint: model.scale" in str(raised.value)
    assert str(raised.value).endswith("or start anew with another job.dump_folder.")


def test_other_dtypes_are_cast_with_a_warning(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    Run(tmp_path).save(1)
    half = Run(tmp_path)
    half.model.scale = half.model.scale.bfloat16()
    half.manager.load()
    assert "another dtype, 1 in all: model.scale (torch.float32 to torch.bfloat16)" in log.text


def test_one_line_for_each_save_and_load(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    Run(tmp_path).save(3)
    Run(tmp_path).manager.load()
    saved, loaded = (record.getMessage() for record in log.records)
    assert saved.startswith("Saved step 3 in ") and saved.endswith("MiB)")
    assert (
        loaded.startswith(f"Loaded step 3 from {tmp_path}/checkpoint/step-3 in ")
        and "world size 1: dp_shard 1" in loaded
    )
