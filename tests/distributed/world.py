"""Gloo worlds for tests: processes that start once per size and run many cases.

Starting eight processes costs seconds, mostly imports; a new process group in running ones costs almost nothing. So the
processes stay for the whole session, and each case gets a fresh default group that is destroyed after it: no case can
see another's meshes.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any


class WorldError(AssertionError):
    """A case failed on some rank; the text holds the rank and its traceback."""


def _serve(rank: int, size: int, connection: Connection) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), OMP_NUM_THREADS="1"
    )
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.set_num_threads(1)
    connection.send("ready")
    while (task := connection.recv()) is not None:
        function, args, kwargs, store = task
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=120)
            )
            outcome = ("ok", function(*args, **kwargs))
        except BaseException:
            outcome = ("error", traceback.format_exc())
        try:
            connection.send(outcome)
        except Exception:  # the result can't be pickled
            connection.send(("error", traceback.format_exc()))
        if outcome[0] == "ok":
            dist.destroy_process_group()
            # torch remembers meshes, and so process groups, of equal layouts: those of this case are gone.
            clear_redistribute_planner_cache()
            _clear_sharding_prop_cache()


class World:
    """`size` processes, one thread each."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Forked from a server that has imported torch once, rather than each importing it anew.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor"])
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, theirs), daemon=True)
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

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> list[Any]:
        """Call a module-level function on every rank, within a process group.

        Returns:
            The results by rank.

        Raises:
            WorldError: a rank raised, died, or did not answer in time. The world is then closed.
        """
        self._count += 1
        task = (function, args, kwargs, os.path.join(self._folder.name, f"store-{self._count}"))
        for connection in self._connections:
            connection.send(task)
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < self.size:
            for rank, connection in enumerate(self._connections):
                if rank in results or not connection.poll(0.002):
                    continue
                try:
                    status, value = connection.recv()
                except EOFError:
                    status, value = "error", "the process died"
                if status == "error":
                    self.close()
                    raise WorldError(f"rank {rank} of {self.size}: {value}")
                results[rank] = value
            if time.monotonic() > deadline:
                self.close()
                raise WorldError(f"no answer within {timeout} s from ranks {set(range(self.size)) - set(results)}")
        return [results[rank] for rank in range(self.size)]

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
