"""TOML files with `extends`, found, read and flattened to `section.field` values."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from titan.config.given import Given
from titan.config.nearest import nearest
from titan.config.toml_text import shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIGS = "train_configs"
REPOSITORY = Path(__file__).resolve().parents[2]


class BadFile(Exception):
    """A file that can't be read; the text names it, where it was looked for, and why."""


def find_config(name: str) -> Path:
    """The file that `--job.config_file NAME` means: as given, else in train_configs/ here, else in titan's own.

    Raises:
        BadFile: there is none, with the places and the near file names.
    """
    folders = [Path(CONFIGS), REPOSITORY / CONFIGS]
    places = [Path(name), *(folder / name for folder in folders)]
    beside = [] if Path(name).parent == Path() else [Path(name).parent]
    return _first_file(f"job.config_file = {name}", places, [*beside, *folders])


def read_files(path: Path, is_key: Callable[[str], bool]) -> tuple[list[list[Given]], list[str]]:
    """The values of a file and of all that it extends.

    Args:
        is_key: says whether a name such as `training.steps` is a key, so that a table there isn't a section.

    Returns:
        One list of values per file, the most basic file first; and a text for each file that is missing, unreadable,
        no TOML, or extends itself.
    """
    tables: list[tuple[Path, dict[str, object]]] = []
    mistakes: list[str] = []
    _read_with_bases(path, (), tables, mistakes)
    return [list(_flatten(table, _display(file), is_key)) for file, table in tables], mistakes


def _read_with_bases(
    path: Path, extended_by: tuple[Path, ...], tables: list[tuple[Path, dict[str, object]]], mistakes: list[str]
) -> None:
    """Add the file's table to `tables`, after those of the files that it extends."""
    try:
        _refuse_cycle(path, extended_by)
        table = _read(path)
    except BadFile as error:
        mistakes.append(str(error))
        return
    for base in _bases(path, table.pop("extends", []), mistakes):
        _read_with_bases(base, (*extended_by, path), tables, mistakes)
    tables.append((path, table))


def _refuse_cycle(path: Path, extended_by: tuple[Path, ...]) -> None:
    if path.resolve() in [file.resolve() for file in extended_by]:
        chain = " -> ".join(_display(file) for file in (*extended_by, path))
        raise BadFile(f"{_display(path)}: extends itself: {chain}")


def _bases(path: Path, extends: object, mistakes: list[str]) -> list[Path]:
    """The files that `extends` names, relative to the file that it is in."""
    names = [extends] if isinstance(extends, str) else extends
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        mistakes.append(f"{_display(path)}: extends = {shown(extends)}: expected a file name or a list of file names")
        return []
    found = []
    for name in names:
        try:
            place = path.parent / name
            found.append(_first_file(f"{_display(path)}: extends = {shown(name)}", [place], [place.parent]))
        except BadFile as error:
            mistakes.append(str(error))
    return found


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise BadFile(f"{_display(path)}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line_number = error.object[: error.start].count(b"\n") + 1
        raise BadFile(f"{_display(path)}, line {line_number}: not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        reason, _, place = str(error).partition(" (at ")
        line = re.match(r"line \d+, column \d+", place)
        where = line.group() if line else "at its end"
        raise BadFile(f"{_display(path)}, {where}: {reason}") from None


def _flatten(table: dict[str, object], origin: str, is_key: Callable[[str], bool], prefix: str = "") -> Iterator[Given]:
    """Tables become prefixes. An empty table gives one value that is a table, so that its name is looked at too."""
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and value and not is_key(key):
            yield from _flatten(value, origin, is_key, f"{key}.")
        else:
            yield Given(key, value, origin)


def _first_file(asked: str, places: list[Path], folders: list[Path]) -> Path:
    """The first of these places that is a file; when none is, the message has the names in `folders` that are near."""
    for place in places:
        if os.path.isfile(place):  # unlike Path.is_file, False for names that no file can have
            return place
    tried = list(dict.fromkeys(_display(place) for place in places))
    here = sorted({file.name for folder in folders for file in folder.glob("*.toml")} - {"pyproject.toml"})
    near = nearest(places[0].name, here)
    known = f"; did you mean {near}?" if near else f"; there are {', '.join(here)}" if here else ""
    raise BadFile(f"{asked}: no such file; looked for {', '.join(tried)}{known}")


def _display(path: Path) -> str:
    """The path as one would type it here, without `a/../`."""
    full = os.path.normpath(path.absolute())
    short = os.path.relpath(full)
    return full if short.startswith(os.pardir) else short
