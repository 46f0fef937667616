"""`python ARGUMENTS` in a fork of a process that has imported torch: most of a short run's time would go into that."""

from __future__ import annotations

import multiprocessing as mp
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_forked(
    arguments: list[str], folder: Path, variables: dict[str, str], timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """What `python ARGUMENTS` does in a folder; FILE … or -c TEXT.

    Args:
        variables: its whole environment.

    Raises:
        subprocess.TimeoutExpired: it didn't end in time, and was killed.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.tensorboard"])
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name) / stream for stream in ("stdout", "stderr")]
        process = context.Process(target=_run, args=(arguments, folder, variables, files))
        process.start()
        process.join(timeout)
        late = process.is_alive()
        process.kill()
        process.join()
        output, errors = (file.read_text() if file.exists() else "" for file in files)
    if late:
        raise subprocess.TimeoutExpired(arguments, timeout, output, errors)
    return subprocess.CompletedProcess(arguments, process.exitcode or 0, output, errors)


def _run(arguments: list[str], folder: Path, variables: dict[str, str], files: list[Path]) -> None:
    for stream, file in zip((sys.stdout, sys.stderr), files, strict=True):
        stream.flush()
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    import torch

    torch.set_num_threads(1)
    sys.path[:0] = [str(ROOT), str(folder)]
    if arguments[0] == "-c":
        sys.argv = ["-c"]
        exec(compile(arguments[1], "block", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
