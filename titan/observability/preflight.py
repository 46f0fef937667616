"""The preflight: a few seconds at a job's start in which the ranks compare themselves, before hours are built on them.

Each rank measures itself, the reports go to all ranks in one message, and all come to the same findings: three lines
that say what was found, a warning for each thing that is only suspicious, an error for what would ruin the run.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from titan.checkpoint.storage import is_url
from titan.config.errors import UserError
from titan.config.job_config import JobConfig
from titan.observability.device import Device, driver_versions, matmul_seconds, variables_of_libraries
from titan.observability.logging import logger
from titan.observability.preflight_findings import Report, find
from titan.training.step import count_parameters

_MANY = 8  # ranks; a job of more has hosts, or people, enough to differ
_MARK = ".preflight"
_SENT_BYTES = 1 << 20
_WRITTEN_BYTES = 8 << 20
_BYTES_PER_PARAMETER = 12  # of a checkpoint: a weight and two moments in float32


def preflight(config: JobConfig, device: Device) -> None:
    """Compare the ranks, when `comm.preflight` asks for it. Collective over the job's ranks.

    Raises:
        UserError: versions of titan or torch differ, or a rank can't write to the dump folder; on all ranks.
    """
    wanted = config.comm.preflight
    if wanted == "off" or (wanted == "auto" and dist.get_world_size() <= _MANY):
        return
    start = time.perf_counter()
    folder = None if config.checkpoint.load_only else Path(config.job.dump_folder)
    reports: list[Report] = [None] * dist.get_world_size()  # type: ignore[list-item]
    dist.all_gather_object(reports, _examine(config, device, folder))
    saves_there = config.checkpoint.enable and not is_url(config.checkpoint.folder)
    checkpoint_bytes = _BYTES_PER_PARAMETER * count_parameters(config) if saves_there else 0
    findings = find(reports, folder, config.comm, checkpoint_bytes)
    if findings.errors:
        raise UserError("\n  ".join(["preflight:", *findings.errors]) if findings.errors[1:] else findings.errors[0])
    if dist.get_rank() == 0:
        for line in findings.lines:
            logger.info(f"preflight: {line}")
        for warning in findings.warnings:
            logger.warning(f"preflight: {warning}")
        logger.info(f"preflight: took {time.perf_counter() - start:.1f} s")


# --- what a rank measures


def _examine(config: JobConfig, device: Device, folder: Path | None) -> Report:
    dtype = getattr(torch, config.training.mixed_precision_param)
    multiplied = matmul_seconds(device, dtype, 256 if device.type == "cpu" else 8192)
    seconds = _send_seconds(device)
    error, speed, free = ("", None, 0) if folder is None else _try_folder(folder)
    _meet()
    clock = time.time()
    seen = folder is None or os.path.exists(folder / _MARK)
    _meet()
    if folder is not None and dist.get_rank() == 0:
        with suppress(OSError):  # it has been reported already
            (folder / _MARK).unlink()
    return Report(
        host=socket.gethostname(),
        device=device.name,
        versions=_versions(device),
        variables=variables_of_libraries(),
        matmul_seconds=multiplied,
        send_seconds=seconds,
        clock=clock,
        folder_error=error,
        shares_folder=seen,
        write_speed=speed,
        free_bytes=free,
    )


def _try_folder(folder: Path) -> tuple[str, float | None, int]:
    """Write to the dump folder, and let rank 0 leave a mark there: the error if there is one, the speed, free bytes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            (folder / _MARK).touch()
        return "", _write(folder / f"{_MARK}-{dist.get_rank()}"), shutil.disk_usage(folder).free
    except OSError as error:
        return str(error), None, 0


def _meet() -> None:
    """Wait until all ranks are here, over the CPU's network."""
    dist.all_reduce(torch.zeros(1))


def _send_seconds(device: Device, repeats: int = 3) -> float:
    """The least time of an exchange with both neighbours in the ring of all ranks; 0 for a rank alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return 0.0
    sent = torch.zeros(_SENT_BYTES, dtype=torch.uint8, device=device.torch_device)
    received = torch.empty_like(sent)
    times = []
    for _ in range(1 + repeats):  # connections are made in the first
        _meet()
        start = time.perf_counter()
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, (rank + 1) % size),
                dist.P2POp(dist.irecv, received, (rank - 1) % size),
            ]
        )
        for work in works:
            work.wait()
        device.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _write(path: Path) -> float | None:
    """Write a file to the disk itself and take it away; bytes per second, where enough was written to tell.

    Raises:
        OSError: it can't be done.
    """
    measures = os.environ.get("LOCAL_RANK", "0") == "0"  # all at once would measure each other
    start = time.perf_counter()
    try:
        with path.open("wb") as file:
            file.write(b"\0" * (_WRITTEN_BYTES if measures else 1))
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start
    finally:
        path.unlink(missing_ok=True)
    return _WRITTEN_BYTES / seconds if measures else None


def _versions(device: Device) -> dict[str, str]:
    versions = {"titan": _digest_of_titan(), "torch": torch.__version__, "python": platform.python_version()}
    return versions | driver_versions(device)


@cache
def _digest_of_titan() -> str:
    """Of titan's own code: checkouts differ more often than the numbers of versions do."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in [package.with_name("train.py"), *sorted(package.rglob("*.py"))]:
        if path.exists():
            digest.update(str(path.relative_to(package.parent)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:10]
