"""What the matrix of layouts doesn't show: clipping, mixed precision, replicas that drift, schedules from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.distributed.runs import TINY, SmallRun, train_here
from tests.distributed.test_matrix import NO_SP, RING, Layout, follow, random_batch, schedule
from tests.distributed.world import Worlds

ONE = Layout(special="deep")
LAYOUTS = [
    Layout(special="deep", tp=2, extra=NO_SP),
    Layout(special="deep", cp=2, extra=RING),
    Layout(pp=2, extra=schedule("Interleaved1F1B")),
    Layout(pp=2, tp=2, extra=schedule("ZBVZeroBubble")),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_pp_gradnorm_clipping_acts_on_the_norm_of_the_whole_model(worlds: Worlds, layout: Layout) -> None:
    clip = ["--training.max_norm=0.1"]
    expected = worlds(1).run(follow, ONE.arguments + clip)[0]
    found = worlds(layout.ranks).run(follow, layout.arguments + clip)[0]
    assert min(expected["norms"]) > 1
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    for name, weight in expected["after"].items():
        assert (found["after"][name] - weight).abs().max() < 1e-7


def in_bf16(arguments: list[str]) -> tuple[list[float], set[str]]:
    """Losses of some steps in bf16, and the dtypes of what blocks give and of the weights kept."""
    run = SmallRun(*arguments, "--training.mixed_precision_param=bfloat16")
    seen: set[str] = set()

    def look(module: Any, inputs: Any, output: torch.Tensor) -> None:
        seen.add(f"computes {output.dtype}")

    for part in run.stages.parts:
        for block in part.layers.values():
            block.register_forward_hook(look)
            block.attention.wq.register_forward_hook(look)
            block.attention_norm.register_forward_hook(look)
    losses = [run.step(step, *random_batch(step)).loss for step in (1, 2, 3)]
    return losses, seen | {f"keeps {parameter.dtype}" for parameter in run.parameters()}


@pytest.mark.parametrize(
    "layout",
    [LAYOUTS[0], pytest.param(LAYOUTS[3], marks=pytest.mark.slow), Layout(special="deep", pp=2, cp=2)],
    ids=str,
)
def test_num_mp_skipped_bf16_means_the_same_in_every_layout(worlds: Worlds, layout: Layout) -> None:
    expected, _ = worlds(1).run(in_bf16, ONE.arguments)[0]
    for losses, dtypes in worlds(layout.ranks).run(in_bf16, layout.arguments):
        assert losses == pytest.approx(expected, rel=2e-3)
        assert dtypes == {"computes torch.bfloat16", "keeps torch.float32"}


def replicated_weights(arguments: list[str]) -> dict[str, bool]:
    """Whether what every tp rank holds whole is the same on all of them after five steps, bit for bit."""
    run = SmallRun(*arguments)
    for step in range(1, 6):
        run.step(step, *random_batch(step))
    tp = run.dims.world["tp"]
    equal = {}
    for name, parameter in run.model.named_parameters():
        assert isinstance(parameter, DTensor)
        if parameter.placements[parameter.device_mesh.mesh_dim_names.index("tp")].is_replicate():
            copies = [torch.empty_like(parameter.to_local()) for _ in range(tp.size())]
            dist.all_gather(copies, parameter.to_local().detach().contiguous(), group=tp.get_group())
            equal[name] = all(torch.equal(copy, copies[0]) for copy in copies)
    return equal


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, extra=NO_SP), Layout(dp=2, tp=2)], ids=str)
def test_tp_norm_grad_replicated_weights_do_not_drift(worlds: Worlds, layout: Layout) -> None:
    for equal in worlds(layout.ranks).run(replicated_weights, layout.arguments):
        assert len(equal) == 5  # the gains of two layers and of the last norm
        assert all(equal.values()), equal


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(tp=2), marks=pytest.mark.slow),
        pytest.param(Layout(cp=2, extra=RING), marks=pytest.mark.slow),
        Layout(pp=2),
    ],
    ids=str,
)
def test_compiled_blocks_follow_the_eager_ones(worlds: Worlds, layout: Layout) -> None:
    """Each block as one graph without breaks, or compiling fails; the backend keeps eager's arithmetic."""
    expected = worlds(1).run(follow, Layout().arguments)[0]
    compiled = ["--compile.enable", "--compile.backend=aot_eager"]
    found = worlds(layout.ranks).run(follow, layout.arguments + compiled, timeout=240)[0]
    assert found["initial"].keys() == expected["initial"].keys()
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)


def write_schedule(path: Path, order: str) -> str:
    """GPipe for two ranks and eight microbatches: all forward passes, then all backward ones, in this order."""
    rows = []
    for rank in (0, 1):
        actions = [f"{rank}F{microbatch}" for microbatch in range(8)]
        backward = [f"{rank}B{microbatch}" for microbatch in range(8)]
        rows.append(",".join(actions + (backward if order == "first" else backward[::-1])))
    path.write_text("\n".join(rows) + "\n")
    return str(path)


@pytest.mark.parametrize("order", ["first", "last"])
def test_a_schedule_from_a_file(worlds: Worlds, tmp_path: Path, order: str) -> None:
    expected = worlds(1).run(follow, Layout().arguments)[0]
    layout = Layout(pp=2, extra=(f"pipeline_parallel_schedule_csv={write_schedule(tmp_path / 'own.csv', order)}",))
    found = worlds(2).run(follow, layout.arguments)[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)


def test_pp_loss_rank_the_log_holds_the_real_loss(worlds: Worlds, tmp_path: Path) -> None:
    """The loss is known to the last stage; metrics and TensorBoard are written by rank 0, which holds the first."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = {}
    for layout in (Layout(), Layout(pp=2), Layout(pp=2, dp=2)):
        folder = tmp_path / str(layout)
        own = [f"--job.dump_folder={folder}", "--training.steps=3", "--metrics.enable_tensorboard"]
        rows[layout] = worlds(layout.ranks).run(train_here, [*TINY, *layout.arguments, *own])[0]
        events = EventAccumulator(str(folder / "tb"))
        events.Reload()
        assert [event.value for event in events.Scalars("loss")] == pytest.approx(
            [row["loss"] for row in rows[layout]], rel=1e-6
        )
    for layout_rows in rows.values():
        for key in ("loss", "grad_norm", "lr", "tokens_seen"):
            assert [row[key] for row in layout_rows] == pytest.approx([row[key] for row in rows[Layout()]], rel=1e-5)


def poisoned(arguments: list[str]) -> str:
    """The last rank makes a weight infinite before step 2; what each rank says at the end."""
    from titan.training.step import TrainingDiverged

    run = SmallRun(*arguments)
    run.step(1, *random_batch(1))
    if dist.get_rank() == dist.get_world_size() - 1:
        run.parameters()[-1].to_local().data.fill_(torch.inf)
    try:
        run.step(2, *random_batch(2))
    except TrainingDiverged as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(pp=2, cp=2)], ids=str)
def test_num_nan_all_ranks_stop_together(worlds: Worlds, layout: Layout) -> None:
    assert all(text.startswith("step 2: loss") for text in worlds(layout.ranks).run(poisoned, layout.arguments))
