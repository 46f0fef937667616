"""Ranks as threads of this process, over a real store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from titan.observability import exchange
from titan.observability.exchange import Exchange
from titan.observability.verdict import Report, Verdict

WAITS = Report("step 3", "all_reduce", "5 s", "", "")
BUSY = Report("step 3", "", "5 s", "", "in sleep")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    monkeypatch.setattr(exchange, "_ANSWER_SECONDS", -1.0)  # and two for listening
    store = PrefixStore("run", TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return [Exchange(store, rank, 3) for rank in range(3)]


def test_all_come_to_the_same_verdict_and_one_of_a_node_shows_it(ranks: list[Exchange]) -> None:
    assert not ranks[2].called()
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(Exchange.settle, ranks, [WAITS, BUSY, WAITS]))
    assert ranks[2].called()
    assert {verdict.culprits for verdict, _ in found} == {(1,)}
    assert len({verdict.text for verdict, _ in found}) == 1 and "in sleep" in found[0][0].text
    assert sorted(shows for _, shows in found) == [False, False, True]


def test_a_rank_that_is_gone_is_not_waited_for_long(ranks: list[Exchange]) -> None:
    start = time.monotonic()
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(Exchange.settle, ranks[:2], [WAITS, WAITS]))
    assert [verdict.culprits for verdict, _ in found] == [(2,), (2,)]
    assert time.monotonic() - start < 3


def test_an_announced_error_is_the_verdict(ranks: list[Exchange]) -> None:
    ranks[1].announce(Verdict("rank 1 failed in step 3: ValueError: x", (1,), slow=False))
    verdict, shows = ranks[0].settle(WAITS)
    assert verdict == Verdict("rank 1 failed in step 3: ValueError: x", (1,), slow=False)
    assert not shows  # rank 1 did, on the same node


def test_a_store_that_is_gone_is_an_error_at_once(ranks: list[Exchange], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **settings: object) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(exchange.socket, "create_connection", refuse)
    with pytest.raises(OSError):
        ranks[0].settle(WAITS)
