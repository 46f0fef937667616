"""manifest.json, written last, so that a folder that has it is complete; and how a damaged file shows."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

MANIFEST_FILE = "manifest.json"
TRAIN_STATE_FILE = "train_state.json"

_FORMAT = 1
_CHUNK = 4 * 2**20


class ManifestError(Exception):
    """A folder without a manifest that can be trusted; the message says why."""


@dataclass(frozen=True)
class FileRecord:
    """A file as it was when it was saved: its bytes and their SHA-256 in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        step: the optimizer step after which it was saved.
        previous: the step of the same run that was loaded or saved before it; None for the first one. Later steps than
            that, other than this one, are of a time line that was left.
        time: when, in UTC, ISO 8601.
        titan, torch: versions.
        world_size, layout: the ranks, and the degrees of parallelism by name.
        config: the resolved config, as TOML.
        files: every other file by name.
        model_only: it holds the model without what a resume needs beside it.
    """

    step: int
    previous: int | None
    time: str
    titan: str
    torch: str
    world_size: int
    layout: dict[str, int]
    config: str
    files: dict[str, FileRecord]
    model_only: bool = False

    @property
    def total_bytes(self) -> int:
        return sum(record.size for record in self.files.values())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make the checkpoint in `folder` complete, in one moment: the manifest is there whole, or not at all."""
    text = json.dumps({"format": _FORMAT, **dataclasses.asdict(manifest)}, indent=1)
    draft = folder / f"{MANIFEST_FILE}.draft"
    write_synced(draft, text)
    draft.rename(folder / MANIFEST_FILE)
    sync_folder(folder)


def read_manifest(folder: Path, step: int) -> Manifest:
    """The manifest of the checkpoint of `step` in `folder`.

    Raises:
        ManifestError: there is none, it is broken, of a format that this version doesn't know, or of another step.
    """
    try:
        content = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ManifestError(f"it has no {MANIFEST_FILE}: half a save, or not titan's") from None
    except (OSError, ValueError) as error:
        raise ManifestError(f"its {MANIFEST_FILE} can't be read ({error})") from error
    version = content.pop("format", None) if isinstance(content, dict) else None
    if version != _FORMAT:
        raise ManifestError(f"its {MANIFEST_FILE} has format {version}, this titan reads {_FORMAT}")
    try:
        manifest = _from_json(content)
    except (AttributeError, TypeError, ValueError) as error:
        raise ManifestError(f"its {MANIFEST_FILE} is incomplete or broken ({error})") from error
    if manifest.step != step:
        raise ManifestError(f"its {MANIFEST_FILE} is of step {manifest.step}")
    return manifest


def _from_json(content: dict[str, Any]) -> Manifest:
    manifest = Manifest(**content)
    records = {name: FileRecord(**record) for name, record in content["files"].items()}
    if not all(isinstance(r.size, int) and isinstance(r.sha256, str) for r in records.values()):
        raise ValueError("a file without size and checksum")
    if TRAIN_STATE_FILE not in records:
        raise ValueError(f"{TRAIN_STATE_FILE} isn't listed")
    return dataclasses.replace(manifest, files=records)


def record_files(paths: Sequence[Path]) -> dict[str, FileRecord]:
    """Sizes and checksums of files as they are now, by name."""
    return {path.name: FileRecord(path.stat().st_size, _sha256(path)) for path in paths}


def find_damage(folder: Path, files: Mapping[str, FileRecord], verify: Literal["size", "checksum"]) -> list[str]:
    """A text for each file that is missing or not as it was saved: its name, what was expected and what was found."""
    damage = []
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            damage.append(f"{name}: {record.size} bytes expected, the file is missing")
        elif (size := path.stat().st_size) != record.size:
            damage.append(f"{name}: {record.size} bytes expected, {size} found")
        elif verify == "checksum" and (found := _sha256(path)) != record.sha256:
            damage.append(f"{name}: SHA-256 {record.sha256} expected, {found} found")
    return damage


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_synced(path: Path, text: str) -> None:
    """Write a text file that is on the disk, not only in its cache, when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames and new files within `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems can't sync a folder; they order such changes themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def titan_version() -> str:
    """The installed titan's."""
    try:
        return metadata.version("titan")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "not installed"
