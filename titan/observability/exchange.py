"""How ranks tell each other about a fault: through the job's store, which still works when collectives don't."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

from titan.observability.verdict import Report, Verdict, judge

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_ANSWER_SECONDS = 4.0  # from a call until a living rank has answered
_CONNECT_SECONDS = 5.0


class Exchange:
    """One process's side. Nothing is written before a fault: until then a rank asks from time to time if there is one.

    Args:
        store: of the job. Connections of its own are made to it, for the caller's may be busy.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._listening = self._connect()
        self._rank = rank
        self._size = world_size
        # So that a big job's store hears a thousand questions a second at most.
        self.listen_seconds = max(1.0, world_size / 1000)
        self._patience = _ANSWER_SECONDS + 2 * self.listen_seconds

    def called(self) -> bool:
        """Whether some rank has a fault."""
        return bool(self._listening.check(["called"]))

    def announce(self, verdict: Verdict) -> None:
        """Say why the job ends, and call all ranks.

        Raises:
            OSError: the store can't be reached.
        """
        store = self._connect()
        store.compare_set("verdict", "", json.dumps(asdict(verdict)))
        store.set("called", "")
        self._first_of_node(store)  # this rank tells its own error

    def settle(self, report: Report) -> tuple[Verdict, bool]:
        """Report, call all ranks and wait for the verdict; the first to come collects the reports and gives it.

        Returns:
            The verdict, and whether it is this rank that shows it on its node.

        Raises:
            OSError: the store can't be reached.
        """
        store = self._connect()
        store.set(f"report/{self._rank}", json.dumps(asdict(report)))
        store.set("called", "")
        if store.add("reports", 1) == 1:
            reports = self._collect(store)
            if not store.check(["verdict"]):
                store.compare_set("verdict", "", json.dumps(asdict(judge(reports, self._size))))
        store.wait(["verdict"], timedelta(seconds=self._patience + _CONNECT_SECONDS))
        found = json.loads(store.get("verdict"))
        verdict = Verdict(found["text"], tuple(found["culprits"]), found["slow"])
        return verdict, self._first_of_node(store)

    def _collect(self, store: Store) -> dict[int, Report]:
        """Reports by rank, once all are there, or no more time is left, or somebody has said why the job ends."""
        deadline = time.monotonic() + self._patience
        while store.add("reports", 0) < self._size and time.monotonic() < deadline and not store.check(["verdict"]):
            time.sleep(0.1)
        names = {rank: f"report/{rank}" for rank in range(self._size)}
        return {rank: Report(**json.loads(store.get(name))) for rank, name in names.items() if store.check([name])}

    def _first_of_node(self, store: Store) -> bool:
        return bool(store.add(f"shown/{os.environ.get('GROUP_RANK', '0')}", 1) == 1)

    def _connect(self) -> Store:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        at = self._store
        while isinstance(at, PrefixStore):
            at = at.underlying_store
        if isinstance(at, TCPStore):  # asked here first, since it would try for a minute, and print that it does
            socket.create_connection((at.host, at.port), timeout=_CONNECT_SECONDS).close()
        store: Store = self._store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        store.set_timeout(timedelta(seconds=_CONNECT_SECONDS))
        return PrefixStore("fault", store)


def job_exchange() -> Exchange | None:
    """Over the store of the default process group; None when this process is the whole job."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if dist.get_world_size() == 1:
        return None
    return Exchange(c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
