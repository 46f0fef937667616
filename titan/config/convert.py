"""One value, from a TOML file or from the command line, made into the type that its field asks for."""

from __future__ import annotations

import math
import types
from dataclasses import MISSING
from typing import Any, Literal, Union, get_args, get_origin

from titan.config.fields import Setting, keys_of, table_of
from titan.config.nearest import nearest
from titan.config.parse_text import PARSERS, Mismatch, parse
from titan.config.toml_text import shown

LARGEST_INT = 2**63 - 1  # of int64, which torch keeps numbers in


class WrongValue(ValueError):
    """The value doesn't fit; the text says what was expected."""


class WrongTables(WrongValue):
    """Tables of a list don't fit.

    Attributes:
        mistakes: a text for each, such as `table 2: lr_factor = "x": expected a finite number`.
    """

    def __init__(self, mistakes: list[str]) -> None:
        super().__init__("; ".join(mistakes))
        self.mistakes = mistakes


class Bare:
    """Stands for the missing value of an option given without one, such as `--metrics.enable_tensorboard`."""


BARE = Bare()


def convert(value: object, setting: Setting, *, from_text: bool) -> Any:
    """The value as the setting's type, within its bounds.

    Args:
        value: what TOML's reader made of it, or the command line's text (or BARE).
        from_text: it is from the command line.

    Raises:
        WrongValue: it has another type, isn't one of the choices, or is out of bounds; WrongTables in a list of tables.
    """
    optional, hint = _unwrap(setting.hint)
    if optional and value == "":
        return None
    if value is BARE:
        if hint is not bool:
            raise WrongValue(f"needs a value: expected {expected(setting)}")
        return True
    try:
        result = _typed(parse(value, hint) if from_text and isinstance(value, str) else value, hint)
    except Mismatch as error:
        wrong, wanted = error.args or (value, hint)
        raise WrongValue(f"expected {expected(setting)}{_fix(wrong, wanted, from_text)}") from None
    if isinstance(result, (int, float)) and not isinstance(result, bool) and not _within(result, setting):
        raise WrongValue(f"expected {expected(setting)}")
    if (table := table_of(hint)) is not None:
        return _tables(result, table)
    return result


def _tables(given: list[dict[str, object]], table: type) -> list[Any]:
    """Each table as the dataclass, or all mistakes of all of them."""
    mistakes: list[str] = []
    made = []
    for number, entries in enumerate(given, start=1):
        values, wrong = _keys(entries, keys_of(table))
        mistakes += [f"table {number}: {mistake}" for mistake in wrong]
        if not wrong:
            made.append(table(**values))
    if mistakes:
        raise WrongTables(mistakes)
    return made


def _keys(entries: dict[str, object], known: dict[str, Setting]) -> tuple[dict[str, Any], list[str]]:
    """The values of one table by key, and its mistakes."""
    values: dict[str, Any] = {}
    mistakes = []
    doubtful = set(entries)  # a key that is there in another spelling isn't missing
    for name, value in entries.items():
        if name not in known:
            found = nearest(name, known)
            doubtful.add(found or "")
            fix = f"did you mean {found}?" if found else f"the keys are {', '.join(known)}"
            mistakes.append(f"{name} = {shown(value)}: no such key; {fix}")
            continue
        try:
            values[name] = convert(value, known[name], from_text=False)
        except WrongValue as error:
            mistakes.append(f"{name} = {shown(value)}: {error}")
    for name, setting in known.items():
        if setting.default is MISSING and name not in doubtful:
            mistakes.append(f"{name} is missing")
    return values, mistakes


def expected(setting: Setting) -> str:
    """The setting's type and bounds in words, such as `a whole number of at least 1, or -1`."""
    _, hint = _unwrap(setting.hint)
    bounds = [
        f"{word} {_number(bound)}"
        for word, bound in (("at least", setting.minimum), ("at most", setting.maximum))
        if bound is not None
    ]
    text = _type_in_words(hint) + (f" of {' and '.join(bounds)}" if bounds else "")
    return text + "".join(f", or {value}" for value in setting.also)


def type_name(hint: Any) -> str:
    """A short type for `--help`, such as INT or fused|foreach."""
    _, hint = _unwrap(hint)
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if table_of(hint) is not None:
        return "TABLES"
    if hint == dict[str, float]:
        return "TABLE"
    if hint == list[list[str]]:
        return "LIST OF LISTS"
    return {bool: "BOOL", int: "INT", float: "FLOAT", str: "TEXT"}.get(hint, "LIST")


def _unwrap(hint: Any) -> tuple[bool, Any]:
    """(may be unset, the type without None)."""
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (part for part in get_args(hint) if part is not type(None))
        return True, inner
    return False, hint


def _typed(value: object, hint: Any) -> Any:
    """The value checked against the type; an int is widened to a float, nothing else changes its type."""
    if get_origin(hint) is list:
        inner = get_args(hint)[0] if table_of(hint) is None else dict
        if not isinstance(value, list):
            raise Mismatch
        return [_typed(item, inner) for item in value]
    if get_origin(hint) is dict:
        if not isinstance(value, dict):
            raise Mismatch
        return {_typed(name, str): _typed(item, get_args(hint)[1]) for name, item in value.items()}
    if get_origin(hint) is Literal:
        if value not in get_args(hint) or not isinstance(value, str):
            raise Mismatch(value, hint)
        return value
    if hint is float and type(value) is int and abs(value) <= LARGEST_INT:
        return float(value)
    if type(value) is not hint or not _representable(value):
        raise Mismatch
    return value


def _representable(value: object) -> bool:
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)  # no TOML file could hold these
    if isinstance(value, int):
        return abs(value) <= LARGEST_INT
    return not isinstance(value, float) or math.isfinite(value)


def _within(number: float, setting: Setting) -> bool:
    if number in setting.also:
        return True
    above = setting.minimum is None or number >= setting.minimum
    return above and (setting.maximum is None or number <= setting.maximum)


def _type_in_words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(hint))
    if get_origin(hint) is list and get_origin(inner := get_args(hint)[0]) is Literal:
        return "a list of " + ", ".join(f'"{choice}"' for choice in get_args(inner))
    if table_of(hint) is not None:
        return "a list of tables"
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a finite number",
        str: "a text",
        list[str]: "a list of texts",
        dict[str, float]: "a table of finite numbers",
    }
    return words.get(hint, "a list of lists of texts")


def _fix(value: object, hint: Any, from_text: bool) -> str:
    """The nearest thing that would have worked, as the end of a sentence."""
    if get_origin(hint) is Literal:
        found = nearest(str(value), get_args(hint))
        return f'; did you mean "{found}"?' if found else ""
    if table_of(hint) is not None and isinstance(value, dict):
        return "; write its name in double brackets, [[ ]]"
    if isinstance(value, str) and not from_text and hint in PARSERS:
        try:
            _typed(parse(value, hint), hint)
        except Mismatch:
            return ""
        return f"; write {value} without quotes"
    return ""


def _number(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)
