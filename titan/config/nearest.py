"""Which known name did the user probably mean?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that looks most like this one, whatever its case and underscores; None when none does."""
    plain: dict[str, str] = {}
    for candidate in known:
        plain.setdefault(_plain(candidate), candidate)
    found = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing when no known name is near."""
    found = nearest(name, known)
    return f"; did you mean {found}?" if found else ""


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The known `section.field` that was probably meant by this one.

    A field that exists under that very name elsewhere comes first (a key in the wrong section, a misspelt section),
    then a near name in the same section, then a near name anywhere.
    """
    keys = list(known)
    section, _, name = key.rpartition(".")
    same_name = [candidate for candidate in keys if candidate.rpartition(".")[2] == name]
    if same_name:
        return max(same_name, key=lambda candidate: _likeness(section, candidate.rpartition(".")[0]))
    in_section = {
        candidate.rpartition(".")[2]: candidate for candidate in keys if candidate.rpartition(".")[0] == section
    }
    found = nearest(name, in_section)
    if found:
        return in_section[found]
    by_name = {candidate.rpartition(".")[2]: candidate for candidate in reversed(keys)}
    found = nearest(name, by_name, cutoff=0.75)
    return by_name[found] if found else nearest(key, keys)


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, _plain(one), _plain(other)).ratio()
