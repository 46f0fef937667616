from __future__ import annotations

import torch
import torch.distributed as dist

from tests.distributed.world import Worlds
from titan.data.microbatch import Microbatch
from titan.models.layers.head import IGNORED
from titan.training.step import Agreement, agree_on_step


def agree(ranks_per_row: int, ended: int | None, asked: int | None) -> Agreement:
    """Ranks that hold the same rows are neighbours. Row r has r + 1 valid labels, of 8."""
    rank = dist.get_rank()
    labels = torch.full((1, 8), IGNORED)
    labels[0, : rank // ranks_per_row + 1] = 5
    batches = None if rank == ended else [Microbatch(torch.zeros_like(labels), labels)]
    return agree_on_step(batches, ranks_per_row, stop=rank == asked)


def test_labels_are_counted_once_whoever_shares_them(worlds: Worlds) -> None:
    for ranks_per_row, valid in ((1, 1 + 2 + 3 + 4), (2, 1 + 2), (4, 1)):
        assert worlds(4).run(agree, ranks_per_row, None, None) == [Agreement(valid, False, False)] * 4


def test_one_rank_is_enough_to_end_all(worlds: Worlds) -> None:
    assert worlds(4).run(agree, 1, None, 2) == [Agreement(10, False, True)] * 4
    assert all(agreed.data_ended and not agreed.stop for agreed in worlds(4).run(agree, 1, 3, None))
