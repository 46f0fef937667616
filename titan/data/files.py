"""The files that `training.dataset_path` names: a file, a folder or a glob.

Files are (name within the dataset, path) pairs, sorted by name, so that no file system's own order matters.
"""

import glob
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from titan.config.errors import UserError
from titan.config.job_config import Training

Files = list[tuple[str, Path]]

_ENDINGS = {
    "text": (".txt", ".text", ".md"),
    "json": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
}
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip")


def find_files(training: Training) -> Files:
    """The files at `training.dataset_path` that dataset text, json or parquet reads.

    Raises:
        UserError: there is none, or one is compressed or of another dataset's format.
    """
    kind, path = training.dataset, training.dataset_path
    if path is None:
        raise UserError(f"training.dataset = {kind!r} needs training.dataset_path: a file, a folder or a glob.")
    place = Path(path).expanduser()
    if place.is_file():
        files = [(place.name, place)]
    elif place.is_dir():
        files = [(name, file) for name, file in walk(place) if ending(file) in _ENDINGS[kind]]
    else:
        files = _glob(str(place))
    if not files:
        raise UserError(
            f"training.dataset_path = {path!r} matches no {kind} file. Looked at {place.absolute()} for "
            f"{'files ending in ' + ', '.join(_ENDINGS[kind]) if place.is_dir() else 'a file, a folder or a glob'}."
        )
    for _, file in files:
        _refuse_unsuitable(kind, file)
    return files


def walk(folder: Path, skip: Callable[[str], bool] = lambda name: False) -> Files:
    """The files below a folder that aren't hidden, without the folders to skip. Links are followed, but not up."""
    found: Files = []
    for parent, names in _walk_folders(folder, skip):
        files = [parent / name for name in names if not name.startswith(".")]
        found += [(file.relative_to(folder).as_posix(), file) for file in files if file.is_file()]
    return sorted(found)


def matching_paths(pattern: str) -> Iterator[Path]:
    """What a glob matches, some of it perhaps twice. A part `**` is any folders below, as `walk` follows them.

    (glob's own follows links upwards too, around and around until the system refuses the path.)
    """
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from map(Path, glob.iglob(pattern))
        return
    deep = parts.index("**")
    for top in glob.iglob(str(Path(*parts[:deep]))):
        for folder, _ in _walk_folders(Path(top)):
            yield from matching_paths(str(Path(glob.escape(str(folder)), *(parts[deep + 1 :] or ("*",)))))


def ending(file: Path) -> str:
    """The ending that tells a file's format, that of a compressed one without the compression's."""
    suffix = file.suffix.lower()
    return Path(file.stem).suffix.lower() if suffix in _COMPRESSED else suffix


def files_fingerprint(files: Files, *settings: object) -> str:
    """A hash of the settings and of the files' names and sizes; not of their place or age."""
    parts = [*settings, *((name, file.stat().st_size) for name, file in files)]
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _walk_folders(top: Path, skip: Callable[[str], bool] = lambda name: False) -> Iterator[tuple[Path, list[str]]]:
    """A folder and those below that aren't hidden, each with the names of its files. Links are followed, but not up."""
    for parent, folders, names in os.walk(top, followlinks=True):
        here = Path(parent).resolve()
        folders[:] = [name for name in folders if not name.startswith(".") and not skip(name)]
        folders[:] = [name for name in folders if not here.is_relative_to(Path(parent, name).resolve())]
        yield Path(parent), names


def _glob(pattern: str) -> Files:
    """The files that a pattern matches, named from the last folder that has no wildcard in its name.

    Each is there once, by the name with the fewest folders when links give it several.
    """
    fixed = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts))
    names = {match.relative_to(fixed).as_posix(): match for match in matching_paths(pattern) if match.is_file()}
    by_depth = sorted(names.items(), key=lambda item: (item[0].count("/"), item[0]))
    once = {match.resolve(): (name, match) for name, match in reversed(by_depth)}
    return sorted(once.values())


def _refuse_unsuitable(kind: str, file: Path) -> None:
    """Raise UserError for a file that is compressed or of another dataset's format."""
    if file.suffix.lower() in _COMPRESSED:
        raise UserError(
            f"{file} is compressed, and rows of a compressed file can't be read by number. Decompress it first, for "
            "example with `gunzip -k` or `zstd -d`."
        )
    for other, endings in _ENDINGS.items():
        if other != kind and ending(file) in endings:
            raise UserError(
                f"training.dataset = {kind!r} but {file} is a {other} file. Set training.dataset = {other!r}, or "
                f"narrow training.dataset_path, for example to a glob that ends in *{_ENDINGS[kind][0]}."
            )
