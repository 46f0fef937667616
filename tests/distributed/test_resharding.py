"""A checkpoint of any layout loads in any other: weights, moments by name, data position, counters."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.runs import TINY, train_here
from tests.distributed.test_matrix import RING, Layout, schedule
from tests.distributed.world import Worlds

DEEP = "deep"  # one model for all
LAYOUTS = [
    Layout(special=DEEP),
    Layout(special=DEEP, dp=4),
    Layout(special=DEEP, replicate=2, dp=2),
    Layout(special=DEEP, tp=2, cp=2),
    Layout(special=DEEP, pp=2, dp=2, extra=schedule("Interleaved1F1B")),
    Layout(special=DEEP, pp=2, tp=2, extra=schedule("ZBVZeroBubble")),
]
COMPOSED = [Layout(special=DEEP, pp=2, cp=2, tp=2, extra=RING)]


def arguments(layout: Layout, folder: Path, steps: int) -> list[str]:
    own = ["--checkpoint.enable", f"--training.steps={steps}", "--lr_scheduler.total_steps=4"]
    return [*TINY, *layout.arguments, f"--job.dump_folder={folder}", *own]


def train(worlds: Worlds, layout: Layout, folder: Path, steps: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = worlds(layout.ranks).run(train_here, arguments(layout, folder, steps))[0]
    return rows


@pytest.fixture(scope="module")
def straight(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Four steps on one process."""
    return train(worlds, LAYOUTS[0], tmp_path_factory.mktemp("straight"), 4)


@pytest.fixture(scope="module")
def saved(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Layout, Path]]:
    """A run of two steps in each layout, made when first asked for."""

    class Runs(dict[Layout, Path]):
        def __missing__(self, layout: Layout) -> Path:
            folder = self[layout] = tmp_path_factory.mktemp("saved")
            train(worlds, layout, folder, 2)
            return folder

    yield Runs()


def resume(
    worlds: Worlds, before: Layout, after: Layout, saved: dict[Layout, Path], folder: Path, expected: list[Any]
) -> None:
    shutil.copytree(saved[before], folder)
    rows = train(worlds, after, folder, 4)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for key in ("loss", "grad_norm", "lr", "tokens_seen"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=1e-5), key


PAIRS = [(LAYOUTS[5], LAYOUTS[3])]
OTHERS = [
    pytest.param(*pair, marks=pytest.mark.slow)
    for pair in [(COMPOSED[0], LAYOUTS[2]), *itertools.permutations(LAYOUTS, 2)]
    if pair not in PAIRS
]


@pytest.mark.parametrize(("before", "after"), [*PAIRS, *OTHERS], ids=str)
def test_pp_optim_reshard(
    worlds: Worlds,
    straight: list[dict[str, Any]],
    saved: dict[Layout, Path],
    tmp_path: Path,
    before: Layout,
    after: Layout,
) -> None:
    resume(worlds, before, after, saved, tmp_path / "run", straight)


def tensor_names(folder: Path) -> set[str]:
    from torch.distributed.checkpoint import FileSystemReader

    return set(FileSystemReader(folder / "checkpoint" / "step-2").read_metadata().state_dict_metadata)


def test_pp_vstage_save_holds_every_stage(saved: dict[Layout, Path]) -> None:
    """Several stages per rank: the saved names are those of the whole model."""
    names = tensor_names(saved[LAYOUTS[0]])
    assert len(names) == 4 * (2 + 4 * 9 + 1)  # weight, two moments and a step count of each parameter
    for layout in (LAYOUTS[4], LAYOUTS[5]):
        assert tensor_names(saved[layout]) == names


def test_the_manifest_tells_the_layout(saved: dict[Layout, Path]) -> None:
    manifest = json.loads((saved[LAYOUTS[5]] / "checkpoint" / "step-2" / "manifest.json").read_text())
    assert manifest["layout"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2}
    assert manifest["world_size"] == 4
