"""Documents in one window that don't see each other: the same as each in a window of its own, in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import flex_attention

from tests.distributed.runs import SmallRun
from tests.distributed.test_matrix import SEQ_LEN, Layout, schedule
from tests.distributed.world import Worlds
from titan.config import checks
from titan.data.microbatch import Microbatch
from titan.models.layers.head import IGNORED
from titan.training.step import agree_on_step
from titan.training.validate import evaluate

# Lengths of the documents in each window of 32 tokens.
WINDOWS = [[10, 22], [32], [1, 30, 1], [16, 16], [5, 4, 3, 20], [31, 1], [8, 8, 8, 8], [20, 12]]


def documents() -> list[torch.Tensor]:
    """Tokens, and one more: the last one's label."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(101, (length + 1,), generator=generator) for window in WINDOWS for length in window]


def packed(texts: Sequence[torch.Tensor]) -> Microbatch:
    """All windows: a document after the other, positions from 0 in each."""
    rest = iter(texts)
    rows = [[next(rest) for _ in window] for window in WINDOWS]
    return Microbatch(
        torch.stack([torch.cat([text[:-1] for text in row]) for row in rows]),
        torch.stack([torch.cat([text[1:] for text in row]) for row in rows]),
        torch.stack([torch.cat([torch.arange(len(text) - 1) for text in row]) for row in rows]),
        torch.stack([torch.cat([torch.full((len(text) - 1,), n) for n, text in enumerate(row)]) for row in rows]),
    )


def alone(texts: Sequence[torch.Tensor]) -> Microbatch:
    """Each document in a window of its own, the rest of which counts for nothing."""
    tokens = torch.zeros(len(texts), SEQ_LEN, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORED)
    for row, text in enumerate(texts):
        tokens[row, : len(text) - 1] = text[:-1]
        labels[row, : len(text) - 1] = text[1:]
    return Microbatch(tokens, labels)


def loss_and_norm(layout: Layout, *, together: bool) -> tuple[float, float]:
    """Of a step. The loss is taken as a sum, for windows of one document each are more rows."""
    run = SmallRun(*layout.arguments)
    if not together:
        return _step(run, [alone(documents())])
    whole = packed(documents())
    rows = len(WINDOWS) // run.dims.batch_degree
    start = run.dims.batch.get_local_rank() * rows
    mine = [part[start : start + rows] for part in whole if part is not None]
    size = run.config.training.local_batch_size
    return _step(run, [Microbatch(*parts) for parts in zip(*(part.split(size) for part in mine), strict=True)])


def _step(run: SmallRun, batches: list[Microbatch]) -> tuple[float, float]:
    agreed = agree_on_step(batches, run.dims.ranks_per_row, stop=False)
    outcome = run.steps.run(1, batches, agreed.valid_tokens)
    return outcome.loss, outcome.grad_norm


@pytest.fixture(scope="module")
def expected(worlds: Worlds) -> tuple[float, float]:
    (found,) = worlds(1).run(loss_and_norm, Layout(), together=False)
    return found


COMPILED = ("compile.enable=true", "compile.backend=aot_eager")
OP = ("activation_checkpoint.mode=selective", "activation_checkpoint.selective_ac_option=op")
LAYOUTS = [
    Layout(),
    Layout(accumulate=4),
    Layout(dp=2),
    Layout(tp=2),
    Layout(cp=2),
    Layout(cp=2, extra=("context_parallel_load_balancer=none",)),
    Layout(pp=2),
    Layout(pp=2, cp=2),
    Layout(dp=2, extra=COMPILED),
    pytest.param(Layout(tp=2, extra=(*COMPILED, *OP)), marks=pytest.mark.slow),
    Layout(cp=2, extra=OP),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_data_doc_border_together_as_alone(worlds: Worlds, expected: tuple[float, float], layout: Layout) -> None:
    for found in worlds(layout.ranks).run(loss_and_norm, layout, together=True):
        assert found == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_data_doc_border_in_deeper_pipelines(worlds: Worlds, name: str) -> None:
    deep = Layout(special="deep")
    (right,) = worlds(1).run(loss_and_norm, deep, together=False)
    for found in worlds(2).run(loss_and_norm, Layout(pp=2, extra=schedule(name)), together=True):
        assert found == pytest.approx(right, rel=2e-6)


def losses_of_the_second(layout: Layout) -> list[float]:
    """The loss of the last document of each window, as it is, with the others changed, and seeing them."""
    run = SmallRun(*layout.arguments)
    whole = packed(documents())
    assert whole.documents is not None
    last = whole.documents == whole.documents.amax(dim=1, keepdim=True)
    tokens, labels = whole.tokens, whole.labels.where(last, IGNORED)
    changed = (tokens + 1) % 101
    batches = [
        Microbatch(tokens, labels, whole.positions, whole.documents),
        Microbatch(tokens.where(last, changed), labels, whole.positions, whole.documents),
        Microbatch(tokens, labels, whole.positions),
    ]
    return [evaluate(run.stages, run.config, run.dims, torch.device("cpu"), [batch]) for batch in batches]


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(cp=2), Layout(pp=2)], ids=str)
def test_data_doc_border_nothing_of_one_document_reaches_another(worlds: Worlds, layout: Layout) -> None:
    """Bit for bit."""
    for as_it_is, with_others_changed, seeing_them in worlds(layout.ranks).run(losses_of_the_second, layout):
        assert as_it_is == with_others_changed
        assert as_it_is != pytest.approx(seeing_them, rel=1e-4)


def logits_of_the_second() -> tuple[torch.Tensor, torch.Tensor]:
    run = SmallRun(*Layout().arguments)
    whole = packed(documents())
    assert whole.documents is not None
    last = whole.documents == whole.documents.amax(dim=1, keepdim=True)
    with torch.no_grad():
        found = [
            run.model(tokens, positions=whole.positions, documents=whole.documents)[last]
            for tokens in (whole.tokens, whole.tokens.where(last, 7))
        ]
    assert dist.get_world_size() == 1
    return found[0], found[1]


def test_data_doc_border_logits_are_bit_equal(worlds: Worlds) -> None:
    ((before, after),) = worlds(1).run(logits_of_the_second)
    assert torch.equal(before, after)


def flex_loss_and_norm(layout: Layout) -> tuple[float, float]:
    """With FlexAttention, whose backward works on CPUs too, though slowly, and isn't offered there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_attention, "_validate_device", lambda *_: None)
        patch.setattr(checks, "RULES", [rule for rule in checks.RULES if "model.attn_backend" not in rule.reads])
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        return loss_and_norm(layout, together=True)


FLEX = (*COMPILED, "model.attn_backend=flex", "model.attn_mask=document")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [Layout(dp=2, extra=(*FLEX, *OP)), Layout(tp=2, extra=FLEX), Layout(pp=2, extra=FLEX)], ids=str
)
def test_flex_attention_in_layouts(worlds: Worlds, expected: tuple[float, float], layout: Layout) -> None:
    for found in worlds(layout.ranks).run(flex_loss_and_norm, layout):
        assert found == pytest.approx(expected, rel=2e-6)
