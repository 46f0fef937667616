"""The loss over a vocabulary that tp ranks share, against torch's own on one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed.runs import TINY
from tests.distributed.world import Worlds
from tests.training.test_loss import gradients, torchs_own
from titan.config.loader import load_and_check
from titan.models.layers.head import IGNORED, Head, Labels
from titan.parallelisms.parallel_dims import ParallelDims
from titan.parallelisms.tensor import Role, apply_tensor_parallel
from titan.training.loss import set_loss

DIM, VOCAB, ROWS, SEQ_LEN = 16, 101, 2, 12
LOSSES = [
    *(["--loss.name=linear_cross_entropy", f"--loss.num_chunks={chunks}"] for chunks in (1, 3, 8)),
    ["--loss.name=cross_entropy"],
    ["--loss.name=cross_entropy", "--parallelism.disable_loss_parallel"],
]


def deviations(tp: int, sequence_parallel: bool, z_loss: float, backend: str) -> list[float]:
    """Of each loss: the largest relative deviation of it and its gradients (of the stream, of the weight)."""
    torch.manual_seed(0)
    weight, stream = torch.randn(VOCAB, DIM), torch.randn(ROWS, SEQ_LEN, DIM)
    labels = torch.randint(0, VOCAB, (ROWS, SEQ_LEN))
    labels[0, :5] = labels[1, 7] = IGNORED
    whole = Head(DIM, VOCAB)
    whole.weight.data.copy_(weight)
    right = gradients(whole, stream, torchs_own(whole, labels, z_loss))
    found = []
    for arguments in LOSSES:
        compile_it = (
            [f"--compile.backend={backend}", "--compile.components=loss", "--compile.enable"] if backend else []
        )
        layout = [f"--parallelism.tensor_parallel_degree={tp}", "--model.flavor=deep"]
        config = load_and_check([*TINY, *layout, f"--loss.z_loss={z_loss}", *compile_it, *arguments], tp).config
        dims = ParallelDims.from_config(config.parallelism, tp)
        dims.build()
        model = torch.nn.Module()
        model.output = Head(DIM, VOCAB)
        model.output.weight.data.copy_(weight)
        apply_tensor_parallel(model, dims.world["tp"], {"output": Role.HEAD}, sequence_parallel=sequence_parallel)
        set_loss([model], config, dims)
        mine = stream.chunk(tp, dim=1)[dims.world.get_local_rank("tp")] if sequence_parallel else stream
        mine = mine.clone().requires_grad_()
        loss = model.output(mine, Labels(labels))
        (loss / 7).backward()
        weight_grad = model.output.weight.grad
        assert isinstance(weight_grad, DTensor) and mine.grad is not None
        stream_grad = right[1].chunk(tp, dim=1)[dims.world.get_local_rank("tp")] if sequence_parallel else right[1]
        pairs = [(loss.detach(), right[0]), (mine.grad, stream_grad), (weight_grad.full_tensor(), right[2])]
        found.append(max(((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs))
    return found


def test_tp_chunked_ce_and_tp_vocab(worlds: Worlds) -> None:
    """Vocabulary 101 over 2 and 4 ranks, chunk counts that don't divide, ignored labels: 1e-6 (NUMERICS.md)."""
    for tp, sequence_parallel, z_loss in ((2, True, 0.0), (2, False, 1e-2), (4, True, 1e-2)):
        for found in worlds(tp).run(deviations, tp, sequence_parallel, z_loss, ""):
            assert max(found) < 1e-6, (tp, sequence_parallel, z_loss, found)


@pytest.mark.slow
def test_compiled_loss_over_a_split_vocabulary(worlds: Worlds) -> None:
    for found in worlds(2).run(deviations, 2, True, 1e-2, "aot_eager"):
        assert max(found) < 1e-6, found
