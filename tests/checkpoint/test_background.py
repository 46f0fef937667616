"""Saving beside training: what is saved is the state at its step, and no failure is lost or waited for in vain."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.toy import Contents, Run, load
from tests.distributed.world import Worlds
from titan.checkpoint import manager, saving
from titan.checkpoint.staging import Staging


def _ruin(run: Run) -> None:
    """What goes on with training: every tensor changes."""
    with torch.no_grad():
        for tensor in [*run.model.parameters(), run.model.scale]:
            tensor.fill_(float("nan"))
    for state in run.optimizer.state.values():
        for value in state.values():
            value.fill_(float("nan"))


def test_ck_async_race(tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing doesn't begin before everything was overwritten, the train state too."""
    gate, write = threading.Event(), saving.write_tensors

    def late(*args: Any, **kwargs: Any) -> Any:
        assert gate.wait(60)
        return write(*args, **kwargs)

    monkeypatch.setattr(saving, "write_tensors", late)
    run = Run(tmp_path, async_mode="async")
    run.train(0, 3)
    expected, train_state = run.contents(), {"step": 3, "rows": [1, 2]}
    run.manager.save(3, train_state)
    train_state["rows"] = []
    _ruin(run)
    gate.set()
    # A load waits for the save in flight.
    assert run.manager.load() == {"step": 3, "rows": [1, 2]}
    assert run.contents() == expected
    # So does the next save, whose buffers are the same.
    run.train(3, 4)
    run.manager.save(4, {"step": 4})
    expected = run.contents()
    run.train(4, 5)
    run.manager.save(5, {"step": 5})
    run.manager.wait()
    assert load(tmp_path, "plain", load_step=4) == ({"step": 4}, expected)


_IN_PROCESS = """
import os, signal, sys
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor
from titan.checkpoint import manager
from tests.checkpoint import test_background as tests
from tests.checkpoint.toy import Run, load

if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = Run(sys.argv[1], sys.argv[2], async_mode="async_with_pinned_mem")
    for step in (1, 2):
        run.train(step - 1, step)
        expected = run.contents()
        run.manager.save(step, {"step": step})
        tests._ruin(run)
        assert run.manager.load() == {"step": step}
        assert run.contents() == expected == load(sys.argv[1], "plain")[1]
    # A writer that hangs doesn't keep a run that failed from ending.
    process = _async_process_executor._CHECKPOINT_PROCESS._save_process
    os.kill(process.pid, signal.SIGSTOP)
    manager._LAST_WAIT = 0.1
    run.manager.save(3, {"step": 3})
    run.manager.close()
    print("as saved", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "size"), [("plain", 1), ("fsdp", 2)])
def test_ck_async_race_in_another_process(tmp_path: Path, layout: str, size: int) -> None:
    """What async_with_pinned_mem does, but for the pinning, which needs an accelerator."""
    script = tmp_path / "run.py"
    script.write_text(_IN_PROCESS)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}"] if size > 1 else []
    result = subprocess.run(
        [sys.executable, *launcher, str(script), str(tmp_path / "run"), layout],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.stdout == "as saved\n" * size and result.returncode == 0, result.stderr


def _twenty_steps(folder: str) -> tuple[Contents, list[float]]:
    run = Run(folder, "fsdp", async_mode="async", interval=1, keep_latest_k=3)
    sums = []
    for step in range(1, 21):
        run.train(step - 1, step)
        if run.manager.due(step, last=False):
            run.manager.save(step, {"step": step})
        total = torch.tensor(float(step))
        dist.all_reduce(total)  # a collective right after the save, while it is written
        sums.append(float(total))
    if run.manager.due(20, last=True):
        raise AssertionError("the last step is in flight already")
    run.manager.wait()
    return run.contents(), sums


def test_ck_async_pg(worlds: Worlds, tmp_path: Path, alone: None) -> None:
    results = worlds(4).run(_twenty_steps, str(tmp_path))
    assert all(result == results[0] for result in results)
    contents, sums = results[0]
    assert sums == [4.0 * step for step in range(1, 21)]
    assert load(tmp_path, "plain") == ({"step": 20}, contents)
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-18", "step-19", "step-20"]


def test_ck_last_async(tmp_path: Path, alone: None) -> None:
    """Steps 7, interval 5: exactly one checkpoint of the last step; a resume of the finished run saves nothing."""
    run = Run(tmp_path, async_mode="async", interval=5)
    saved = []
    for step in range(1, 8):
        run.train(step - 1, step)
        if run.manager.due(step, last=False):
            run.manager.save(step, {"step": step})
            saved.append(step)
    if run.manager.due(7, last=True):
        run.manager.save(7, {"step": 7})
        saved.append(7)
    assert not run.manager.due(7, last=True)
    assert saved == [5, 7] and load(tmp_path, "plain") == ({"step": 7}, run.contents())
    again = Run(tmp_path, async_mode="async", interval=5)
    assert again.manager.load() == {"step": 7} and not again.manager.due(7, last=True)


def test_one_line_says_how_long_training_stood_still(
    tmp_path: Path, alone: None, log: pytest.LogCaptureFixture
) -> None:
    Run(tmp_path, async_mode="async").save(3)
    pattern = r"Saved step 3 in \d+\.\d s, for \d+\.\d\d s of which training stood still \(\d+\.\d\d MiB\)"
    assert any(re.fullmatch(pattern, line) for line in log.messages)


def test_buffers_are_kept_and_take_what_changes() -> None:
    staging = Staging(for_another_process=False)
    tensors = {"a": torch.arange(6.0).reshape(2, 3).T, "step": torch.tensor(1.0), "b": torch.ones(2).bfloat16()}
    first = staging.copy(tensors)
    assert all(torch.equal(first[name], tensors[name]) and first[name].is_contiguous() for name in tensors)
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    tensors["step"] += 1
    second = staging.copy(tensors)
    assert second["step"] == 2 and {name: tensor.data_ptr() for name, tensor in second.items()} == places
    assert staging.copy({"a": torch.ones(4)})["a"].tolist() == [1.0] * 4


def _failing(folder: str, mode: str, on_failure: str, fails_on: int) -> tuple[list[str], Any]:
    """Three saves, of which the second one fails on one rank; what each of the next questions answers."""
    run = Run(folder, "fsdp", async_mode=mode, interval=1, on_failure=on_failure)
    answers: list[str] = []

    def fail(*args: Any, **kwargs: Any) -> None:
        if dist.get_rank() == fails_on:
            raise OSError(28, "No space left on device")

    def ask(work: Any) -> None:
        try:
            answers.append(str(work()))
        except RuntimeError as error:
            answers.append(str(error))

    for step in (1, 2, 3):
        run.train(step - 1, step)
        with pytest.MonkeyPatch.context() as patch:
            if step == 2:
                patch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", fail)
            ask(lambda step=step: run.manager.save(step, {"step": step}))
            if run.manager._in_flight is not None:
                run.manager._in_flight.writing.join()
            ask(lambda step=step: run.manager.due(step + 1, last=False))
    ask(run.manager.wait)
    return answers, run.contents()


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_a_failed_save_is_every_rank_s_and_the_next_one_is_tried(
    worlds: Worlds, tmp_path: Path, alone: None, mode: str, on_failure: str
) -> None:
    first, second = worlds(2).run(_failing, str(tmp_path), mode, on_failure, 1)
    assert first == second
    answers, contents = first
    # save and due of steps 1, 2 and 3, then wait
    expected = ["None", "True"] * 3 + ["None"]
    failed = {"disabled": 2, "async": 3}[mode]
    if on_failure == "stop":
        assert "rank 1: OSError: [Errno 28] No space left on device" in answers[failed]
        expected[failed] = answers[failed]
    assert answers == expected
    assert load(tmp_path, "plain") == ({"step": 3}, contents)
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-1", "step-3"]


def test_a_run_that_fails_does_not_wait_for_a_save_that_hangs(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(saving, "write_tensors", lambda *args, **kwargs: gate.wait(60) and {})
    monkeypatch.setattr(manager, "_LAST_WAIT", 0.1)
    run = Run(tmp_path, async_mode="async")
    run.manager.save(1, {"step": 1})
    start = time.monotonic()
    run.manager.close()
    assert time.monotonic() - start < 10 and not run.manager._in_flight.writing.done
    gate.set()
    run.manager.wait()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_older_checkpoints_are_removed_in_the_background(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    gate, keep_latest = threading.Event(), manager.keep_latest

    def slow(*args: Any) -> None:
        assert gate.wait(60)
        keep_latest(*args)

    run = Run(tmp_path, async_mode=mode, keep_latest_k=1)
    run.save(1)
    monkeypatch.setattr(manager, "keep_latest", slow)
    run.manager.save(2, {"step": 2})
    assert not run.manager.due(2, last=True)  # nor does training wait for it once the save is through
    names = [path.name for path in (tmp_path / "checkpoint").iterdir()]
    gate.set()
    run.manager.wait()
    assert sorted(names) == ["step-1", "step-2"]
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-2"]
