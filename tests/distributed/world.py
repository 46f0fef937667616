"""Gloo worlds for tests: processes that start once per size and run many cases.

Starting eight processes costs seconds, and process groups have to connect. So the processes stay for the whole session,
with one default group, and equal layouts share their meshes. What else a case leaves behind is taken away.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from typing import Any

_TIMEOUT = 120  # seconds, of a case and of a collective
_IMPORTS = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.pipelining", "tests.distributed.runs"]


class WorldError(AssertionError):
    """A case failed on some rank; the text holds the rank and its traceback."""


def _serve(rank: int, size: int, connection: Connection, store: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), OMP_NUM_THREADS="1"
    )
    import torch
    import torch.distributed as dist
    from torch.distributed import device_mesh

    torch.set_num_threads(1)
    device_mesh.init_device_mesh = cache(device_mesh.init_device_mesh)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=_TIMEOUT)
    )
    gc.freeze()  # what is imported never becomes garbage, and looking through it takes longer than all else
    connection.send(("ok", None))
    while True:
        function, args, kwargs = connection.recv()
        for work in (partial(function, *args, **kwargs), _tidy):
            try:
                connection.send(("ok", work()))
            except BaseException:  # also of a result that can't be pickled
                connection.send(("error", traceback.format_exc()))


def _tidy() -> None:
    """Leave no group of a case but those of meshes, and none with a time limit of its own.

    Groups cost while they idle: gloo's thread in each of them wakes up a hundred times a second.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from titan.parallelisms.process_group import set_timeout

    set_timeout(_TIMEOUT)
    dist.barrier()  # a group that one rank destroys may still be in use on another
    for group in list(_world.pg_map):
        if group is not dist.group.WORLD and not group.group_desc.startswith("mesh_"):
            dist.destroy_process_group(group)
    # What DTensor found for a mesh it takes for every equal one. Ranks of other pipeline stages found other things, and
    # would send over another mesh's groups.
    clear_redistribute_planner_cache()
    _clear_sharding_prop_cache()
    torch._dynamo.reset()  # or a case with other shapes makes this one's dynamic
    gc.collect()


class World:
    """`size` processes, one thread each."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Forked from a server that has imported all that cases need once, rather than each importing it anew.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTS)
        self._folder = tempfile.TemporaryDirectory()
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, theirs, os.path.join(self._folder.name, "store"))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # the process has its own: with this one open, its death would go unnoticed
            self._connections.append(ours)
            self._processes.append(process)
        for rank, connection in enumerate(self._connections):
            try:  # waited for here, so that the imports don't count against a case's time limit
                connection.recv()
            except EOFError:
                self._processes[rank].join()
                status = self._processes[rank].exitcode
                self.close()
                raise WorldError(
                    f"process of rank {rank} died at start with exit status {status}; stderr has its error"
                ) from None

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = _TIMEOUT, **kwargs: Any) -> list[Any]:
        """Call a module-level function on every rank, within a process group.

        Returns:
            The results by rank.

        Raises:
            WorldError: a rank raised, died, or did not answer in time. The world is then closed.
        """
        for connection in self._connections:
            connection.send((function, args, kwargs))
        results = self._answers(timeout)
        self._answers(_TIMEOUT)  # all have tidied up
        return results

    def _answers(self, timeout: float) -> list[Any]:
        """One from each rank, by rank."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while waiting := {self._connections[rank]: rank for rank in range(self.size) if rank not in answers}:
            ready = wait(list(waiting), timeout=max(0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise WorldError(f"no answer within {timeout} s from ranks {set(waiting.values())}")
            for connection in ready:
                rank = waiting[connection]
                try:
                    status, answers[rank] = connection.recv()
                except EOFError:
                    status, answers[rank] = "error", "the process died"
                if status == "error":
                    self.close()
                    raise WorldError(f"rank {rank} of {self.size}: {answers[rank]}")
        return [answers[rank] for rank in range(self.size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


class Worlds:
    """One world per size, made when first asked for and made anew after a failure."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        world = self._worlds.get(size)
        if world is None or not world.alive:
            world = self._worlds[size] = World(size)
        return world

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
