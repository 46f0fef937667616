"""Where the sums of gradients lie."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.distributed.runs import SmallRun
from tests.distributed.world import Worlds
from tests.estimation.traced_models import ARGUMENTS
from titan.config import derived
from titan.config.derived import model_sizes
from titan.config.loader import load_and_check
from titan.estimation.dry_step import trace_step
from titan.estimation.events import Allocation
from titan.estimation.from_config import layout_of
from titan.parallelisms import fsdp
from titan.parallelisms.fsdp import ReduceScatterIntoPool

BATCH = "--training.local_batch_size=2"


def weights_after_steps(arguments: list[str], pooled: bool) -> tuple[bool, dict[str, torch.Tensor]]:
    """Whether FSDP asks ReduceScatterIntoPool for memory, and the weights after three steps."""
    with pytest.MonkeyPatch.context() as patch:
        if not pooled:
            patch.setattr(fsdp, "keeps_reduced_gradients", lambda *_: False)
        asked = []
        allocate = ReduceScatterIntoPool.allocate
        patch.setattr(
            ReduceScatterIntoPool,
            "allocate",
            lambda self, size, **kinds: asked.append(size) or allocate(self, size, **kinds),
        )
        run = SmallRun(BATCH, *arguments)
        tokens = torch.arange(4 * 32).reshape(4, 32) % 99
        for step in (1, 2, 3):
            run.step(step, tokens, tokens.roll(-1, dims=1))
        assert any(isinstance(module, FSDPModule) for module in run.model.modules())
        return bool(asked), run.weights()


def test_the_pool_changes_no_number(worlds: Worlds) -> None:
    (used, weights), (unused, expected) = (
        worlds(2).run(weights_after_steps, [], pooled)[0] for pooled in (True, False)
    )
    assert used and not unused
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name


SETTINGS = [
    ((), True),
    (("--parallelism.data_parallel_replicate_degree=2",), True),
    (("--training.global_batch_size=16",), False),  # a sum that is added to another one
    (("--training.mixed_precision_reduce=bfloat16",), False),  # is cast
    (("--training.enable_cpu_offload",), False),
    (("--optimizer.early_step_in_backward", "--training.max_norm=0"), False),
]


@pytest.mark.parametrize(("settings", "pooled"), SETTINGS, ids=lambda value: str(value))
def test_only_sums_that_live_until_the_update(settings: tuple[str, ...], pooled: bool) -> None:
    """By the config's rule and by the estimate's, which are two because a search has no config for each layout."""
    config = load_and_check([BATCH, *settings], 4).config
    layout = layout_of(config, 4)
    assert derived.keeps_reduced_gradients(config, layout.dp_replicate * layout.dp_shard) is pooled
    assert layout.pools_gradients is pooled


def test_fsdps_streams_have_pools_of_their_own_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a traced step: what is summed, in the stream that computes and in FSDP's."""
    config = load_and_check([*ARGUMENTS, "--model.flavor=two"], 4).config
    found = {}
    for pooled in (True, False):
        if not pooled:
            monkeypatch.setattr(fsdp, "keeps_reduced_gradients", lambda *_: False)
        trace = trace_step(config, 4, model_sizes(config).n_layers, 1).trace
        sums = [event for event in trace.events if isinstance(event, Allocation)]
        gradients = [event for event in sums if trace.categories.get(event.object) == "gradients"]
        assert gradients
        found[pooled] = {event.stream == 0 for event in gradients}
    assert found == {True: {True}, False: {False}}
