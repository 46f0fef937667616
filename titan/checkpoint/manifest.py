"""manifest.json, written last, so that a folder that has it is complete; and how a damaged file shows."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from titan.checkpoint.storage import Place, file_sizes, write_whole

if TYPE_CHECKING:
    from typing_extensions import Buffer

MANIFEST_FILE = "manifest.json"
TRAIN_STATE_FILE = "train_state.json"

_FORMAT = 1
_OWN_CHECKSUM = "sha256"
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


def write_manifest(folder: Place, manifest: Manifest) -> None:
    """Make the checkpoint in `folder` complete, in one moment: the manifest is there whole, or not at all."""
    write_whole(folder / MANIFEST_FILE, _text({"format": _FORMAT, **dataclasses.asdict(manifest)}))


def _text(content: Mapping[str, Any]) -> str:
    """The one text of a manifest with this content; its own checksum is the last field."""
    digest = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps({**content, _OWN_CHECKSUM: digest}, indent=1)


def read_manifest(folder: Place, step: int) -> Manifest:
    """The manifest of the checkpoint of `step` in `folder`.

    Raises:
        ManifestError: there is none, it is broken, of a format that this version doesn't know, or of another step.
        OSError: the storage can't be reached.
    """
    try:
        text = (folder / MANIFEST_FILE).read_text(encoding="utf-8")
        content = json.loads(text)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ManifestError(f"it has no {MANIFEST_FILE}: half a save, or not titan's") from None
    except ValueError as error:
        raise ManifestError(f"its {MANIFEST_FILE} can't be read ({error})") from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != _FORMAT:
        raise ManifestError(f"its {MANIFEST_FILE} has format {version}, this titan reads {_FORMAT}")
    content.pop(_OWN_CHECKSUM, None)
    if text != _text(content):  # so that no byte of it can change unseen, not even white space
        raise ManifestError(f"its {MANIFEST_FILE} is incomplete or broken (it doesn't match its own checksum)")
    del content["format"]
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


class Recorder:
    """Finds the record of bytes that pass by, such as those of a file that is being written."""

    def __init__(self) -> None:
        self.size = 0
        self._digest = hashlib.sha256()

    def add(self, data: Buffer) -> None:
        self._digest.update(data)
        self.size += memoryview(data).nbytes

    def record(self) -> FileRecord:
        return FileRecord(self.size, self._digest.hexdigest())


def record_of(content: bytes) -> FileRecord:
    recorder = Recorder()
    recorder.add(content)
    return recorder.record()


def find_damage(folder: Place, files: Mapping[str, FileRecord], verify: Literal["size", "checksum"]) -> list[str]:
    """A text for each file that is missing or not as it was saved: its name, what was expected and what was found."""
    sizes = file_sizes(folder)
    return [damage for name in files if (damage := _damage(folder / name, files[name], sizes.get(name), verify))]


def _damage(file: Place, expected: FileRecord, size: int | None, verify: Literal["size", "checksum"]) -> str | None:
    if size is None:
        return f"{file.name}: {expected.size} bytes expected, the file is missing"
    if size != expected.size:
        return f"{file.name}: {expected.size} bytes expected, {size} found"
    if verify == "checksum" and (found := _read(file)) != expected:
        return f"{file.name}: SHA-256 {expected.sha256} expected, {found.sha256} found"
    return None


def _read(file: Place) -> FileRecord:
    recorder = Recorder()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            recorder.add(chunk)
    return recorder.record()
