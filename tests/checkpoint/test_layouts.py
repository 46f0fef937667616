"""What one layout saves, any other loads, bit for bit."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.checkpoint.toy import Contents, Run, load, train_and_save
from tests.distributed.world import Worlds
from titan.checkpoint.manifest import read_manifest


def _load_and_save_again(folder: str, layout: str, step: int) -> Contents:
    run = Run(folder, layout, seed=1)
    run.manager.load()
    run.save(step)
    return run.contents()


def test_any_layout_loads_any_other(worlds: Worlds, tmp_path: Path, alone: None) -> None:
    folder = str(tmp_path)
    saved = worlds(4).run(train_and_save, folder, "fsdp", 3)[0]
    assert saved["model.scale"][2] == torch.tensor([1.5]).numpy().tobytes()
    assert saved["optimizer.head.bias.step"][2] == torch.tensor(3.0).numpy().tobytes()
    assert "model.table" not in saved
    for step, size, layout in ((4, 4, "hsdp"), (5, 2, "fsdp"), (6, 2, "plain")):
        assert worlds(size).run(_load_and_save_again, folder, layout, step) == [saved] * size, layout
    assert load(folder, "plain") == ({"step": 6}, saved)
    assert load(folder, "fsdp") == ({"step": 6}, saved)


def test_a_resume_on_fewer_ranks_trains_on_as_if_nothing_had_happened(worlds: Worlds, tmp_path: Path) -> None:
    straight = worlds(2).run(_train, str(tmp_path / "straight"), 0, 6)[0]
    worlds(4).run(train_and_save, str(tmp_path / "cut"), "hsdp", 3)
    resumed = worlds(2).run(_train, str(tmp_path / "cut"), 3, 6)[0]
    assert resumed.keys() == straight.keys()
    for name, (_, dtype, data) in straight.items():
        expected = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype.removeprefix("torch.")))
        found = torch.frombuffer(bytearray(resumed[name][2]), dtype=expected.dtype)
        # Sums over four ranks and over two round differently.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def _train(folder: str, start: int, stop: int) -> Contents:
    run = Run(folder, "fsdp", seed=1 if start else 0)
    assert run.manager.load() == ({"step": start} if start else None)
    run.train(start, stop)
    return run.contents()


def test_the_manifest_records_every_rank_s_files_once(worlds: Worlds, tmp_path: Path) -> None:
    worlds(4).run(train_and_save, str(tmp_path), "hsdp", 1)
    folder = tmp_path / "checkpoint" / "step-1"
    manifest = read_manifest(folder, 1)
    assert manifest.world_size == 4 and manifest.layout == {"dp_shard": 4} and manifest.previous is None
    assert manifest.config == "[job]\n" and manifest.torch == torch.__version__
    assert {path.name for path in folder.iterdir()} == {*manifest.files, "manifest.json"}
    assert {f"__{rank}_0.distcp" for rank in range(4)} <= manifest.files.keys()
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step-1"]


def _save_with_gathered_weights(folder: str) -> tuple[Contents, Contents]:
    run = Run(folder, "fsdp")
    run.train(0, 2)
    before = run.contents()
    with torch.no_grad():
        run.model(torch.ones(2, 5))  # leaves the root's weights gathered, as a validation does
    assert not isinstance(run.model.first.weight, DTensor)
    run.save(2)
    return before, load(folder, "fsdp")[1]


def test_weights_that_a_validation_left_gathered_are_saved_as_shards(worlds: Worlds, tmp_path: Path) -> None:
    for before, loaded in worlds(2).run(_save_with_gathered_weights, str(tmp_path)):
        assert loaded == before


def _save_one_stage(folder: str) -> Contents:
    """Each rank holds another part of the model, as a pipeline's ranks do."""
    run = _staged(folder, [dist.get_rank()])
    run.save(1)
    return run.contents()


def _staged(folder: str, stages: list[int]) -> Run:
    return Run(folder, model=torch.nn.ModuleDict({str(stage): torch.nn.Linear(3, 3) for stage in stages}))


def test_stages_on_several_ranks_load_on_one(worlds: Worlds, tmp_path: Path, alone: None) -> None:
    first, second = worlds(2).run(_save_one_stage, str(tmp_path))
    assert not first.keys() & second.keys()
    whole = _staged(str(tmp_path), [0, 1])
    whole.manager.load()
    assert whole.contents() == {**first, **second}


def _seconds(folder: str, clocks: list[float]) -> list[bool]:
    from titan.checkpoint import manager

    class Clock:
        now = 0.0

        @classmethod
        def monotonic(cls) -> float:
            # Other ranks' clocks are far ahead; only rank 0's counts.
            return cls.now + 1000 * dist.get_rank() * cls.now

    original, manager.time = manager.time, Clock
    try:
        run = Run(folder, interval_type="seconds", interval=10)
        answers = []
        for step, Clock.now in enumerate(clocks, start=1):
            answers.append(run.manager.due(step, last=step == len(clocks)))
            if answers[-1]:
                run.save(step)
        return answers
    finally:
        manager.time = original


def test_seconds_are_counted_by_rank_0_for_all(worlds: Worlds, tmp_path: Path) -> None:
    answers = worlds(2).run(_seconds, str(tmp_path), [4.0, 9.9, 10.0, 12.0, 19.9, 21.0, 22.0])
    assert answers == [[False, False, True, False, False, True, True]] * 2
