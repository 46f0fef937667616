"""`train.py` with documents kept apart: the same in every layout, with workers, and after resumes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.data.tiny_data import documents
from tests.distributed.test_fingerprint import LAYOUTS, train, workers
from tests.distributed.world import Worlds
from titan.data.prepare import prepare
from titan.data.readers import BadRowPolicy
from titan.data.tokenizer import build_tokenizer

STEPS = 4
MASK, BEST_FIT = "--model.attn_mask=document", "--training.packing=best_fit"


def runs(worlds: Worlds, ranks: int, folder: Path, *arguments: str, local: int = 8, steps: int = STEPS) -> list[Any]:
    own = [f"--job.dump_folder={folder}", f"--training.steps={steps}", f"--training.local_batch_size={local}"]
    rows = worlds(ranks).run(train, [*own, *arguments])[0]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    return rows


def assert_same(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], name: str = "") -> None:
    assert [row["fingerprint"] for row in found] == [row["fingerprint"] for row in expected], name
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], rel=1e-5), (name, key)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 3 to 60 tokens, and one of more than ten windows."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"{number} " * (1 + number % 19))
    (folder / "long.txt").write_text("".join(chr(97 + k * k % 26) for k in range(10 * 16 + 3)))
    return folder


@pytest.fixture(
    scope="module",
    params=[pytest.param("text", marks=pytest.mark.slow), "tokens", pytest.param("best fit", marks=pytest.mark.slow)],
)
def dataset(request: pytest.FixtureRequest, text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    if request.param != "tokens":
        packing = [BEST_FIT] if request.param == "best fit" else []
        return ["--training.dataset=text", f"--training.dataset_path={text}", MASK, *packing]
    output, tokenizer = tmp_path_factory.mktemp("tokens"), build_tokenizer("tiny")
    prepare(documents("text", text), tokenizer, output, processes=1, shard_tokens=500, bad_rows=BadRowPolicy("stop"))
    return ["--training.dataset=tokens", f"--training.dataset_path={output}", MASK]


def test_data_doc_border_every_layout_trains_alike(worlds: Worlds, dataset: list[str], tmp_path: Path) -> None:
    """dp, tp, cp and pp of 2, the third with accumulation and workers."""
    expected = runs(worlds, 1, tmp_path / "alone", *dataset)
    for name in ("dp2", "tp2", "cp2", "pp2"):
        ranks, local, arguments = LAYOUTS[name]
        assert_same(runs(worlds, ranks, tmp_path / name, *dataset, *arguments, local=local), expected, name)


def test_a_resume_goes_on_exactly(worlds: Worlds, dataset: list[str], tmp_path: Path) -> None:
    """On other numbers of ranks and workers."""
    expected = runs(worlds, 1, tmp_path / "straight", *dataset)
    run = [*dataset, "--checkpoint.enable", f"--lr_scheduler.total_steps={STEPS}"]
    runs(worlds, 2, tmp_path / "run", *run, workers(2), local=4, steps=2)
    assert_same(runs(worlds, 1, tmp_path / "run", *run, local=4), expected)


def test_the_mask_changes_labels_alone_and_may_come_with_a_resume(worlds: Worlds, text: Path, tmp_path: Path) -> None:
    """The position is the same with it and without."""
    run = ["--training.dataset=text", f"--training.dataset_path={text}", "--checkpoint.enable"]
    masked = runs(worlds, 1, tmp_path / "masked", *run, MASK)
    runs(worlds, 1, tmp_path / "run", *run, steps=2)
    mixed = runs(worlds, 1, tmp_path / "run", *run, MASK)
    assert [row["fingerprint"] for row in mixed[2:]] == [row["fingerprint"] for row in masked[2:]]
    assert {row["fingerprint"] for row in mixed[:2]}.isdisjoint(row["fingerprint"] for row in masked)
