"""Validation: one mean over all tokens of the set, the same in every layout and every round, that moves nothing."""

from __future__ import annotations

import io
import math
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from scripts import evaluate as evaluate_script
from tests.data.tiny_data import documents
from tests.distributed.runs import TINY, SmallRun, train_here
from tests.distributed.test_matrix import WHOLE_LOGITS, Layout, schedule
from tests.distributed.world import Worlds
from titan.config.derived import validation_text
from titan.config.errors import UserError
from titan.config.loader import load_and_check
from titan.data.microbatch import Microbatch
from titan.data.prepare import prepare
from titan.data.readers import BadRowPolicy
from titan.data.tokenizer import build_tokenizer, document_tokens
from titan.data.validation import read_rows
from titan.models.layers.head import IGNORED
from titan.observability.metric_writers import ValidationMetrics
from titan.training.validate import evaluate

TOKENIZER = build_tokenizer("tiny")
VALIDATION_KEYS = ["step", "validation_loss", "validation_perplexity", "validation_bits_per_byte", "time"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Documents that make 5 windows of 32 tokens and a short one."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number, length in enumerate((70, 3, 60, 45)):
        (folder / f"{number}.txt").write_text("".join(chr(97 + (number * 7 + k * k) % 26) for k in range(length)))
    return folder


def arguments(text: Path, *more: str) -> list[str]:
    own = ["--validation.enable", "--validation.dataset=text", f"--validation.dataset_path={text}"]
    return [*TINY, *own, "--validation.local_batch_size=2", *more]


def all_tokens(text: Path) -> torch.Tensor:
    parts = [document_tokens(TOKENIZER, file.read_text()) for file in sorted(text.iterdir())]
    return torch.cat([torch.from_numpy(part).long() for part in parts])


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("windows", [None, 3, 100])
def test_data_val_every_token_once(text: Path, degree: int, windows: int | None) -> None:
    job = load_and_check(arguments(text), 1).config
    tokens = all_tokens(text)
    shapes, targets = set(), []
    for rank in range(degree):
        rows = read_rows(validation_text(job), TOKENIZER, windows, rank, degree)
        shapes.add((len(rows.microbatches), *{tuple(batch.tokens.shape) for batch in rows.microbatches}))
        for batch in rows.microbatches:
            assert batch.tokens.min() >= 0
            valid = batch.labels != IGNORED
            targets += list(zip(batch.tokens[valid].tolist(), batch.labels[valid].tolist(), strict=True))
    assert len(shapes) == 1  # every rank runs as many batches of the same shape
    last = len(tokens) if windows is None or windows == 100 else 3 * 32 + 1
    expected = list(zip(tokens[: last - 1].tolist(), tokens[1:last].tolist(), strict=True))
    assert sorted(targets) == sorted(expected)
    assert rows.bytes_per_token == pytest.approx(178 / len(tokens), rel=0.4 if windows == 3 else 1e-12)


def whole_batch_loss(run: SmallRun, rows: list[Microbatch]) -> float:
    """From logits of one process, by torch."""
    sums, count = 0.0, 0
    for batch in rows:
        with torch.no_grad():
            logits = run.model(batch.tokens).double()
        sums += F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum").item()
        count += int((batch.labels != IGNORED).sum())
    return sums / count


def evaluate_here(given: list[str], windows: int | None = None) -> float:
    run = SmallRun(*given)
    place = run.dims.batch.get_local_rank(), run.dims.batch_degree
    mask = run.config.model.attn_mask == "document"
    rows = read_rows(validation_text(run.config), TOKENIZER, windows, *place, document_mask=mask)
    return evaluate(run.stages, run.config, run.dims, torch.device("cpu"), rows.microbatches)


def loss_by_torch(given: list[str]) -> float:
    run = SmallRun(*given)
    return whole_batch_loss(run, read_rows(validation_text(run.config), TOKENIZER, None, 0, 1).microbatches)


LAYOUTS = [
    Layout(dp=2),
    Layout(replicate=2),
    Layout(tp=2),
    Layout(tp=2, extra=WHOLE_LOGITS),
    Layout(cp=2),
    Layout(pp=2),
    Layout(pp=2, extra=schedule("Interleaved1F1B")),
    Layout(pp=2, extra=schedule("ZBVZeroBubble")),
    Layout(pp=2, tp=2),
    Layout(dp=2, pp=2, extra=("pipeline_parallel_microbatch_size=2",)),
    Layout(dp=2, extra=("compile.enable=true", "compile.backend=aot_eager")),
    Layout(dp=2, extra=("activation_checkpoint.mode=selective", "activation_checkpoint.offload=true")),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loss_validation_is_that_of_torch_on_one_process(worlds: Worlds, text: Path, layout: Layout) -> None:
    """Uneven ends included: 6 windows, the last one short, in batches of 2 on each batch rank."""
    own = arguments(text)[len(TINY) :]
    (expected,) = worlds(1).run(loss_by_torch, [*own, f"--model.flavor={layout.flavor}"])
    for loss in worlds(layout.ranks).run(evaluate_here, [*layout.arguments, *own]):
        assert loss == pytest.approx(expected, rel=1e-6)


def loss_of_parts_by_torch(given: list[str], text: str) -> float:
    """Each document's part of each window in a forward pass of its own; padding has none."""
    run = SmallRun(*given)
    lengths = torch.tensor([len(document_tokens(TOKENIZER, file.read_text())) for file in sorted(Path(text).iterdir())])
    numbers = torch.arange(len(lengths)).repeat_interleave(lengths)
    tokens = all_tokens(Path(text))
    sums, count = 0.0, 0
    for start in range(0, len(tokens) - 1, 32):
        window, of = tokens[start : start + 33], numbers[start : start + 33]
        for number in of.unique():
            part = window[of == number].unsqueeze(0)
            if part.shape[1] > 1:
                with torch.no_grad():
                    logits = run.model(part[:, :-1]).double()
                sums += F.cross_entropy(logits[0], part[0, 1:], reduction="sum").item()
                count += part.shape[1] - 1
    return sums / count


@pytest.mark.parametrize("layout", [Layout(), *LAYOUTS[:3:2], Layout(cp=2), Layout(pp=2)], ids=str)
def test_data_doc_border_in_validation(worlds: Worlds, text: Path, tmp_path: Path, layout: Layout) -> None:
    """From text and from token files."""
    own = [*arguments(text)[len(TINY) :], "--model.attn_mask=document"]
    (expected,) = worlds(1).run(loss_of_parts_by_torch, own, str(text))
    for loss in worlds(layout.ranks).run(evaluate_here, [*layout.arguments, *own]):
        assert loss == pytest.approx(expected, rel=1e-6)
    tokens = tmp_path / "tokens"
    prepare(documents("text", text), TOKENIZER, tokens, processes=1, shard_tokens=80, bad_rows=BadRowPolicy("stop"))
    own += ["--validation.dataset=tokens", f"--validation.dataset_path={tokens}"]
    for loss in worlds(layout.ranks).run(evaluate_here, [*layout.arguments, *own]):
        assert loss == pytest.approx(expected, rel=1e-6)


def train_rows(worlds: Worlds, ranks: int, given: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What was logged of steps, and of validation rounds."""
    rows = worlds(ranks).run(train_here, given)[0]
    return [row for row in rows if "loss" in row], [row for row in rows if "loss" not in row]


def test_data_val_fixed_windows_that_move_nothing(worlds: Worlds, text: Path, tmp_path: Path) -> None:
    """With a learning rate of 0 all rounds agree; training is the same, bit for bit, with and without them."""
    still = ["--optimizer.lr=0", "--training.steps=3", "--validation.freq=1", f"--job.dump_folder={tmp_path / 'still'}"]
    _, rounds = train_rows(worlds, 2, arguments(text, *still))
    assert [row["step"] for row in rounds] == [1, 2, 3]
    assert len({row["validation_loss"] for row in rounds}) == 1

    given = arguments(text, "--training.steps=5", "--validation.freq=2", "--training.local_batch_size=2")
    steps, rounds = train_rows(worlds, 2, [*given, f"--job.dump_folder={tmp_path / 'with'}"])
    assert [row["step"] for row in rounds] == [2, 4, 5]
    assert all(list(row) == VALIDATION_KEYS for row in rounds)
    off = [argument for argument in given if argument != "--validation.enable"]
    alone, none = train_rows(worlds, 2, [*off, f"--job.dump_folder={tmp_path / 'without'}"])
    assert none == []
    for key in ("loss", "grad_norm", "lr", "tokens_seen"):
        assert [row[key] for row in steps] == [row[key] for row in alone]


def test_rounds_after_a_resume_come_once(worlds: Worlds, text: Path, tmp_path: Path) -> None:
    given = arguments(text, "--validation.freq=1", "--checkpoint.enable", f"--job.dump_folder={tmp_path / 'run'}")
    train_rows(worlds, 1, [*given, "--training.steps=2"])
    steps, rounds = train_rows(worlds, 1, [*given, "--training.steps=4"])
    assert [row["step"] for row in steps] == [row["step"] for row in rounds] == [1, 2, 3, 4]


@pytest.mark.parametrize("windows", [1, 5])
def test_data_finite_end_of_a_validation_set(worlds: Worlds, text: Path, windows: int) -> None:
    """As few windows as there are: ranks without any take part all the same."""
    own = arguments(text)[len(TINY) :]
    losses = [
        worlds(ranks).run(evaluate_here, [f"--parallelism.data_parallel_shard_degree={ranks}", *own], windows)[0]
        for ranks in (1, 2, 4)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_perplexity_and_bits_per_byte() -> None:
    found = ValidationMetrics.of(2.0, bytes_per_token=4.0)
    assert found.validation_perplexity == pytest.approx(7.389056)
    assert found.validation_bits_per_byte == pytest.approx(2 / 0.693147 / 4, rel=1e-5)
    assert ValidationMetrics.of(1000.0, 1.0).validation_perplexity == math.inf


def test_an_empty_set_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    job = load_and_check(arguments(tmp_path), 1).config
    with pytest.raises(UserError, match=r"the validation set can't be read: .* has 0 documents"):
        read_rows(validation_text(job), TOKENIZER, None, 0, 1)


def test_a_checkpoint_scores_the_same_off_line(worlds: Worlds, text: Path, tmp_path: Path) -> None:
    """On another number of ranks, and from options that leave out what the run's config says, the mask included."""
    saved = [f"--job.dump_folder={tmp_path / 'run'}", "--checkpoint.enable", "--training.local_batch_size=4"]
    saved.append("--model.attn_mask=document")
    _, rounds = train_rows(worlds, 1, arguments(text, *saved, "--training.steps=2", "--validation.steps=1"))
    for loss in worlds(2).run(score_here, ["evaluate.py", str(tmp_path / "run/checkpoint"), "--steps=1"]):
        assert loss == pytest.approx(rounds[-1]["validation_loss"], rel=1e-5)


def score_here(argv: list[str]) -> float:
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as output:
        patch.setattr(sys, "argv", argv)
        patch.setenv("WORLD_SIZE", "2")
        evaluate_script.main()
        dist.barrier()
    printed = dict(line.split() for line in output.getvalue().splitlines() if line.startswith("validation_"))
    found: list[Any] = [None, None]
    dist.all_gather_object(found, printed.get("validation_loss"))
    return float(found[0])
