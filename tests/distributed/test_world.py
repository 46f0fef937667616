"""The worlds that the other tests rely on: they must fail when a rank fails."""

import os
import time
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from tests.distributed import world
from tests.distributed.world import WorldError, Worlds


def _sum_of_ranks() -> int:
    value = torch.tensor(dist.get_rank())
    dist.all_reduce(value)
    return int(value)


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("on purpose")
    dist.barrier()


def _sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def test_results_come_by_rank_case_after_case(worlds: Worlds) -> None:
    for _ in range(3):
        assert worlds(2).run(_sum_of_ranks) == [1, 1]


def test_a_failing_rank_fails_the_case_and_the_next_case_works() -> None:
    worlds = Worlds()
    with pytest.raises(WorldError, match=r"(?s)rank 1 of 2.*on purpose"):
        worlds(2).run(_raise_on, 1)
    with pytest.raises(WorldError, match=r"no answer within 1 s from ranks \{0\}"):
        worlds(2).run(_sleep_on, 0, timeout=1)
    assert worlds(2).run(_sum_of_ranks) == [1, 1]
    worlds.close()


def _die_on_last_rank(rank: int, size: int, connection: Connection, store: str) -> None:
    if rank == size - 1:
        os._exit(7)
    connection.send(("ok", None))
    connection.recv()


def test_a_process_that_dies_at_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_serve", _die_on_last_rank)
    with pytest.raises(WorldError, match="process of rank 1 died at start with exit status 7"):
        Worlds()(2)
