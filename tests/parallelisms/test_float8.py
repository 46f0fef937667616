"""Float8 against high precision, and against itself in other layouts.

Products are emulated: in float32, from operands that were rounded to float8, which any machine can do. Not shown: that
the products of GPUs are right, and faster.

A scale is that of the microbatch that a rank computes. So layouts are compared with one process whose microbatches are
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.distributed.runs import TINY, SmallRun, train_here
from tests.distributed.test_matrix import NO_SP, ROWS, SEQ_LEN, Layout, follow, random_batch
from tests.distributed.traffic import Traffic
from tests.distributed.world import Worlds
from titan.checkpoint.state import training_tensors
from titan.checkpoint.tensor_files import read_tensors, write_tensors
from titan.config.errors import UserError
from titan.config.job_config import Float8
from titan.config.loader import load_and_check
from titan.models.spec import model_families
from titan.observability.device import Device
from titan.observability.plan import describe_run
from titan.parallelisms.float8 import Linears, convert_to_float8, refuse_unconverted, sort_linears
from titan.parallelisms.parallel_dims import ParallelDims

FLOAT8 = ["--float8.enable_float8_linear", "--float8.emulate"]
GATHER = ["--float8.enable_fsdp_float8_all_gather"]
PRECOMPUTE = ["--float8.precompute_float8_dynamic_scale_for_fsdp"]
COMPILED = ("--compile.enable", "--compile.backend=aot_eager")
ROWWISE, HIGH_PRECISION_GRADIENT = ("--float8.recipe_name=rowwise",), ("--float8.recipe_name=rowwise_with_gw_hp",)
SIXTEENS = "sixteens"  # the flavor that float8 fits


def one_process(accumulate: int = 1) -> list[str]:
    return Layout(special=SIXTEENS, accumulate=accumulate).arguments


# --- numbers


@pytest.fixture(scope="module")
def in_bf16(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train_50_steps(worlds, tmp_path_factory.mktemp("bf16"), [])


def train_50_steps(worlds: Worlds, folder: Path, extra: list[str]) -> list[float]:
    """Losses on real text, computed in bf16."""
    own = ["--training.steps=50", "--training.mixed_precision_param=bfloat16", "--optimizer.lr=3e-3"]
    arguments = [*TINY, *one_process(), *own, f"--job.dump_folder={folder}", *extra]
    return [row["loss"] for row in worlds(1).run(train_here, arguments)[0]]


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param((), id="tensorwise"),
        pytest.param(ROWWISE, id="rowwise", marks=pytest.mark.slow),
        pytest.param(HIGH_PRECISION_GRADIENT, id="gw_hp", marks=pytest.mark.slow),
    ],
)
def test_losses_stay_near_those_of_bf16(
    worlds: Worlds, in_bf16: list[float], tmp_path: Path, recipe: tuple[str, ...]
) -> None:
    losses = train_50_steps(worlds, tmp_path, [*FLOAT8, *recipe])
    assert losses[-1] < losses[0] - 1 and losses != in_bf16
    assert losses == pytest.approx(in_bf16, rel=0.02)


@pytest.mark.parametrize(
    ("layout", "accumulate", "extra"),
    [
        (Layout(dp=2), 2, ()),
        (Layout(tp=2), 1, ()),
        pytest.param(Layout(tp=2), 1, ROWWISE, marks=pytest.mark.slow),
        (Layout(pp=2), 8, (*GATHER, *PRECOMPUTE)),
        pytest.param(Layout(tp=2), 1, ("--float8.filter_fqns=output,w2,wk",), marks=pytest.mark.slow),
        pytest.param(Layout(tp=2), 1, (*GATHER, *COMPILED), marks=pytest.mark.slow),
        pytest.param(Layout(tp=2, extra=NO_SP), 1, (), marks=pytest.mark.slow),
        pytest.param(Layout(tp=2), 1, HIGH_PRECISION_GRADIENT, marks=pytest.mark.slow),
        pytest.param(Layout(dp=2, tp=2), 2, tuple(GATHER), marks=pytest.mark.slow),
        pytest.param(Layout(replicate=2, tp=2), 2, tuple(GATHER), marks=pytest.mark.slow),
        pytest.param(Layout(pp=2, tp=2), 4, tuple(GATHER), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_layout_follows_one_process(worlds: Worlds, layout: Layout, accumulate: int, extra: tuple[str, ...]) -> None:
    """The first loss is exact, though float8 moves it by 1e-4.

    Later a number that another order of adding rounds the other way, a change of an eighth, spreads over what follows.
    """
    compared = [argument for argument in extra if "recipe" in argument or "filter" in argument]
    expected = worlds(1).run(follow, [*one_process(accumulate), *FLOAT8, *compared])[0]
    arguments = [*layout.arguments, f"--model.flavor={SIXTEENS}", *FLOAT8, *extra]
    found = worlds(layout.ranks).run(follow, arguments, timeout=240)[0]
    for name, weight in expected["initial"].items():
        assert torch.equal(found["initial"][name], weight), f"initial {name}"
    assert found["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-5)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-2)


# --- FSDP


def test_gathering_in_float8_changes_nothing(worlds: Worlds) -> None:
    """In float32: then a weight is cast from the same values before and after its gather. Precomputed scales too."""
    layout = [*Layout(dp=2, special=SIXTEENS).arguments, *FLOAT8]
    plain, gathered, precomputed = (
        worlds(2).run(follow, [*layout, *extra])[0] for extra in ([], GATHER, [*GATHER, *PRECOMPUTE])
    )
    for found in (gathered, precomputed):
        assert found["losses"] == plain["losses"] and found["norms"] == plain["norms"]
        for name, weight in plain["after"].items():
            assert torch.equal(found["after"][name], weight), name


def scales(arguments: list[str]) -> list[tuple[float, float]]:
    """Of each weight gathered in float8: the scale found after a step, ahead of its gather, and the right one."""
    run = SmallRun(*arguments)
    run.step(1, *random_batch(1))
    found = []
    for parameter in run.parameters():
        assert isinstance(parameter, DTensor)
        if (scale := getattr(parameter._local_tensor, "_precomputed_scale", None)) is not None:
            found.append((float(scale), 448 / float(parameter.full_tensor().abs().max())))
    return found


@pytest.mark.parametrize(
    ("layout", "extra", "weights"),
    [
        (Layout(dp=2, special=SIXTEENS), PRECOMPUTE, 14),
        (Layout(tp=2, special=SIXTEENS), [], 14),
        (Layout(pp=2, special=SIXTEENS), PRECOMPUTE, 7),
    ],
    ids=str,
)
def test_scales_are_found_ahead(worlds: Worlds, layout: Layout, extra: list[str], weights: int) -> None:
    """Each is that of the whole weight: e4m3's largest number over its own. With tensor parallelism also unasked."""
    for found in worlds(2).run(scales, [*layout.arguments, *FLOAT8, *GATHER, *extra]):
        assert len(found) == weights
        for scale, expected in found:
            assert scale == pytest.approx(expected, rel=1e-6)


def gathered_bytes(arguments: list[str]) -> int:
    run = SmallRun(*arguments)
    with Traffic() as traffic:
        run.step(1, *random_batch(1))
    return traffic.bytes["all_gather"]


def test_float8_travels_in_a_byte(worlds: Worlds) -> None:
    """Three bytes less than float32, of weights gathered twice, and of streams and gradients of two blocks a layer."""
    layers = tiny_model(SIXTEENS).layers
    weights = sum(parameter.numel() for parameter in layers.parameters() if parameter.ndim == 2)
    for layout, elements in (
        (Layout(dp=2, special=SIXTEENS), 2 * weights // 2),
        (Layout(tp=2, special=SIXTEENS), 2 * 2 * len(layers) * ROWS * SEQ_LEN * 64 // 2),
    ):
        plain, float8 = (
            worlds(2).run(gathered_bytes, [*layout.arguments, *extra])[0] for extra in ([], [*FLOAT8, *GATHER])
        )
        assert plain - float8 == 3 * elements


# --- which linears


def tiny_model(flavor: str) -> Any:
    family = model_families()["tiny"]
    with torch.device("meta"):
        return family.build(family.flavors[flavor])


def sort(flavor: str, *, tp: int = 1, shards: int = 1, filter_fqns: Sequence[str] = ("output",)) -> Linears:
    settings = Float8(filter_fqns=list(filter_fqns), enable_fsdp_float8_all_gather=True)
    dims = ParallelDims(pp=1, dp_replicate=1, dp_shard=shards, cp=1, tp=tp)
    return sort_linears(tiny_model(flavor), settings, dims)


def in_each_layer(*names: str) -> set[str]:
    return {f"layers.{layer}.{name}" for layer in (0, 1) for name in names}


ALL = ("attention.wq", "attention.wk", "attention.wv", "attention.wo", *(f"feed_forward.w{n}" for n in (1, 2, 3)))


def test_sizes_that_float8_products_take() -> None:
    """A multiple of 16, on each tp rank: keys of 24 rows aren't, nor are halves of 48 and 80."""
    assert set(sort(SIXTEENS, tp=2).converted) == in_each_layer(*ALL)
    kept = in_each_layer("attention.wk", "attention.wv")
    assert set(sort("untied").unfit) == kept
    assert set(sort("untied").converted) == in_each_layer(*ALL) - kept
    assert sort("untied", tp=2).converted == ()


def test_filters_take_any_part_of_a_name() -> None:
    found = sort(SIXTEENS, filter_fqns=["output", "layers.0", "w2"])
    assert set(found.converted) == {f"layers.1.{name}" for name in ALL if "w2" not in name}
    assert "output" in found.filtered and found.unfit == ()


def test_weights_that_cannot_be_cut_evenly_are_gathered_as_they_are() -> None:
    assert set(sort(SIXTEENS, shards=64).gathered) == set(sort(SIXTEENS).converted) - in_each_layer(
        "attention.wk", "attention.wv"
    )
    assert sort(SIXTEENS, shards=64).converted == sort(SIXTEENS).converted


def test_a_linear_with_a_forward_of_its_own_is_left_alone() -> None:
    class Own(nn.Linear):
        pass

    dims = ParallelDims(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1)
    found = sort_linears(nn.ModuleDict({"own": Own(16, 16), "plain": nn.Linear(16, 16)}), Float8(), dims)
    assert (found.converted, found.unfit) == (("plain",), ("own",))


def test_a_family_that_does_not_convert_is_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 7))
    settings = Float8(enable_float8_linear=True, emulate=True)
    dims = ParallelDims(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1)
    with pytest.raises(UserError, match=r"leaves 1 linears as they are \(0, …\); it must call .*convert_to_float8"):
        refuse_unconverted([model], settings, dims)
    convert_to_float8(model, settings, dims)
    refuse_unconverted([model], settings, dims)


def test_the_plan_tells_what_is_converted() -> None:
    config = load_and_check([*TINY, *Layout(dp=2, special=SIXTEENS).arguments, *FLOAT8, *GATHER], 2).config
    dims = ParallelDims.from_config(config.parallelism, 2)
    plan = describe_run(config, dims, Device("cpu", torch.device("cpu"), "gloo", "a CPU"))
    assert (
        "float8: 14 linears, tensorwise, emulated, weights gathered in float8; left in float32: 1 by "
        "float8.filter_fqns, 0 of sizes that float8 products don't take"
    ) in plan


# --- the weights


def reload(folder: str, before: list[str], after: list[str]) -> bool:
    """Weights and moments that one run writes are those that another one reads, bit for bit."""
    states = []
    for seed, extra in enumerate((before, after)):
        run = SmallRun(*Layout(dp=2, special=SIXTEENS).arguments, *extra, f"--debug.seed={seed}")
        run.step(1, *random_batch(1))
        state = training_tensors(run.stages.parts, torch.optim.AdamW(run.parameters()))
        access = write_tensors if seed == 0 else read_tensors
        access(Path(folder), state, dist.group.WORLD)
        states.append({name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()})
    written, read = states
    return written.keys() == read.keys() and all(torch.equal(written[name], read[name]) for name in written)


@pytest.mark.parametrize("order", [1, -1], ids=["from float8", "to float8"])
def test_checkpoints_are_the_same_with_and_without(worlds: Worlds, tmp_path: Path, order: int) -> None:
    before, after = [[*FLOAT8, *GATHER, *PRECOMPUTE], []][::order]
    assert worlds(2).run(reload, str(tmp_path / "saved"), before, after) == [True, True]
    for file in (tmp_path / "saved").iterdir():
        assert b"torchao" not in file.read_bytes(), file  # who reads it may not have it
