"""Worker processes change the speed, never the rows; what goes wrong in one is told."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.data.test_loader import BYTES, Listed, texts_for, whole_steps
from tests.distributed.world import Worlds
from titan.config.errors import UserError
from titan.config.job_config import Training
from titan.data.background import Worker
from titan.data.loader import DataLoader
from titan.observability.logging import logger


@pytest.fixture(autouse=True)
def may_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_children(monkeypatch)


def allow_children(patch: pytest.MonkeyPatch) -> None:
    """A test world's processes are daemons, to which multiprocessing gives no children otherwise."""
    patch.setitem(mp.current_process()._config, "daemon", False)  # type: ignore[attr-defined]


def take(
    texts: list[str | None], local: int, plan: list[tuple[int, int]], state: Any = None, **settings: Any
) -> tuple[list[Any], Any]:
    """Steps of a global batch of 8, resumed before each (workers, number of steps); then the position."""
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        allow_children(patch)
        for workers, count in plan:
            training = Training(**({"seq_len": 16, "local_batch_size": local} | settings))
            training.dataloader.num_workers = workers
            loader = DataLoader(
                Listed(texts),
                BYTES,
                training,
                seed=3,
                global_batch=8,
                batch_rank=dist.get_rank(),
                batch_degree=dist.get_world_size(),
                group=dist.group.WORLD,
            )
            if state is not None:
                loader.load_state_dict(state)
            steps += whole_steps(loader, count)
            state = loader.state_dict()
            loader.close()
        assert mp.active_children() == []
    return steps, state


@pytest.mark.parametrize("documents", [3, 30, 200])  # one stream, a few, one for each row
def test_data_workers(worlds: Worlds, documents: int) -> None:
    """0, 1, 2, 3 workers on 1, 2 ranks; resumes with other numbers of both, from among steps that were made ahead."""
    texts = texts_for(documents)
    straight, end = worlds(1).run(take, texts, 8, [(0, 9)])[0]
    for ranks, local, plan in (
        (1, 8, [(1, 9)]),
        (1, 2, [(2, 9)]),
        (2, 4, [(3, 9)]),
        (2, 2, [(3, 2), (0, 3), (2, 4)]),
    ):
        assert worlds(ranks).run(take, texts, local, plan)[0] == (straight, end)
    first, state = worlds(2).run(take, texts, 4, [(2, 4)])[0]
    second, state = worlds(1).run(take, texts, 8, [(3, 5)], state)[0]
    assert (first + second, state) == (straight, end)


def test_finite_data_ends_with_workers_too(worlds: Worlds) -> None:
    texts = texts_for(20)
    straight = worlds(1).run(take, texts, 8, [(0, 10**4)], infinite=False)[0]
    assert len(straight[0]) > 3
    assert worlds(2).run(take, texts, 4, [(2, 10**4)], infinite=False)[0] == straight


def error_of(workers: int) -> str:
    try:
        take(["a" * 100, None] * 40, 2, [(workers, 50)], bad_rows="stop")
    except UserError as error:
        return str(error)
    return ""


def test_an_error_of_a_worker_is_the_one_that_one_process_has(worlds: Worlds) -> None:
    (alone,) = worlds(1).run(error_of, 0)
    assert alone.startswith("listed:") and "broken on purpose" in alone
    assert worlds(1).run(error_of, 2) == [alone]


def killed_while_training() -> str:
    with pytest.MonkeyPatch.context() as patch:
        allow_children(patch)
        training = Training(seq_len=16, local_batch_size=8)
        training.dataloader.num_workers = 2
        loader = DataLoader(
            Listed(texts_for(200)),
            BYTES,
            training,
            seed=3,
            global_batch=8,
            batch_rank=0,
            batch_degree=1,
            group=dist.group.WORLD,
        )
        loader.next_step()
        worker = mp.active_children()[-1].pid
        assert worker is not None
        os.kill(worker, signal.SIGKILL)
        try:
            for _ in range(10**5):
                loader.next_step()
        except UserError as error:
            return str(error)
        finally:
            loader.close()
        return ""


def test_a_worker_that_is_killed_ends_the_loop(worlds: Worlds) -> None:
    (message,) = worlds(1).run(killed_while_training)
    assert "data worker" in message and "died (exit status -9)" in message


def numbers(fail: BaseException | None = None, die: bool = False) -> Iterator[int]:
    logger.warning("about to count")
    yield from range(5)
    if fail is not None:
        raise fail
    if die:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_gives_items_and_log(caplog: pytest.LogCaptureFixture) -> None:
    worker: Worker[int] = Worker(numbers(), "worker")
    with caplog.at_level("WARNING", logger="titan"):
        assert list(worker) == [0, 1, 2, 3, 4]
    assert caplog.messages == ["about to count"]
    worker.close()
    worker.close()


def test_an_unforeseen_error_comes_with_its_traceback() -> None:
    worker: Worker[int] = Worker(numbers(ZeroDivisionError("by seven")), "worker")
    assert [next(worker) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*in numbers.*ZeroDivisionError: by seven"):
        next(worker)
    worker.close()


def test_a_worker_that_is_killed_is_an_error_and_no_hang() -> None:
    worker: Worker[int] = Worker(numbers(die=True), "data worker 7")
    with pytest.raises(UserError, match=r"data worker 7 died \(exit status -9\).*out of memory"):
        list(worker)
    worker.close()


def endless() -> Iterator[int]:
    while True:
        time.sleep(0.01)
        yield os.getpid()


def parent(connection: Any) -> None:
    workers = [Worker(endless(), f"worker {i}") for i in range(3)]
    connection.send([next(worker) for worker in workers])
    time.sleep(60)


def test_workers_end_with_their_parent_however_it_ends() -> None:
    """Also those that wait for it to read; Ctrl-C and SIGTERM are left to it."""
    ours, theirs = mp.Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=parent, args=(theirs,))
    process.start()
    workers = ours.recv()
    for worker in workers:
        os.kill(worker, signal.SIGINT)
        os.kill(worker, signal.SIGTERM)
    time.sleep(0.2)
    assert all(alive(worker) for worker in workers)
    process.kill()
    process.join()
    deadline = time.monotonic() + 10
    while any(alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(worker) for worker in workers)


def alive(process: int) -> bool:
    """It runs; a zombie that nobody has waited for doesn't."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_closing_ends_workers_that_are_busy() -> None:
    started = time.monotonic()
    before = mp.active_children()
    workers = [Worker(endless(), f"worker {i}") for i in range(2)]
    for worker in workers:
        next(worker)
        worker.close()
    assert time.monotonic() - started < 5
    assert mp.active_children() == before
