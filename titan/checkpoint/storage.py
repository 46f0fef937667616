"""Where checkpoints lie: a folder of a file system, or a prefix in an object store, under any URL that fsspec knows.

Both are used like a `pathlib.Path`. What the two do in different ways, safe writes and removals, are functions here.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

from titan.config.errors import UserError


class ObjectPath:
    """A name in an object store, such as s3://bucket/run, with the methods of `pathlib.Path` that checkpoints need.

    Objects have no folders: a folder is there as long as something lies in it.

    Raises:
        UserError: no file system is known by that URL, or its package isn't installed.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._fs, self._key = _open_file_system(self._url)

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self._url}/{name}")

    def __str__(self) -> str:
        return self._url

    @property
    def name(self) -> str:
        return self._url.rsplit("/", 1)[1]

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self._url.rsplit("/", 1)[0])

    def exists(self) -> bool:
        return bool(self._fs.exists(self._key))

    def is_dir(self) -> bool:
        return bool(self._fs.isdir(self._key))

    def iterdir(self) -> Iterator[ObjectPath]:
        for entry in self.entries():
            yield self / _last_part(entry["name"])

    def entries(self) -> list[dict[str, Any]]:
        """What lies here, with names, types and sizes, by one request."""
        try:
            found: list[dict[str, Any]] = self._fs.ls(self._key, detail=True)
        except FileNotFoundError:
            return []
        return [entry for entry in found if entry["name"].strip("/") != self._key.strip("/")]

    def open(self, mode: str) -> IO[bytes]:
        return cast("IO[bytes]", self._fs.open(self._key, mode))

    def read_text(self, encoding: str = "utf-8") -> str:
        return bytes(self._fs.cat_file(self._key)).decode(encoding)

    def write_bytes(self, content: bytes) -> None:
        """Write all of it or nothing."""
        self._fs.pipe_file(self._key, content)

    def rename(self, target: ObjectPath) -> None:
        """Copy a small object, then delete it: stores can't rename."""
        self._fs.pipe_file(target._key, self._fs.cat_file(self._key))
        self._fs.rm_file(self._key)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._fs.rm_file(self._key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_all(self, names: Iterable[str]) -> None:
        """Delete these objects within this folder, by as few requests as the store allows."""
        if keys := [f"{self._key}/{name}" for name in names]:
            self._fs.rm(keys)


Place: TypeAlias = "Path | ObjectPath"


def is_url(text: str) -> bool:
    return "://" in text


def place(dump_folder: str | Path, folder: str) -> Place:
    """Where `checkpoint.folder` is: a folder within the dump folder, or the URL that it is.

    Raises:
        UserError: no file system is known by that URL, or its package isn't installed.
    """
    return at(folder) if is_url(folder) else Path(dump_folder) / folder


def at(path: str) -> Place:
    """A path of a file system, or what a URL names.

    Raises:
        UserError: no file system is known by that URL, or its package isn't installed.
    """
    if path.startswith("file://"):
        return Path(path.removeprefix("file://"))
    return ObjectPath(path) if is_url(path) else Path(path)


def _open_file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path within it. One per store: fsspec keeps it.

    Without fsspec's cache of listings, which would hide what other processes write.
    """
    from fsspec.core import url_to_fs

    try:
        file_system, key = url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: {error}; for s3:// run pip install 'titan[s3]'") from error
    return file_system, str(key)


def _last_part(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]


def file_sizes(folder: Place) -> dict[str, int]:
    """The files in a folder and their bytes; none when it isn't there."""
    if isinstance(folder, ObjectPath):
        return {_last_part(entry["name"]): entry["size"] for entry in folder.entries() if entry["type"] == "file"}
    paths = folder.iterdir() if folder.is_dir() else ()
    return {path.name: path.stat().st_size for path in paths if path.is_file()}


def write_whole(file: Place, text: str) -> None:
    """Write a text file in one moment: it is there whole and on the disk, or not at all."""
    if isinstance(file, ObjectPath):
        file.write_bytes(text.encode())
        return
    draft = file.with_name(f"{file.name}.draft")
    with draft.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    draft.rename(file)
    sync_folder(file.parent)


def write_empty(file: Place) -> None:
    """Make a file that only has to be there."""
    if isinstance(file, ObjectPath):
        file.write_bytes(b"")
        return
    file.touch()
    sync_folder(file.parent)


def rename(source: Place, target: Place) -> None:
    """Rename a file, or in a file system a folder. A store has both names for a moment."""
    if isinstance(source, ObjectPath):
        source.rename(cast(ObjectPath, target))
        return
    source.rename(cast(Path, target))
    sync_folder(source.parent)


def make_folder(folder: Place) -> None:
    """Make a folder and those above it; object stores need none."""
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        sync_folder(folder.parent.parent)  # the parent itself may be new


def remove_file(file: Place) -> None:
    """Delete a file that may be missing, so that it doesn't come back after a power cut."""
    file.unlink(missing_ok=True)
    if isinstance(file, Path):
        sync_folder(file.parent)


def remove_folder(folder: Place, last: str) -> None:
    """Delete a folder and all that is in it, the file `last` after all others."""
    if isinstance(folder, ObjectPath):
        names = file_sizes(folder)
        folder.remove_all(name for name in names if name != last)
        folder.remove_all(name for name in names if name == last)
        return
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != last:
            path.unlink()
    sync_folder(folder)
    (folder / last).unlink(missing_ok=True)
    folder.rmdir()
    sync_folder(folder.parent)


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
