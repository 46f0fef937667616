"""The process group: how a job's processes find each other, and how long they wait."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from titan.config.errors import UserError

if TYPE_CHECKING:
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
    try:
        dist.init_process_group(device.backend, timeout=timeout)
    except (dist.DistStoreError, dist.DistNetworkError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"rank {os.environ['RANK']} of WORLD_SIZE = {os.environ['WORLD_SIZE']} found no process group at {address} "
            f"within comm.init_timeout_seconds = {timeout_seconds}. Are so many processes running, and is the port "
            f"free? {_LAUNCH}\n  ({str(error).splitlines()[0]})"
        ) from error
    return True


def set_timeout(seconds: int) -> None:
    """Give the process groups of training a new time limit for collectives; that of checkpoints keeps its own."""
    from torch.distributed import distributed_c10d as c10d

    # torch 2.13 has no public call for this.
    for group in c10d._world.pg_map:
        if group.group_desc != "checkpoint":
            c10d._set_pg_timeout(timedelta(seconds=seconds), group)
