"""Every name that a file or a command line may use: settings, older names, and keys that can't act yet."""

from __future__ import annotations

from titan.config.fields import all_settings, sections
from titan.config.given import Given
from titan.config.legacy import RENAMES, find_rename
from titan.config.nearest import nearest, nearest_key
from titan.config.not_built import NEVER, NOT_BUILT, find_missing


def is_key(name: str) -> bool:
    """It is a key's name, today's or an older one."""
    return name in all_settings() or find_missing(name) is not None or find_rename(name) is not None


def is_switch(key: str) -> bool:
    """The key takes true or false, under today's name or an older one."""
    if key in all_settings():
        return all_settings()[key].hint is bool
    row = find_rename(key)
    if row is not None and row.old != row.new:
        return row.hint is bool or (row.hint is None and is_switch(row.new))
    missing = find_missing(key)
    # The type of a key that matters only beside another isn't known: any value of it is accepted, so this one too.
    return missing is not None and (not missing.harmless or isinstance(missing.harmless[0], bool))


def todays_key(key: str) -> str:
    """The key itself, or what it is called today."""
    row = find_rename(key)
    return row.new if row else key


def is_empty_section(given: Given) -> bool:
    """It is a known section in which nothing is set."""
    return given.value == {} and any(key.startswith(f"{given.key}.") for key in _known_keys())


def explain_unknown(given: Given) -> tuple[str, list[str]]:
    """Why a name is wrong and which one was probably meant.

    Returns:
        (the mistake, the settings whose values are therefore in doubt).
    """
    if given.key in sections():
        problem = "is a section" if given.from_text else f"is a section; write [{given.key}] and its keys below it"
        return f"{given}: {problem}", [key for key in all_settings() if key.startswith(f"{given.key}.")]
    if given.value == {}:
        found = nearest(given.key, dict.fromkeys([*sections(), *(key.rpartition(".")[0] for key in _known_keys())]))
        return f"{given.origin}: [{given.key}]: no such section" + (f"; did you mean [{found}]?" if found else ""), []
    kind = "option" if given.from_text else "key"
    found = nearest_key(given.key, _known_keys() if given.from_text else [*_known_keys(), "extends"])
    if found is None:
        return f"{given}: no such {kind}; the sections are {', '.join(sections())}", []
    today = todays_key(found)
    meant = f"--{today}" if given.from_text else f"{today} at the top of the file" if today == "extends" else today
    return f"{given}: no such {kind}; did you mean {meant}?", [today]


def _known_keys() -> list[str]:
    """All that a misspelt name may mean; settings first, since of two that are as near the first is taken."""
    return [*all_settings(), *NOT_BUILT, *(row.old for row in RENAMES if row.old not in NOT_BUILT), *NEVER]
