"""torch's flight recorder: the collectives that a process has called last, and which of them isn't done."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Both backends keep a recorder of their own; that of accelerators is there when torch was built with it.
_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")


def record_collectives(entries: int, folder: Path | None) -> None:
    """Set up the recorders, which read the environment when the first process group starts. What the user set stays.

    Args:
        entries: collectives to keep per process; 0 records nothing.
        folder: where a backend that ends the process by itself leaves its record.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(entries))
    if entries and folder is not None:
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "rank_"))


def open_collective() -> str | None:
    """The oldest collective of this process that isn't done, as text; None when there is none, or none is recorded."""
    for dump in _dumps():
        for entry in pickle.loads(dump(includeStackTraces=False)).get("entries", []):
            if not entry["retired"] and entry["state"] != "completed":  # gloo leaves the state as it was at the start
                return _described(entry)
    return None


def write_record(path: Path) -> None:
    """Write what is recorded, if anything is, with Python's stacks, as `torchfrtrace` reads it."""
    records = [record for dump in _dumps() if (record := pickle.loads(dump())).get("entries")]
    if not records:
        return
    record = records[-1]  # of the accelerator's collectives when there are both
    if "" in record["pg_config"]:  # gloo leaves its groups out
        record["pg_config"] = _groups()
    path.write_bytes(pickle.dumps(record))


def _groups() -> dict[str, dict[str, str]]:
    from torch.distributed import distributed_c10d as c10d

    return {
        name: {"name": name, "desc": group.group_desc, "ranks": str(c10d.get_process_group_ranks(group))}
        for group, name in c10d._world.pg_names.items()
    }


def _dumps() -> list[Callable[..., bytes]]:
    from torch._C import _distributed_c10d

    return [getattr(_distributed_c10d, name) for name in _DUMPS if hasattr(_distributed_c10d, name)]


def _described(entry: dict[str, Any]) -> str:
    name, group = entry["profiling_name"].partition(":")[2] or entry["profiling_name"], entry["process_group"][1]
    return f"{name} of {entry['input_sizes']} in group {group}"
