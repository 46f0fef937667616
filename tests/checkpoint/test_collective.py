"""A failure on one rank is every rank's failure, at once."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from tests.checkpoint.toy import Run
from tests.distributed.world import Worlds
from titan.checkpoint.collective import Ranks
from titan.config.errors import UserError


class _Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("no way")
        self.lambda_ = lambda: None


def _outcome(call: Any) -> str:
    try:
        return f"got {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _outcomes() -> list[str]:
    ranks = Ranks(timedelta(seconds=60))

    def fail(error: Exception, *on: int) -> int:
        if dist.get_rank() in on:
            raise error
        return dist.get_rank()

    return [
        _outcome(lambda: ranks.on_first("look", lambda: 7)),
        _outcome(lambda: ranks.on_first("look", lambda: fail(OSError("disk"), 0))),
        _outcome(lambda: ranks.on_first("look", lambda: fail(UserError("wrong"), 0))),
        _outcome(lambda: ranks.on_first("look", lambda: fail(_Unpicklable(), 0))),
        _outcome(lambda: ranks.on_each("count", lambda: fail(OSError(), 9), sum)),
        _outcome(lambda: ranks.on_each("count", lambda: fail(OSError("disk"), 1, 3), sum)),
        _outcome(lambda: ranks.on_each("count", lambda: fail(UserError("wrong"), 1, 2), sum)),
        _outcome(lambda: ranks.on_each("count", lambda: 0, lambda _: fail(ValueError("sum"), 0))),
        _outcome(lambda: ranks.agree(dist.get_rank() == 0)),
    ]


def test_results_and_failures_are_every_rank_s(worlds: Worlds) -> None:
    expected = [
        "got 7",
        "RuntimeError: could not look: rank 0: OSError: disk",
        "UserError: wrong",
        "RuntimeError: could not look: rank 0: _Unpicklable: no way",
        "got 6",
        "RuntimeError: could not count: rank 1: OSError: disk; rank 3: OSError: disk",
        "UserError: wrong",
        "RuntimeError: could not count: rank 0: ValueError: sum",
        "got True",
    ]
    assert worlds(4).run(_outcomes) == [expected] * 4


def _failing_save(folder: str, target: str, on_rank: int) -> tuple[str, str]:
    run = Run(folder, "fsdp")
    run.manager.load()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    if dist.get_rank() == on_rank:
        with patch(target, fail):
            failure = _outcome(lambda: run.save(10))
    else:
        failure = _outcome(lambda: run.save(10))
    return failure, _outcome(lambda: run.save(10))


def _save_elsewhere(folder: str) -> str:
    return _outcome(lambda: Run(f"{folder}/{dist.get_rank()}", "fsdp").save(1))


def test_a_folder_that_ranks_do_not_share_is_named(worlds: Worlds, tmp_path: Path) -> None:
    first, second = worlds(2).run(_save_elsewhere, str(tmp_path))
    assert first == second
    assert first.startswith("UserError: rank 0 doesn't see") and "__1_0.distcp: " in first and "missing" in first


def test_ck_collide_a_save_that_fails_on_one_rank_fails_on_all_and_can_be_repeated(
    worlds: Worlds, tmp_path: Path
) -> None:
    places = [
        ("titan.checkpoint.saving.start_saving", 0),
        ("titan.checkpoint.dcp_storage.Writer.finish", 0),
        ("titan.checkpoint.folders.write_manifest", 0),
        ("titan.checkpoint.saving.publish", 0),
        ("titan.checkpoint.manager.training_tensors", 3),
        ("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", 1),
    ]
    for number, (target, rank) in enumerate(places):
        root = tmp_path / str(number) / "checkpoint"
        (root / "step-10").mkdir(parents=True)
        (root / "step-10" / "junk").touch()
        outcomes = worlds(4).run(_failing_save, str(root.parent), target, rank)
        assert len(set(outcomes)) == 1
        failure, repeated = outcomes[0]
        assert f"rank {rank}: OSError: [Errno 28] No space left on device" in failure, target
        assert repeated == "got None"
        assert sorted(path.name for path in root.iterdir()) == ["step-10", "step-10.aside"]
