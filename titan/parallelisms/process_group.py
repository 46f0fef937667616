"""The process group: how a job's processes find each other, and how long they wait."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from titan.config.errors import UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from titan.observability.device import Device

_LAUNCH = "start it with: torchrun --nproc_per_node=N train.py …"


def start_process_group(device: Device, timeout_seconds: int) -> bool:
    """Join the job that a launcher such as torchrun describes by environment variables; alone without one.

    Returns:
        Whether a group was started; False when the caller has one already.

    Raises:
        UserError: half a launcher's variables, an unreachable or busy address, or peers that don't come in time.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return False
    timeout = timedelta(seconds=timeout_seconds)
    if "RANK" not in os.environ and os.environ.get("WORLD_SIZE", "1") == "1":
        from torch._C._distributed_c10d import HashStore

        dist.init_process_group(device.backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return True
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(f"a launcher's environment variables are incomplete, {', '.join(missing)} missing; {_LAUNCH}")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _fresh_names_in_the_launchers_store(rank, size, timeout_seconds)
            dist.init_process_group(device.backend, store=store, rank=rank, world_size=size, timeout=timeout)
        else:
            dist.init_process_group(device.backend, timeout=timeout)
    except (dist.DistStoreError, dist.DistNetworkError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"rank {rank} of WORLD_SIZE = {size} found no process group at {address} "
            f"within comm.init_timeout_seconds = {timeout_seconds}. Are so many processes running, and is the port "
            f"free? {_LAUNCH}\n  ({str(error).splitlines()[0]})"
        ) from error
    return True


def _fresh_names_in_the_launchers_store(rank: int, world_size: int, timeout_seconds: int) -> Store:
    """The store that torchrun keeps for its workers, under names that no earlier start of them has used.

    torchrun starts workers again with the same store, where the addresses of those that died still stand. It tells the
    workers nothing that all starts differ by and all ranks share: rank 0 has to name the start. The name that a rank
    finds may still be that of an earlier one, so it holds a port on which its rank 0 listens: the dead don't.

    Raises:
        DistStoreError: not all ranks have come in time.
        DistNetworkError: the store can't be reached.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed import DistStoreError

    deadline = time.monotonic() + timeout_seconds
    host = os.environ["MASTER_ADDR"]
    launchers = TCPStore(
        host, int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=timeout_seconds)
    )
    living = None
    if rank == 0:
        living = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        launchers.set("titan/start", f"{living.port}-{time.time_ns()}")
    while True:
        launchers.wait(["titan/start"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        name = launchers.get("titan/start").decode()
        if rank == 0 or _listens(host, int(name.split("-")[0])):
            break
        if time.monotonic() > deadline:
            raise DistStoreError("rank 0 has not come")
        time.sleep(0.1)
    store = PrefixStore(f"titan/{name}", launchers)
    if store.add("come", 1) == world_size:
        store.set("all have come", "")
    try:
        store.wait(["all have come"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
    except DistStoreError:
        raise DistStoreError(f"{store.add('come', 0)} of {world_size} ranks have come") from None
    del living  # everyone knows the name
    return store


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def set_timeout(seconds: int) -> None:
    """Give the process groups of training a new time limit for collectives; that of checkpoints keeps its own."""
    from torch.distributed import distributed_c10d as c10d

    # torch 2.13 has no public call for this.
    for group in c10d._world.pg_map:
        if group.group_desc != "checkpoint":
            c10d._set_pg_timeout(timedelta(seconds=seconds), group)
