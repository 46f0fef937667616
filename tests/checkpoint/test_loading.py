"""What a run starts from: its own checkpoints, others', parts of them; and what it refuses to go on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.toy import Run, load, train_and_save
from tests.distributed.world import Worlds
from titan.checkpoint.drift import differences, read_config, refuse_other_model
from titan.config.errors import UserError

STATE = {"step": 3, "tokens_seen": 30, "data": {"position": 7}}


def saved(folder: Path, **settings: Any) -> Run:
    """A run of three steps, saved."""
    run = Run(folder, **settings)
    run.train(0, 3)
    run.manager.save(3, STATE, finished=True)
    return run


def weights(contents: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in contents.items() if name.startswith("model.")}


@pytest.mark.parametrize("place", ["checkpoint/step-3", "checkpoint"])
def test_ck_initial_load_takes_weights_alone(tmp_path: Path, alone: None, place: str) -> None:
    other = saved(tmp_path / "other").contents()
    (tmp_path / "new" / "checkpoint").mkdir(parents=True)  # an empty folder of one's own doesn't count
    fresh = Run(tmp_path / "new", seed=1).contents()
    state, contents = load(tmp_path / "new", "plain", initial_load_path=str(tmp_path / "other" / place))
    assert state == {}
    assert weights(contents) == weights(other)
    moments = {name: value for name, value in contents.items() if name.startswith("optimizer.")}
    assert moments == {name: fresh[name] for name in moments} and moments


def test_ck_initial_load_of_everything(tmp_path: Path, alone: None) -> None:
    other = saved(tmp_path / "other").contents()
    place = {"initial_load_path": str(tmp_path / "other/checkpoint"), "initial_load_model_only": False}
    run = Run(tmp_path / "new", seed=1, **place)
    assert run.manager.load() == STATE
    assert run.contents() == other
    assert run.manager.due(3, last=True)  # not this run's own, so there is something to save


def test_ck_initial_load_gives_way_to_own_checkpoints(
    tmp_path: Path, alone: None, log: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "other")
    own = Run(tmp_path / "new", seed=5)
    own.save(1)
    place = str(tmp_path / "other/checkpoint")
    assert load(tmp_path / "new", "plain", initial_load_path=place) == ({"step": 1}, own.contents())
    assert "initial_load_path isn't used" in log.text


def test_ck_initial_load_of_a_checkpoint_made_by_one_process(worlds: Worlds, tmp_path: Path) -> None:
    """A seed: one process saves, two shard it."""
    (other,) = worlds(1).run(train_and_save, str(tmp_path / "seed"), "plain", 0)
    place = str(tmp_path / "seed/checkpoint/step-0")
    for state, contents in worlds(2).run(load, str(tmp_path / "new"), "fsdp", initial_load_path=place):
        assert state == {}
        assert weights(contents) == weights(other)


def test_ck_initial_load_without_saving(tmp_path: Path, alone: None) -> None:
    other = saved(tmp_path / "other").contents()
    place = str(tmp_path / "other/checkpoint")
    _, contents = load(tmp_path / "new", "plain", enable=False, initial_load_path=place)
    assert weights(contents) == weights(other)


def test_ck_initial_load_from_where_nothing_is(tmp_path: Path, alone: None) -> None:
    (tmp_path / "x" / "step-4").mkdir(parents=True)
    for place in ("x", "x/step-4"):
        with pytest.raises(UserError, match=r"no complete checkpoint there \(.*step-4: it has no manifest.json"):
            Run(tmp_path / "new", initial_load_path=str(tmp_path / place)).manager.load()
    with pytest.raises(UserError, match=r"no folder step-N"):
        Run(tmp_path / "new", initial_load_path=str(tmp_path)).manager.load()


def test_ck_exclude(tmp_path: Path, alone: None, log: pytest.LogCaptureFixture) -> None:
    before = saved(tmp_path).contents()
    state, contents = load(tmp_path, "plain", exclude_from_loading=["dataloader"])
    assert state == {"step": 3, "tokens_seen": 30}
    assert contents == before
    assert "Loaded step 3, without dataloader, from" in log.text

    state, contents = load(tmp_path, "plain", exclude_from_loading=["optimizer", "train_state"])
    assert state == {"data": {"position": 7}}
    assert weights(contents) == weights(before)
    assert not any(bytes_.strip(b"\0") for name, (*_, bytes_) in contents.items() if name.startswith("optimizer."))


def test_ck_exclude_acts_once(tmp_path: Path, alone: None) -> None:
    """A restart with the same config goes on from what was saved since, position and all."""
    excluded = ["dataloader"]
    toml = '[checkpoint]\nexclude_from_loading = ["dataloader"]\n'
    saved(tmp_path)
    run = Run(tmp_path, exclude_from_loading=excluded, config_toml=toml)
    assert run.manager.load() == {"step": 3, "tokens_seen": 30}
    run.manager.save(4, STATE)
    assert Run(tmp_path, exclude_from_loading=excluded, config_toml=toml).manager.load() == STATE


def test_a_step_count_that_starts_anew_sets_the_old_checkpoints_aside(tmp_path: Path, alone: None) -> None:
    saved(tmp_path)
    run = Run(tmp_path, exclude_from_loading=["optimizer", "train_state"])
    run.manager.load()
    run.save(1)
    names = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert names == ["step-1", "step-3.aside"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ck_export_dtype_of_a_last_save_without_optimizer(tmp_path: Path, alone: None, dtype: str) -> None:
    run = Run(tmp_path, last_save_model_only=True, export_dtype=dtype)
    run.model.register_buffer("count", torch.tensor([2**24 + 1]))
    run.model.head.to(torch.bfloat16)
    run.save(1)
    live = run.contents()
    run.manager.save(2, {"step": 2}, finished=True)
    assert run.contents() == live

    other = Run(tmp_path / "new", seed=1, initial_load_path=str(tmp_path / "checkpoint"))
    other.model.register_buffer("count", torch.tensor([0]))
    assert other.manager.load() == {}
    stored = torch.distributed.checkpoint.FileSystemReader(tmp_path / "checkpoint/step-2").read_metadata()
    types = {name: entry.properties.dtype for name, entry in stored.state_dict_metadata.items()}
    assert types.pop("model.count") is torch.int64
    assert set(types.values()) == {getattr(torch, dtype)} and all(name.startswith("model.") for name in types)
    assert other.model.count.item() == 2**24 + 1
    expected = run.model.first.weight.detach().to(getattr(torch, dtype)).float()
    torch.testing.assert_close(other.model.first.weight.detach(), expected, rtol=0, atol=0)


def test_what_holds_the_model_alone_is_not_resumed_from(tmp_path: Path, alone: None) -> None:
    run = Run(tmp_path, last_save_model_only=True)
    run.save(1)
    run.manager.save(2, {"step": 2}, finished=True)
    with pytest.raises(UserError, match=r"step-2 holds the model alone .*--checkpoint.load_step=1, or start"):
        Run(tmp_path).manager.load()
    assert Run(tmp_path, load_step=1).manager.load() == {"step": 1}
    place = {"initial_load_path": str(tmp_path / "checkpoint"), "initial_load_model_only": False}
    with pytest.raises(UserError, match="initial_load_model_only = true"):
        Run(tmp_path / "new", **place).manager.load()


def test_a_folder_of_another_run_is_not_written_to(tmp_path: Path, alone: None) -> None:
    saved(tmp_path)
    with pytest.raises(UserError, match=r"holds the checkpoints of a run, up to step 3.*overwrite its metrics"):
        Run(tmp_path, enable=False).manager.load()
    assert Run(tmp_path, enable=False, load_only=True).manager.load() is None


def test_differences_of_configs(tmp_path: Path, alone: None, log: pytest.LogCaptureFixture) -> None:
    then, now = '[a]\nx = 1\n[b.c]\nlist = [{k = "v"}]\n', '[a]\nx = 2\ny = "new"\n[b.c]\nlist = [{k = "v"}]\n'
    assert differences(read_config(then), read_config(now)) == ["a.x: 1 → 2", 'a.y: unset → "new"']
    Run(tmp_path, config_toml=then).save(1)
    Run(tmp_path, config_toml=now).manager.load()
    assert f"The config isn't the one of {tmp_path}/checkpoint/step-1:\n  a.x: 1 → 2\n" in log.text


def test_a_model_that_differs_in_no_shape_is_refused() -> None:
    """llama2 and llama3 debugmodel differ in rope_theta alone."""
    saved_config = {"model.name": "llama3", "model.flavor": "debugmodel"}
    with pytest.raises(UserError, match=r"rope_theta: 500000.0 there, 10000.0 here\nSet model.name as"):
        refuse_other_model("step-1", saved_config, {**saved_config, "model.name": "llama2"})
    refuse_other_model("step-1", saved_config, {**saved_config, "model.vocab_size": 264})
