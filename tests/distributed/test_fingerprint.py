"""metrics.fingerprint: the same batches in every layout, with workers, and after resumes on other layouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.data.test_workers import allow_children
from tests.data.tiny_data import documents
from tests.distributed.runs import TINY, train_here
from tests.distributed.world import Worlds
from titan.data.fingerprint import batch_fingerprint
from titan.data.microbatch import Microbatch
from titan.data.prepare import prepare
from titan.data.readers import BadRowPolicy
from titan.data.tokenizer import build_tokenizer

DATA = ["--metrics.fingerprint", "--training.global_batch_size=8", "--training.seq_len=16", "--debug.seed=5"]


def train(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """`train_here` in a process that may have children, which a test world's may not otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        allow_children(patch)
        return train_here([*TINY, *DATA, *arguments])


def fingerprints(worlds: Worlds, ranks: int, folder: Path, *arguments: str, steps: int, local: int = 8) -> list[str]:
    own = [f"--job.dump_folder={folder}", f"--training.steps={steps}", f"--training.local_batch_size={local}"]
    rows = worlds(ranks).run(train, [*own, *arguments])[0]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    return [row["fingerprint"] for row in rows]


@pytest.fixture(scope="module", params=["text", pytest.param("tokens", marks=pytest.mark.slow)])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a small dataset, of which 30 steps take more than an epoch; as text, and as token files."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(100):
        (folder / f"{number:03}.txt").write_text(f"{number} is a number. " * (1 + number % 5))
    text = [f"--training.dataset_path={folder}"]
    if request.param == "text":
        return ["--training.dataset=text", *text]
    tokenizer = build_tokenizer("tiny")
    output = tmp_path_factory.mktemp("tokens")
    prepare(documents("text", folder), tokenizer, output, processes=1, shard_tokens=900, bad_rows=BadRowPolicy("stop"))
    return ["--training.dataset=tokens", f"--training.dataset_path={output}"]


def workers(count: int) -> str:
    return f"--training.dataloader.num_workers={count}"


def degree(name: str) -> str:
    return f"--parallelism.{name}_parallel_degree=2"


LAYOUTS = {
    "accumulated": (1, 2, [workers(1)]),
    "dp2": (2, 4, []),
    "dp4 accumulated, workers": (4, 1, [workers(3)]),
    "tp2": (2, 8, [degree("tensor")]),
    "cp2": (2, 4, [degree("context"), workers(3)]),
    "pp2": (2, 8, [degree("pipeline"), "--parallelism.pipeline_parallel_microbatch_size=4"]),
}


@pytest.mark.parametrize("steps", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_every_layout_has_the_same_batches(worlds: Worlds, dataset: list[str], tmp_path: Path, steps: int) -> None:
    expected = fingerprints(worlds, 1, tmp_path / "alone", *dataset, steps=steps)
    assert len(set(expected)) == steps
    for name, (ranks, local, arguments) in LAYOUTS.items():
        found = fingerprints(worlds, ranks, tmp_path / name, *dataset, *arguments, steps=steps, local=local)
        assert found == expected, name


@pytest.mark.slow
@pytest.mark.parametrize("ends", [(3, 5, 8), (11, 17, 30)], ids=str)
def test_two_resumes_on_other_numbers_of_ranks_have_the_same_batches(
    worlds: Worlds, dataset: list[str], tmp_path: Path, ends: tuple[int, int, int]
) -> None:
    expected = fingerprints(worlds, 1, tmp_path / "straight", *dataset, steps=ends[-1])
    run = [*dataset, "--checkpoint.enable", "--lr_scheduler.total_steps=30"]
    for steps, (ranks, local, count) in zip(ends, ((4, 2, 1), (1, 4, 3), (2, 2, 0)), strict=True):
        found = fingerprints(worlds, ranks, tmp_path / "run", *run, workers(count), steps=steps, local=local)
        assert found == expected[:steps]


def hashes(rows: list[list[int]], labels: list[list[int]]) -> str:
    tokens, right = torch.tensor(rows), torch.tensor(labels)
    share = len(rows) // dist.get_world_size()
    mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    parts = zip(tokens[mine].split(1), right[mine].split(1), strict=True)
    return batch_fingerprint([Microbatch(*part) for part in parts], dist.group.WORLD)


def test_any_token_label_and_place_changes_it(worlds: Worlds) -> None:
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 3]]
    labels = [[2, 3, 4], [5, 6, -100], [8, 9, 1], [2, 3, 4]]
    (expected,) = set(worlds(1).run(hashes, rows, labels))
    assert set(worlds(2).run(hashes, rows, labels)) == {expected}
    assert len(expected) == 16 and int(expected, 16)
    others = [
        (rows[::-1], labels[::-1]),
        ([rows[1], rows[0], *rows[2:]], [labels[1], labels[0], *labels[2:]]),
        ([[1, 2, 4], *rows[1:]], labels),
        (rows, [labels[0], [5, 6, 7], *labels[2:]]),
    ]
    found = {worlds(1).run(hashes, *other)[0] for other in others}
    assert len(found) == 4 and expected not in found


def test_without_it_no_key_is_written(worlds: Worlds, tmp_path: Path) -> None:
    rows = worlds(1).run(train, [f"--job.dump_folder={tmp_path}", "--training.steps=1", "--metrics.fingerprint=false"])
    assert "fingerprint" not in rows[0][0]
