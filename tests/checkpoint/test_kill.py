"""kill -9 at random instants, then a restart, until the run is through: bit for bit the run that was never killed.

An instant is an operation of a kind: a step of the optimizer, a tensor that is staged, a piece that is written, a
rename or a new file of the commit protocol, a deletion. Each kind has its turn; chance decides on the operation.
"""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import pickle
import random
import signal
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.checkpoint.toy import Contents, Run
from tests.distributed.world import _IMPORTS
from titan.checkpoint.folders import scan

STEPS = 6
KINDS = {"step", "staging", "writing", "commit", "deletion"}

_context = mp.get_context("forkserver")


class Instant(NamedTuple):
    """Where a rank dies: before the operation of that number and kind."""

    rank: int
    kind: str
    number: int


class Outcome(NamedTuple):
    """Losses as hexadecimal by step, and the tensors of the run's end."""

    losses: dict[int, str]
    contents: Contents


def _places(kind: str) -> list[tuple[Any, str]]:
    import torch

    from titan.checkpoint.dcp_storage import _RecordedStream
    from titan.checkpoint.staging import Staging

    return {
        "step": [(torch.optim.AdamW, "step")],
        "staging": [(Staging, "_copy")],
        "writing": [(_RecordedStream, "write")],
        "commit": [(Path, "rename"), (Path, "touch"), (Path, "mkdir")],
        "deletion": [(Path, "unlink"), (Path, "rmdir")],
    }[kind]


def _die_at(instant: Instant) -> None:
    counter = itertools.count()

    def wrap(original: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if next(counter) == instant.number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return counted

    for owner, name in _places(instant.kind):
        setattr(owner, name, wrap(getattr(owner, name)))


def _train(rank: int, size: int, store: str, folder: str, mode: str, instant: Instant | None) -> None:
    """What train.py does, in a process of its own. Rank 0 leaves losses, and at the end all tensors, in `folder`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    run = Run(folder, "plain" if size == 1 else "fsdp", async_mode=mode, interval=2, keep_latest_k=2, verify="size")
    if instant is not None and instant.rank == rank:
        _die_at(instant)
    try:
        state = run.manager.load()
        for step in range(state["step"] + 1 if state else 1, STEPS + 1):
            (loss,) = run.train(step - 1, step)
            if rank == 0:
                with open(f"{folder}/losses", "a") as file:
                    file.write(f"{step} {loss.hex()}\n")
            if run.manager.due(step, last=False):
                run.manager.save(step, {"step": step})
        if run.manager.due(STEPS, last=True):
            run.manager.save(STEPS, {"step": STEPS})
        run.manager.wait()
    finally:
        run.manager.close()
    contents = run.contents()
    if rank == 0:
        Path(folder, "contents").write_bytes(pickle.dumps(contents))


def _attempt(folder: Path, size: int, mode: str, instant: Instant | None, *, kill_all: bool = True) -> list[int | None]:
    """Run until the end or the kill, which all ranks share or which the others have to notice. Their exit statuses."""
    _context.set_forkserver_preload(_IMPORTS)
    store = folder / f"store-{len(list(folder.glob('store-*')))}"
    processes: list[BaseProcess] = [
        _context.Process(target=_train, args=(rank, size, str(store), str(folder), mode, instant), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    if instant is not None and kill_all:
        processes[instant.rank].join(60)
        if processes[instant.rank].exitcode == -signal.SIGKILL:
            for process in processes:
                process.kill()
    for process in processes:
        process.join(60)
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert None not in statuses, "a rank neither ended nor noticed that another one was killed"
    return statuses


def _outcome(folder: Path) -> Outcome:
    lines = [line.split() for line in (folder / "losses").read_text().splitlines()]
    return Outcome({int(step): loss for step, loss in lines}, pickle.loads((folder / "contents").read_bytes()))


def _straight(folder: Path, size: int) -> Outcome:
    folder.mkdir()
    assert _attempt(folder, size, "disabled", None) == [0] * size
    return _outcome(folder)


def _instants(chance: random.Random, size: int, mode: str) -> Iterator[Instant]:
    # What a run that nothing kills does, in about as many operations.
    most = {"step": STEPS, "staging": 60, "writing": 2400, "commit": 20, "deletion": 8}
    for kind in itertools.cycle(kind for kind in most if kind != "staging" or mode == "async"):
        # Ranks other than the first one only train, stage and write.
        rank = chance.randrange(size) if kind in ("step", "staging", "writing") else 0
        yield Instant(rank, kind, chance.randrange(most[kind]))


def _kill_and_restart(folder: Path, size: int, kills: int, modes: list[str]) -> None:
    """At least so many kills, until each kind came up; other ones each time. A failure names the instants before it."""
    chance = random.Random()
    straight = _straight(folder / "straight", size)
    done, kinds = 0, set[str]()
    instants = {mode: _instants(chance, size, mode) for mode in modes}
    for number in itertools.count():
        mode = modes[number % len(modes)]
        run = folder / f"run-{number}"
        run.mkdir()
        history: list[Instant] = []
        while done < kills or kinds != KINDS:
            instant = next(instants[mode])
            kill_all = chance.random() < 0.5
            statuses = _attempt(run, size, mode, instant, kill_all=kill_all)
            if statuses[instant.rank] == 0:  # it came to the end before
                break
            assert statuses[instant.rank] == -signal.SIGKILL, (history, instant)
            assert all(statuses), (history, instant)
            history.append(instant)
            kinds.add(instant.kind)
            done += 1
        assert _attempt(run, size, mode, None) == [0] * size, history
        assert _outcome(run) == straight, history
        found = scan(run / "checkpoint")  # one more where the kill came before the last removal began
        assert list(found.complete)[-2:] == [STEPS - 2, STEPS] and not found.skipped, history
        assert not list(run.glob("checkpoint/*/.unfinished")), history
        if done >= kills and kinds == KINDS:
            break


def test_twenty_instants_on_one_process(tmp_path: Path) -> None:
    _kill_and_restart(tmp_path, 1, 20, ["async", "disabled"])


@pytest.mark.slow
def test_five_instants_of_one_rank_or_both(tmp_path: Path) -> None:
    """Where a rank dies alone, the other one has to notice and to end by itself."""
    _kill_and_restart(tmp_path, 2, 5, ["async"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("size", "kills"), [(1, 150), (2, 50)])
def test_two_hundred_instants(tmp_path: Path, size: int, kills: int) -> None:
    _kill_and_restart(tmp_path, size, kills, ["async", "disabled"])
