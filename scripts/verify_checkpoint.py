"""Read every byte of checkpoints and compare it with what was saved.

    python scripts/verify_checkpoint.py outputs/checkpoint            all of them
    python scripts/verify_checkpoint.py outputs/checkpoint/step-100   one
    python scripts/verify_checkpoint.py s3://bucket/run --size        only whether files are missing or cut

Names each bad file, and the newest intact checkpoint. The exit status is 1 when anything is wrong, or nothing is there.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

from titan.checkpoint.folders import scan, step_folder
from titan.checkpoint.manifest import FileRecord, find_damage
from titan.checkpoint.storage import Place, place
from titan.config.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", metavar="PATH", help="a folder of checkpoints, or a step-N in it; a URL too")
    parser.add_argument("--size", action="store_true", help="compare sizes only")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="files read at a time")
    args = parser.parse_args(arguments)
    try:
        return verify(args.path, "size" if args.size else "checksum", args.threads)
    except (OSError, UserError) as error:
        print(f"{args.path}: {error}", file=sys.stderr)
        return 1


def verify(path: str, by: Literal["size", "checksum"], threads: int) -> int:
    """Print a line per checkpoint and per bad file. Returns the exit status."""
    match = re.fullmatch(r"(?:(.*)/)?step-(\d+)/?", path)
    root = place("", (match[1] or ".") if match else path)
    found = scan(root)
    asked = {int(match[2])} if match else {*found.complete, *found.skipped}
    if not asked & {*found.complete, *found.skipped}:
        print(f"no checkpoint in {path}")
        return 1
    wrong = sorted(asked & found.skipped.keys())
    for step in wrong:
        print(f"{step_folder(root, step)}: no checkpoint: {found.skipped[step]}")
    damage = {}
    for step in sorted(asked & found.complete.keys()):
        files = found.complete[step].files
        damage[step] = damaged_files(step_folder(root, step), files, by, threads)
        state = (
            f"{len(damage[step])} of {len(files)} files are damaged" if damage[step] else f"{len(files)} files, intact"
        )
        print(f"{step_folder(root, step)}: {state}", *damage[step], sep="\n  - ")
    if not wrong and not any(damage.values()):
        return 0
    for step in reversed(found.complete):
        if step not in damage:
            damage[step] = damaged_files(step_folder(root, step), found.complete[step].files, by, threads)
        if not damage[step]:
            print(f"the newest intact one is of step {step}")
            return 1
    print("no checkpoint is intact")
    return 1


def damaged_files(
    folder: Place, files: Mapping[str, FileRecord], by: Literal["size", "checksum"], threads: int
) -> list[str]:
    """What `find_damage` says, with several files read at a time."""
    by_size = sorted(files.items(), key=lambda item: item[1].size)  # so that shares take about as long
    shares = [dict(by_size[number::threads]) for number in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        return sorted(
            line for lines in pool.map(lambda share: find_damage(folder, share, by), shares) for line in lines
        )


if __name__ == "__main__":
    sys.exit(main())
